"""A model-states file: the model's own copy of its weights, and what is known of the run."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from plait.checkpoint.convert.deepspeed.parts import Part, Parts, joined, whole
from plait.checkpoint.convert.deepspeed.zero import Pickled, evenly
from plait.checkpoint.convert.pickled import Stored, field


def module_of(model: Pickled) -> dict[str, Stored]:
    """The model's state dict, as far as it is tensors. At stage 3 the parameters in it are empty."""
    return {name: tensor for name, tensor in (model.get("module") or {}).items() if isinstance(tensor, Stored)}


def tied_of(model: Pickled) -> dict[str, str]:
    """Names that mean the same parameter as an earlier one."""
    shared = model.get("shared_params")
    if shared is not None:
        return dict(shared)
    owners: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in module_of(model).items():
        owner = owners.setdefault((tensor.begin, tensor.shape, tensor.stride) if tensor.numel else (name,), name)
        if owner != name:
            tied[name] = owner
    return tied


def shapes_of(model: Pickled) -> dict[str, torch.Size]:
    """The trained parameters, where ZeRO noted them."""
    return {name: torch.Size(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}


def untrained(models: Sequence[Pickled], trained: Container[str]) -> Parts:
    """Buffers and frozen parameters, in the precision that the model has them in.

    `models` are the model-states files of all ranks at stage 3, else the only one.
    """
    model = models[0]
    parts: Parts = {}
    tied = tied_of(model)
    frozen = model.get("frozen_param_shapes") or {}
    kept = set(model.get("buffer_names") or ())
    module, shapes = module_of(model), shapes_of(model)
    spread = any(name in module and module[name].shape != shape for name, shape in shapes.items())
    for name, tensor in module.items():
        if f"model.{name}" in trained or name in tied:
            continue
        if name in frozen:
            parts[f"model.{name}"] = _frozen(name, torch.Size(frozen[name]), models)
        elif name in kept or not spread:
            parts[f"model.{name}"] = whole(tensor)
    return parts


def _frozen(name: str, shape: torch.Size, models: Sequence[Pickled]) -> Part:
    flats = [model["frozen_param_fragments"][name] for model in models]
    if flats[0].shape == shape:
        return whole(flats[0])
    each = math.ceil(shape.numel() / len(flats))
    return joined(f"model.{name}", shape, flats, evenly(0, shape.numel(), each, len(flats)))


def dtype_of(model: Pickled) -> str:
    """`fp32`, `bf16` or `fp16`: what the model computed in."""
    words = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    buffers = set(model.get("buffer_names") or ())
    found = {tensor.dtype for name, tensor in module_of(model).items() if name not in buffers}
    return next((word for dtype, word in words.items() if dtype in found), "fp32")


def scaler_of(optimizer: Any) -> dict[str, float] | None:
    """The loss scaler's state, in the words of Plait's; None if there is none."""
    if not isinstance(optimizer, Mapping):
        return None
    scaler = optimizer.get("loss_scaler")
    look = optimizer.get if scaler is None else lambda key, default=None: field(scaler, key, default)
    scale = look("cur_scale")
    if scale is None:
        return None
    clean = look("cur_iter", 0) - look("last_overflow_iter", -1) - 1 if look("last_overflow_iter") is not None else 0
    return {"scale": float(scale), "clean_steps": max(0, int(clean)), "tolerance": int(look("cur_hysteresis", 1))}
