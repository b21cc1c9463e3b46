"""Whole weights on their way to another library: in the names of `transformers`, one after another as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from plait.errors import ModelError
from plait.models import Made

Weights = Iterable[tuple[str, Tensor]]
"""Parameters with their names, each whole."""

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def in_names_of_transformers(weights: Weights, made: Mapping[str, Made] | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `made` describes, each as soon as its parts have come; None: they have those names already.

    A part is held no longer than something is still to be made of it. A `ModelError` where one is of no use, or where
    one never came: another library would go on with other values, and say nothing.
    """
    if made is None:
        yield from weights
        return
    uses: dict[str, list[str]] = {}
    for target, (parts, _) in made.items():
        for part in parts:
            uses.setdefault(part, []).append(target)
    held: dict[str, Tensor] = {}
    waiting = {target: set(parts) for target, (parts, _) in made.items()}
    for name, tensor in weights:
        if name not in uses:
            raise ModelError(f"{name} has no counterpart in transformers; an adapter has to be merged before")
        held[name] = tensor
        for target in uses[name]:
            waiting[target].discard(name)
            if not waiting[target]:
                del waiting[target]
                parts, make = made[target]
                yield target, make(*(held[part] for part in parts))
        for part in [part for part in held if not any(target in waiting for target in uses[part])]:
            del held[part]
    if waiting:
        raise ModelError(f"{min(waiting)} cannot be made: the model in training has no {min(waiting[min(waiting)])}")


def with_own_head(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The same in the names of `transformers`, and a head of its own for a model that uses its embedding as one."""
    embedding, has_head = None, False
    for name, tensor in weights:
        has_head = has_head or name in _HEADS
        if name.endswith(_EMBEDDINGS):
            embedding = tensor
        yield name, tensor
    if not has_head:
        if embedding is None:
            raise ModelError(f"the model has neither a head ({' or '.join(_HEADS)}) nor an embedding to take for one")
        yield _HEADS[0], embedding
