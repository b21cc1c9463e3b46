"""Loading weights from safetensors, one tensor at a time, and translating them between naming schemes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from plait.config import weight_map
from plait.errors import ModelError

Put = Callable[[str, Tensor], None]
"""A function of a parameter's name in the model and its full tensor, which stores the part that this rank needs."""
Translate = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""A function that converts one stored tensor to none, one or several of the model's. Must work on meta tensors too."""


def weight_files(path: str | Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder: from its index file, or its single `model.safetensors`.

    Raise a `ModelError` if there is neither.
    """
    folder = Path(path)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        file_of = weight_map(index, ModelError)
        lost = sorted({file for file in file_of.values() if not (folder / file).is_file()})
        if lost:
            raise ModelError(f"{index} lists files that do not exist: {', '.join(lost)}; copy them too")
        return {name: folder / file for name, file in file_of.items()}
    if single.is_file():
        return dict.fromkeys(_shapes_in(single), single)
    raise ModelError(
        f"no weights in {str(folder)!r}: expected model.safetensors or model.safetensors.index.json. "
        "Save the model with safetensors, or set model.pretrained: false to start from random weights"
    )


def stream_weights(
    model: nn.Module,
    path: str | Path,
    put: Put,
    *,
    translate: Translate,
    may_miss: Sequence[str] = (),
    may_skip: Sequence[str] = (),
) -> tuple[str, ...]:
    """Pass every tensor of a folder to `put`; return the names of parameters that the folder does not have.

    All names and shapes are compared before the first tensor is read; a mismatch raises a `ModelError` that lists them.
    `may_miss` are patterns of parameters that the folder may lack; `may_skip` are patterns of translated names that the
    model may lack. At most one stored tensor is in memory at a time.
    """
    files = weight_files(path)
    expected, aliases = _expected(model)
    filled: dict[str, str] = {}  # parameter → the stored name that fills it
    problems: list[tuple[str, str]] = []
    shapes = {file: _shapes_in(file) for file in dict.fromkeys(files.values())}
    for stored, file in files.items():
        if stored not in shapes[file]:
            problems.append((stored, f"in the index, but not in {file.name}"))
            continue
        for alias, tensor in translate(stored, torch.empty(shapes[file][stored], device="meta")):
            name = aliases.get(alias, alias)
            if name in expected:
                filled.setdefault(name, stored)
                if expected[name] != tensor.shape:
                    problems.append((stored, f"shape {tuple(tensor.shape)}, model has {tuple(expected[name])}"))
            elif not _matches(alias, may_skip):
                problems.append((stored, "unexpected: the model has no such parameter"))
    missing = [name for name in expected if name not in filled]
    problems += [(name, "missing from the folder") for name in missing if not _matches(name, may_miss)]
    if problems:
        raise ModelError(f"the weights in {str(path)!r} do not fit the model:\n{_table(problems)}")

    for stored, file in files.items():
        if stored not in filled.values():
            continue
        with safe_open(file, framework="pt") as reader:
            for alias, tensor in translate(stored, reader.get_tensor(stored)):
                name = aliases.get(alias, alias)
                if filled.get(name) == stored:
                    put(name, tensor)
    return tuple(missing)


def _expected(model: nn.Module) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """Return the shapes of parameters and persistent buffers by name, and further names of tied ones → the first."""
    first: dict[int, str] = {}
    shapes, aliases = {}, {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            shapes[name] = tensor.shape
    return shapes, aliases


def _shapes_in(path: Path) -> dict[str, list[int]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy it again") from error


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _table(problems: list[tuple[str, str]], limit: int = 20) -> str:
    width = max(len(name) for name, _ in problems[:limit])
    lines = [f"  {name:<{width}}  {what}" for name, what in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more")
    return "\n".join(lines)


class Made(NamedTuple):
    """How to compute a tensor of one naming scheme from those of another: call `make` with the tensors named `sources`.

    `make` takes full (not sharded) tensors, and must work on meta tensors too.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor]


def same(tensor: Tensor) -> Tensor:
    """Return the tensor itself: a `Made.make` for a tensor that only has another name."""
    return tensor


def by_translation(translate: Translate, shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """Return how to compute each tensor that `translate` gives for stored tensors of these names and shapes."""
    made: dict[str, Made] = {}
    for stored, shape in shapes.items():
        for index, (name, _) in enumerate(translate(stored, torch.empty(shape, device="meta"))):
            made.setdefault(name, Made((stored,), partial(_piece, translate, stored, index)))
    return made


def _piece(translate: Translate, stored: str, index: int, tensor: Tensor) -> Tensor:
    return list(translate(stored, tensor))[index][1]
