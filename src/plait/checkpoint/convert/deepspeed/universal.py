"""Universal checkpoints: a folder for every parameter, with a file for its weights and one for each state."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.convert.deepspeed.parts import Part, Parts, number, whole
from plait.checkpoint.convert.deepspeed.states import shapes_of, tied_of
from plait.checkpoint.convert.deepspeed.zero import Pickled
from plait.checkpoint.convert.pickled import Stored, open_file
from plait.errors import CheckpointError

FRESH = "plait_fresh"
"""Marks a state that nobody made: zeros for a parameter that has not been trained, should DeepSpeed train it."""


def universal(folder: Path, model: Pickled, common: Any, besides: Container[str]) -> Parts:
    """What lies in the folder `zero`, but for the entries `besides`, which are known better from elsewhere.

    `common` is the state of the optimizer as a whole.
    """
    shapes, tied = shapes_of(model), tied_of(model)
    there = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and (path / "fp32.pt").is_file()]
    if missing := [name for name in shapes if name not in set(there)]:
        raise CheckpointError(f"{folder} lacks the folder, or the fp32.pt in it, of {', '.join(missing[:8])}")
    parts: Parts = {}
    other = [name for name in there if name not in shapes and name not in tied and f"model.{name}" not in besides]
    for name in [*shapes, *other]:
        files = sorted((folder / name).glob("*.pt"))
        states = {path.stem: path for path in files if path.stem not in ("fp32", "step")}
        weights = _tensor(folder / name / "fp32.pt", shapes.get(name))
        assert weights is not None, "weights are never fresh"
        parts[f"model.{name}"] = weights
        kept = {key: _tensor(path, weights.shape) for key, path in states.items()}
        parts |= {f"optim.{name}.{key}": part for key, part in kept.items() if part is not None}
        step = _step(folder / name / "step.pt", common)
        if step is not None and any(part is not None for part in kept.values()):
            parts[f"optim.{name}.step"] = step
    return parts


def _tensor(path: Path, shape: torch.Size | None) -> Part | None:
    content = open_file(path)
    if isinstance(content, Mapping):
        if content.get(FRESH):
            return None
        content = content.get("param")
    if not isinstance(content, Stored):
        raise CheckpointError(f"{path} holds {type(content).__name__}, and a tensor was expected")
    tensor: Stored = content
    if shape is None or tensor.shape == shape:
        return whole(tensor)
    if tensor.numel != shape.numel():
        raise CheckpointError(f"{path} has {tensor.numel} elements; the parameter has the shape {tuple(shape)}")
    # From stage 3 they come flat.
    return Part(shape, tensor.dtype, lambda: tensor.read().reshape(shape))


def _step(path: Path, common: Any) -> Part | None:
    if path.is_file():
        return number(open_file(path))
    if not isinstance(common, Mapping):
        return None
    inner = common.get("optimizer_state_dict")
    first: Mapping[str, Any] = next(iter(inner["state"].values()), {}) if isinstance(inner, Mapping) else {}
    groups = common.get("param_groups") or [{}]
    return number(first.get("step", groups[0].get("step", common.get("base_optimizer_state_step"))))
