"""Whether Triton is here, and when its kernels are for a tensor.

A kernel stands beside its plain twin. It is taken on CUDA; elsewhere the twin is, unless Triton's interpreter runs,
which plays kernels on the CPU so that tests can look at them there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from plait.fake_tensors import on_fake_tensors

HAS_TRITON = find_spec("triton") is not None
"""Triton comes with the CUDA builds of torch, not with the CPU build."""


def _would_have_kernels(tensor: Tensor, capability: tuple[int, int] = (0, 0)) -> bool:
    return tensor.is_cuda


@on_fake_tensors(_would_have_kernels)
def has_kernels(tensor: Tensor, capability: tuple[int, int] = (0, 0)) -> bool:
    """Whether kernels that need a compute capability can run on a tensor; a fake one is taken for what it claims."""
    if not tensor.is_cuda:
        return interprets()
    return HAS_TRITON and (capability == (0, 0) or torch.cuda.get_device_capability(tensor.device) >= capability)


def interprets() -> bool:
    """Whether kernels are played by Triton's interpreter."""
    if not HAS_TRITON:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where a kernel over this tensor is launched."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
