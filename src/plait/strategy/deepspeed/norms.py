"""Modules that need fp32 inside a model that DeepSpeed has rounded."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from plait.precision import FP32_MODULES


def widen_norms(model: nn.Module) -> None:
    """Let modules with fp32 statistics compute with parameters of the same kind.

    DeepSpeed rounds every parameter and leaves buffers as they are, and batch norms refuse such a mixture.
    """
    for part in model.modules():
        if isinstance(part, FP32_MODULES):
            part.forward = partial(_with_wide_parameters, part)


def _with_wide_parameters(part: nn.Module, *args: Any) -> Any:
    kept = part._parameters
    part._parameters = {key: None if param is None else param.float() for key, param in kept.items()}  # type: ignore[misc]
    try:
        return type(part).forward(part, *args)
    finally:
        part._parameters = kept
