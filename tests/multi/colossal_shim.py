"""ColossalAI 0.5.0 on the CPU, for tests only: it asks for CUDA in places where any device would do.

An accelerator object with streams that do nothing, and a few functions of `torch.cuda` that it calls by name.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class NullStream:
    """Everything is in order already."""

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class PlainAdamKernel:
    """What its compiled CPU kernel does, in plain torch: the build of that one asks for CUDA."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, decay: float, decoupled: bool) -> None:
        self.decoupled = decoupled

    @classmethod
    def CPUAdamOptimizer(cls, *args: Any) -> PlainAdamKernel:  # noqa: N802
        return cls(*args)

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        corrects: bool,
        param: torch.Tensor,
        grad: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        div_scale: float,
    ) -> None:
        grad = grad.float() if div_scale <= 0 else grad.float() / div_scale
        grad = grad if self.decoupled else grad + decay * param
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if self.decoupled:
            param.mul_(1 - lr * decay)
        root = (second / (1 - beta2**step)).sqrt().add_(eps)
        param.addcdiv_(first, root, value=-lr / (1 - beta1**step))


def pretend_colossalai_has_a_device() -> None:
    """Make ColossalAI take the CPU for a device that it supports; once per process."""
    from colossalai.accelerator import get_accelerator, set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    if getattr(get_accelerator(), "pretends", False):
        return

    class Pretended(CpuAccelerator):  # type: ignore[misc]
        pretends = True

        def __init__(self) -> None:
            super().__init__()
            self._name = "cuda"

        def get_current_device(self) -> torch.device:
            return torch.device("cpu")

        def current_device(self) -> int:
            return 0

        def device_count(self) -> int:
            return 1

        def synchronize(self, device: Any = None) -> None: ...

        def set_device(self, device: Any = None) -> None: ...

        def empty_cache(self) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def Stream(self, *args: Any, **kwargs: Any) -> NullStream:  # noqa: N802
            return NullStream()

        def current_stream(self, device: Any = None) -> NullStream:
            return NullStream()

        def default_stream(self, device: Any = None) -> NullStream:
            return NullStream()

        def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def memory_allocated(self, device: Any = None) -> int:
            return 0

        def max_memory_allocated(self, device: Any = None) -> int:
            return 0

        def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    from colossalai.nn.optimizer import cpu_adam

    set_accelerator(Pretended())
    cpu_adam.CPUAdamLoader.load = lambda self: PlainAdamKernel
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
