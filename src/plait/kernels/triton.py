"""Whether Triton is installed, and on which tensors its kernels can run.

Each kernel has a plain form: a function that computes the same with torch operations. Kernels run on CUDA. Elsewhere
the plain form runs, unless Triton's interpreter is on (`TRITON_INTERPRET=1`), which executes kernels on the CPU, for
tests.
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
    """Whether kernels that need this CUDA compute capability can run on a tensor; for a fake one, if it is on CUDA."""
    if not tensor.is_cuda:
        return interprets()
    return HAS_TRITON and (capability == (0, 0) or torch.cuda.get_device_capability(tensor.device) >= capability)


def interprets() -> bool:
    """Whether Triton's interpreter executes kernels."""
    if not HAS_TRITON:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device of a tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
