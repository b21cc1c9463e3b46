"""A fake world of any size: this process simulates one rank, with a fake process group and without a GPU.

In a fake world tensors have shapes, dtypes and devices but no values, and collectives return at once. The same code
runs in it as in training. Plans predict memory and time with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.config import RunConfig, resolve_layout
from plait.distributed.ranks import Ranks
from plait.distributed.world import World, make_mesh
from plait.errors import WorldError
from plait.torch_internals import (
    FUSED_ON_CUDA,
    FakeTensorMode,
    aten_grouped_mm,
    aten_local_scalar_dense,
    cuda_device_guard_replaced,
    cuda_never_initialized,
    cuda_reported_available,
    kernels_registered_for_cuda,
    module_apply_replaced,
    name_of_truncated_normal,
    no_gpu_context_for_fake_tensors,
    overload_of,
    schema_of,
    unset_fake_temporarily,
)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` until the block ends."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# CUDA on a machine without a GPU, for fake tensors.
#
# [Note: pretending to have a GPU] A fake tensor may be on any device, but autograd asks torch's C++ code for that
# device's streams, which fails on a machine or in a build without CUDA. Two replacements are enough. First, torch has a
# device guard for backends written in Python (PrivateUse1), whose streams and events do nothing: it is registered for
# CUDA too. Second, torch's CUDA hooks, which say whether there is a GPU, are changed to say yes. No compiler is needed,
# no real kernel can run, and both are undone when the block ends. How torch's C++ tables are changed, and when that
# raises an error: [Note: tables of C++], `plait/torch_internals.py`.


@contextmanager
def fake_cuda(*, devices: int = 8, memory: int = 80 * 2**30, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let fake tensors be on CUDA, until the block ends. On a machine with a GPU it does nothing."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(cuda_reported_available())  # first: it raises if torch's C++ tables are unknown
        stack.enter_context(cuda_device_guard_replaced())
        if torch.version.cuda is None:
            # Without a CUDA kernel torch would decompose these operations, and a plan would count other memory.
            stack.enter_context(kernels_registered_for_cuda(FUSED_ON_CUDA, _never))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # there are no device threads
        for name, value in _fake_cuda_module(devices, memory, capability).items():
            stack.enter_context(replaced(torch.cuda, name, value))
        stack.enter_context(no_gpu_context_for_fake_tensors())
        stack.enter_context(cuda_never_initialized())
        stack.enter_context(replaced(torch, "tensor", _tensor_made_on_host(torch.tensor)))
        stack.enter_context(replaced(torch.Tensor, "record_stream", lambda self, stream: None))
        yield


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a tensor with values got into a fake world")


def _tensor_made_on_host(make: Any) -> Any:
    """Return a replacement for `torch.tensor` (`make`), which would copy its values to a real device.

    torch copies them without asking the dispatch mode, so here the tensor is created on the CPU and then moved.
    """

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = make(data, device="cpu", **kwargs)
        if device is None:
            device = torch.empty(0).device  # `torch.get_default_device` would call `torch.tensor`
        return made.to(device).requires_grad_(requires_grad)

    return tensor


class _Event:
    """Replaces `torch.cuda.Event`: an event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    wait = record

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: it is complete."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return zero."""
        return 0.0


