"""What a DeepSpeed checkpoint holds, one entry at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.convert.pickled import Stored
from plait.errors import CheckpointError


class Part(NamedTuple):
    """One entry: what is known of it, and how its value is put together when it is asked for."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


Parts = dict[str, Part]
"""By the names of a `Source`: `model.<parameter>`, `optim.<parameter>.<key>`."""

Cuts = Callable[[], Iterable[tuple[int, int, int]]]
"""Where the pieces of one parameter lie, in order: (rank, first element, number of elements)."""


def whole(tensor: Stored) -> Part:
    """A tensor that lies in one file as it is."""
    return Part(tensor.shape, tensor.dtype, tensor.read)


def number(value: Any) -> Part | None:
    """A state that is one number, as torch's optimizers keep it; None if it is something else."""
    if isinstance(value, Stored) and value.numel == 1:
        return Part(torch.Size(), value.dtype, lambda: value.read().reshape(()))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Part(torch.Size(), torch.float32, lambda: torch.tensor(float(value)))
    return None


def joined(name: str, shape: torch.Size, flats: Sequence[Stored], cuts: Cuts) -> Part:
    """A tensor whose pieces lie in the flat tensors of several ranks. Only these pieces are read."""

    def read() -> Tensor:
        pieces = list(cuts())
        found = sum(max(0, min(count, flats[rank].numel - start)) for rank, start, count in pieces)
        if found != shape.numel():
            raise CheckpointError(
                f"{name}: the files of {len(flats)} ranks hold {found} of its {shape.numel()} elements; "
                "they are not all of one checkpoint"
            )
        tensor = torch.empty(shape, dtype=flats[0].dtype)
        rest = tensor.view(-1)
        for rank, start, count in pieces:
            flats[rank].fill(rest[:count], start)
            rest = rest[count:]
        return tensor

    return Part(shape, flats[0].dtype, read)


def flat_group(
    name: str,
    shape: torch.Size,
    masters: Sequence[Stored],
    states: Sequence[Mapping[str, Any]],
    step: Any,
    cuts: Cuts,
) -> Parts:
    """A parameter and its optimizer state, cut alike from what each rank keeps as one flat tensor.

    `states` are the ranks' optimizer states of that tensor; `step` counts where these do not.
    """
    parts = {f"model.{name}": joined(f"model.{name}", shape, masters, cuts)}
    for key, first in states[0].items():
        entry = f"optim.{name}.{key}"
        if isinstance(first, Stored) and len(first.shape) == 1 and first.numel >= masters[0].numel:
            parts[entry] = joined(entry, shape, [state[key] for state in states], cuts)
        elif (part := number(first)) is not None:
            parts[entry] = part
        elif isinstance(first, Stored):
            raise CheckpointError(
                f"{entry}: DeepSpeed's optimizer keeps {tuple(first.shape)} for a partition of "
                f"{masters[0].numel} elements, and that cannot be divided among its parameters"
            )
    if states[0] and f"optim.{name}.step" not in parts and (part := number(step)) is not None:
        parts[f"optim.{name}.step"] = part
    return parts
