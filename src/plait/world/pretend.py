"""CUDA on a machine that has none, for tensors without values.

[Note: pretending to have a GPU] A fake tensor may claim to lie on any device, but autograd asks the C++ side of torch
for that device's streams, and a build or a machine without CUDA has no answer. Two answers are enough. torch lets
Python be the device guard of a backend of its own (PrivateUse1), whose streams and events do nothing; here the same
guard is entered for CUDA. And torch asks its CUDA hooks whether a GPU is there: these are made to say yes. No compiler
is needed, nothing real can run, and all is as before when the block ends. How both are reached, and when that is
refused: [Note: tables of C++], `plait/torch_internals.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from plait.torch_internals import (
    FUSED_ON_CUDA,
    cuda_hooks_say_yes,
    cuda_never_initialized,
    kernels_registered_for_cuda,
    no_gpu_context_for_fake_tensors,
    python_guards_cuda,
)
from plait.world.patch import replaced


@contextmanager
def pretended_cuda(
    *, devices: int = 8, memory: int = 80 * 2**30, capability: tuple[int, int] = (9, 0)
) -> Iterator[None]:
    """Let fake tensors lie on CUDA, until the block ends. Where a GPU is there, nothing is pretended."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(cuda_hooks_say_yes())  # first: it refuses a layout that it does not know
        stack.enter_context(python_guards_cuda())
        if torch.version.cuda is None:
            # Without a CUDA kernel torch would take these operations apart, and a plan would see other memory.
            stack.enter_context(kernels_registered_for_cuda(FUSED_ON_CUDA, _never))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # there are no threads for the device
        for name, value in _python_side(devices, memory, capability).items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(no_gpu_context_for_fake_tensors())
        stack.enter_context(cuda_never_initialized())
        stack.enter_context(replaced(torch, "tensor", _made_on_the_host(torch.tensor)))
        stack.enter_context(replaced(torch.Tensor, "record_stream", lambda self, stream: None))
        yield


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a tensor with values got into a fake world")


def _made_on_the_host(make: Any) -> Any:
    """`torch.tensor` fills its tensor past all modes, and then copies it to the device as if it were real."""

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = make(data, device="cpu", **kwargs)
        if device is None:
            device = torch.empty(0).device  # `torch.get_default_device` would ask for a `torch.tensor`
        return made.to(device).requires_grad_(requires_grad)

    return tensor


class _Event:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing."""

    def wait(self, stream: Any = None) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """No time."""
        return 0.0


class _Stream:
    """A stream that has nothing to do."""

    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing."""

    def wait_event(self, event: Any) -> None:
        """Nothing."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or _Event()

    def synchronize(self) -> None:
        """Nothing."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _python_side(devices: int, memory: int, capability: tuple[int, int]) -> dict[str, Any]:
    """What `torch.cuda` answers."""
    stream = _Stream()
    properties = SimpleNamespace(
        name="a GPU that is not there",
        major=capability[0],
        minor=capability[1],
        total_memory=memory,
        multi_processor_count=132,
    )
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda *_: None,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": lambda _: None,
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (memory, memory),
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
    }
