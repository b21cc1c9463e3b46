"""Mixed precision: the dtypes of a run, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.config import PrecisionConfig, ScalerConfig
from plait.torch_internals import AnyBatchNorm

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

FP32_MODULES: tuple[type[nn.Module], ...] = (AnyBatchNorm,)
"""Modules that stay in fp32: their running statistics are fp32, and their kernels need parameters of that dtype."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The dtypes of computation, gradient reduction and master weights.

    [Note: one meaning of mixed precision]
    Parameters are cast to `compute` before the forward pass. The gradients of each micro-batch are computed in
    `compute`, and summed over micro-batches and ranks in `reduce`; the optimizer updates fp32 master weights. That is
    what `fully_shard` does. Training without it does the same, so that bf16 losses agree between all layouts.
    Autocast is used only so that operations that need fp32, such as softmax and losses, compute in it.
    """

    compute: torch.dtype
    reduce: torch.dtype
    master: bool
    autocast: bool
    cast_inputs: bool
    tf32: bool

    @property
    def mixed(self) -> bool:
        """Whether `compute` is not fp32."""
        return self.compute != torch.float32

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass: autocast to `compute`, or an empty one."""
        if self.mixed and self.autocast:
            return torch.autocast(device.type, dtype=self.compute)
        return nullcontext()


def make_policy(config: PrecisionConfig) -> Policy:
    """Return the policy for the section `precision` of a configuration."""
    return Policy(
        compute=DTYPES[config.compute],
        reduce=DTYPES[config.reduce],
        master=config.master,
        autocast=config.autocast,
        cast_inputs=config.cast_inputs,
        tf32=config.compute == "tf32",
    )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` (a tensor, or nested mappings and sequences) with `function` applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` (a tensor, or nested mappings and sequences) with its floating-point tensors cast to `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


class LossScaler:
    """Loss scaling, which keeps small fp16 gradients representable.

    The loss is multiplied by `scale`, and the gradients are divided by it.

    A dynamic scale is halved at the `hysteresis`-th overflow and at each one after it, and doubled after every `window`
    steps without overflow, which also restores the hysteresis. A static scale never changes.
    """

    def __init__(self, config: ScalerConfig) -> None:
        self.config = config
        self.scale = float(config.static if config.static is not None else 2.0**config.initial_power)
        self._clean_steps = 0
        self.tolerance = config.hysteresis
        """The scale is halved at an overflow when this is 1; otherwise the overflow lowers it by 1."""

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot be reduced any further: it is static, or at its minimum."""
        return self.config.static is not None or self.scale <= self.config.minimum

    def update(self, *, overflow: bool) -> None:
        """Adjust a dynamic scale after a step; `overflow`: its gradients were not finite."""
        config = self.config
        if config.static is not None:
            return
        if overflow:
            self._clean_steps = 0
            if self.tolerance > 1:
                self.tolerance -= 1
            else:
                self.scale = max(self.scale / 2.0, config.minimum)
            return
        self._clean_steps += 1
        if config.consecutive_hysteresis:
            self.tolerance = config.hysteresis
        if self._clean_steps % config.window == 0:
            self.tolerance = config.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "clean_steps": self._clean_steps, "tolerance": self.tolerance}

    def restore(self, state: dict[str, float]) -> None:
        """Load a state from a checkpoint."""
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self.tolerance = int(state["tolerance"])
