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

from plait.torch_internals import has_values

HAS_TRITON = find_spec("triton") is not None
"""Triton comes with the CUDA builds of torch, not with the CPU build."""


def has_kernels(tensor: Tensor) -> bool:
    """Whether kernels can run on such a tensor; one without values is taken for what it says it is."""
    if not has_values(tensor):
        return tensor.is_cuda
    return HAS_TRITON and (tensor.is_cuda or interprets())


def interprets() -> bool:
    """Whether kernels are played by Triton's interpreter."""
    if not HAS_TRITON:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where a kernel over this tensor is launched."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
