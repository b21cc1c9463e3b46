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
"""Modules whose running statistics are fp32 and whose kernels need parameters of the same dtype."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The dtypes of computation, gradient reduction and master weights.

    [Note: one meaning of mixed precision]
    Parameters are cast to `compute` before the forward pass, each micro-batch's gradients come out in
    `compute`, are summed over micro-batches and ranks in `reduce`, and update fp32 weights. That is what
    `fully_shard` does, so the replicated path does the same, and bf16 losses agree between layouts.
    Autocast is added only for operations that need fp32, such as softmax and losses.
    """

    compute: torch.dtype
    reduce: torch.dtype
    master: bool
    autocast: bool
    cast_inputs: bool
    tf32: bool

    @property
    def mixed(self) -> bool:
        """Whether `compute` is a smaller dtype than fp32."""
        return self.compute != torch.float32

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass: autocast, or nothing."""
        if self.mixed and self.autocast:
            return torch.autocast(device.type, dtype=self.compute)
        return nullcontext()


def make_policy(config: PrecisionConfig) -> Policy:
    """The policy of a `precision` section."""
    return Policy(
        compute=DTYPES[config.compute],
        reduce=DTYPES[config.reduce],
        master=config.master,
        autocast=config.autocast,
        cast_inputs=config.cast_inputs,
        tf32=config.compute == "tf32",
    )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to the tensors of a mapping, sequence or single value; leave the rest alone."""
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
    """Cast the floating-point tensors of a mapping, sequence or single value; leave the rest alone."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


class LossScaler:
    """Keeps small gradients representable: the loss is multiplied by `scale`, the gradients divided by it.

    Dynamic: an overflow uses up one unit of hysteresis, and once that is gone halves the scale; `window`
    clean steps double it. Static: the scale never moves.
    """

    def __init__(self, config: ScalerConfig) -> None:
        self.config = config
        self.scale = float(config.static if config.static is not None else 2.0**config.initial_power)
        self._clean_steps = 0
        self.tolerance = config.hysteresis
        """Overflows that remain before the scale is halved."""

    @property
    def at_minimum(self) -> bool:
        """Whether the scale cannot be reduced after an overflow."""
        return self.config.static is not None or self.scale <= self.config.minimum

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after a step."""
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
        """The state for a checkpoint."""
        return {"scale": self.scale, "clean_steps": self._clean_steps, "tolerance": self.tolerance}

    def restore(self, state: dict[str, float]) -> None:
        """Load a state from a checkpoint."""
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self.tolerance = int(state["tolerance"])