class _Stream:
    """Replaces `torch.cuda.Stream`: a stream that has no work."""

    device = torch.device("cuda", 0)
    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        """Return a complete event."""
        return event or _Event()

    def synchronize(self) -> None:
        """Do nothing."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _fake_cuda_module(devices: int, memory: int, capability: tuple[int, int]) -> dict[str, Any]:
    """Return replacements for functions and classes of `torch.cuda`, by name."""
    stream = _Stream()
    properties = SimpleNamespace(
        name="fake GPU",
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


@contextmanager
def fake_world(
    config: RunConfig,
    *,
    rank: int = 0,
    size: int = 1,
    per_host: int = 8,
    device: str = "cpu",
    memory: int = 80 * 2**30,
) -> Iterator[World]:
    """Simulate rank `rank` of `size` with the layout of `config.strategy`; yield its `World`.

    Until the block ends, all tensors are fake. `device` is `cpu`, or `cuda`, which needs no GPU; `memory` is the memory
    of a simulated GPU in bytes, and `per_host` the number of ranks on a host. In a process with a process group a
    `WorldError` is raised.
    """
    if dist.is_initialized():
        raise WorldError("a fake world cannot be opened in a process that has joined a real one")
    local = min(per_host, size)
    ranks = Ranks(rank, size, rank % local, local, launcher="fake")
    layout = resolve_layout(config.strategy, size=size, local_size=local)
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(fake_cuda(devices=local, memory=memory))
        fake_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        mesh = None
        if size > 1 or config.strategy.offload.params != "none":
            from plait.torch_internals import FakeStore

            # Creating a process group replaces `sys.excepthook`, to prefix tracebacks with the rank; this restores it.
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            stack.callback(_destroy_group)
            stack.enter_context(_real_mesh_ranks())
            mesh = make_mesh(layout, fake_device)
        stack.enter_context(module_apply_replaced(_apply))
        stack.enter_context(replaced(nn.init, name_of_truncated_normal(), _trunc_normal))
        stack.enter_context(Valueless(allow_non_fake_inputs=True))
        yield World(ranks, fake_device, layout, mesh, owns_processes=False, fake=True)


def _destroy_group() -> None:
    """Destroy the group, and clear DTensor's cache, where a mesh of this world equals one of the next."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from plait.torch_internals import clear_sharding_prop_cache

        clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


class ShapesOnly(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` with support for grouped matrix products in other dtypes than bf16, which torch's own lacks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_grouped_mm.default and args[0].dtype != torch.bfloat16:
            return grouped_product(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Valueless(ShapesOnly):  # type: ignore[no-untyped-call]
    """`ShapesOnly` in which a value that is read (`.item()`) is 1, or True; for whole training steps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if schema_of(func).name.startswith("aten::_fused_") and schema_of(func).name.endswith("_"):
            return None  # an optimizer's update in place; torch has no fake kernels for all of them
        if schema_of(func).name == "aten::addmm" and overload_of(func) == "dtype_out":
            return kwargs["out"]  # the fake kernel of torch 2.11 is wrong
        if not types and _on_meta(args, kwargs or {}):
            # A tensor on the meta device does not become fake until it is moved to a real device.
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _on_meta(args: Any, kwargs: Any) -> bool:
    """Return whether an operation is on the meta device, by its `device` or by all of its tensors."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    given = [value if isinstance(value, (list, tuple)) else (value,) for value in (*args, *kwargs.values())]
    tensors = [tensor for values in given for tensor in values if isinstance(tensor, torch.Tensor)]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """Return an uninitialized tensor with the shape of a grouped matrix product."""
    groups = [len(offsets)] if left.ndim == right.ndim == 2 else [len(left)] if left.ndim == right.ndim == 3 else []
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """Replaces `Module._apply`, which swaps the contents of two tensors: not possible with fake tensors."""
    for child in module.children() if recurse else ():
        _apply(child, change)
    with torch.no_grad():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(change(param), requires_grad=param.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = change(buffer)
    return module


def _trunc_normal(tensor: torch.Tensor, mean: float, std: float, low: float, high: float, **_: Any) -> torch.Tensor:
    """Replaces `nn.init.trunc_normal_`, which draws again until no value is outside of the interval.

    With fake tensors that loop would never end: a value that is read is True. This draws again once.
    """
    with torch.no_grad():
        outside = (tensor.normal_(mean, std) < low) | (tensor > high)
        return tensor.copy_(torch.where(outside, torch.empty_like(tensor).normal_(mean, std), tensor))


@contextmanager
def _real_mesh_ranks() -> Iterator[None]:
    """Until the block ends, create meshes with real tensors of ranks: `DeviceMesh.__init__` reads their values."""
    make = DeviceMesh.__init__

    def with_values(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            make(self, *args, **kwargs)

    with replaced(DeviceMesh, "__init__", with_values):
        yield
