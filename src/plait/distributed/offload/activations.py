"""Activation offloading: what units save for the backward pass is kept in host memory.

[Note: activations come and go] What a unit saves for its backward pass is copied to the host while the next unit
computes, and freed on the device when that one is done: then the copy is over too, or the device waits for it. The
backward pass fetches a whole unit at its first use of it, and at the same time the unit before, which comes next. So
the device holds the activations of about two units, and copies both ways overlap with the computation. Weights and what
all units share stay where they are. A unit that recomputes saves its inputs only, and those are offloaded.

No memory is used across streams without an event: the device waits for a copy to the host before the tensor is dropped,
and a copy back writes to memory that the computing stream allocated and will reuse. So the host runs ahead without the
allocator having to keep anything longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from plait.distributed.dtensor import is_sharded, to_local
from plait.distributed.wrap import WrapUnit
from plait.errors import ConfigError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.kernels import host_empty
from plait.torch_internals import storage_key, tree_leaves, version_of

LEAST = 1 << 16
"""Smaller tensors stay: their copies would cost more than they free."""


def offload_activations(units: Sequence[WrapUnit], wanted: str | Sequence[str], device: torch.device) -> list[str]:
    """Offload the activations of units to the host; returns the names of those units.

    `wanted` is `none`, `all`, or patterns of the units' names. The units' `forward` is replaced, as activation
    checkpointing does it, so no parameter changes its name.
    """
    if wanted == "none":
        return []
    patterns = ["*"] if isinstance(wanted, str) else wanted
    for pattern in patterns:
        if not any(fnmatchcase(unit.name, pattern) for unit in units):
            names = ", ".join(unit.name for unit in units[:20]) or "none"
            problem = f"{pattern!r} matches no wrap unit of the model"
            raise ConfigError(Problem("strategy.offload.activations", problem, f"There are: {names}."))
    chosen = [unit for unit in units if any(fnmatchcase(unit.name, pattern) for pattern in patterns)]
    host = _HostBuffers(device)
    for index, unit in enumerate(chosen):
        _replace_forward(unit.module, index, host)
    return [unit.name for unit in chosen]


def _replace_forward(module: nn.Module, index: int, host: _HostBuffers) -> None:
    forward, uncompiled = module.forward, torch.compiler.disable
    # torch.compile would trace these as a part of the unit, and again for every shape that is saved.
    begin, pack, end = (uncompiled(method) for method in (host.begin, _UnitCall.pack, host.end))  # type: ignore[no-untyped-call]

    @uncompiled(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    @wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = begin(index, module, (args, kwargs))
        with saved_tensors_hooks(partial(pack, call), _unpack):
            outputs = forward(*args, **kwargs)
        end(call)
        return outputs

    module.forward = offloading
    offloading.host_buffers = host


def activations_on_host(model: nn.Module) -> int:
    """Bytes of host memory that are allocated for a model's activations; they are reused in the next step."""
    all_buffers = {getattr(module.forward, "host_buffers", None) for module in model.modules()}
    return sum(host.bytes for host in all_buffers if isinstance(host, _HostBuffers))


class _HostBuffers:
    """What all units share: the copy streams, host buffers for reuse, and which unit ran last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[Any, Any] | None = None
        self.bytes = 0
        """Of all buffers, free or not."""
        self._free: list[tuple[Tensor, Any]] = []
        """Free host buffers, each with the event after the last copy from it."""
        self._last: weakref.ref[_UnitCall] | None = None
        self._being_copied: _UnitCall | None = None
        """The unit whose tensors may still be being copied to the host."""

    def begin(self, index: int, module: nn.Module, inputs: Any) -> _UnitCall:
        """A unit's forward pass begins."""
        last = None if self._last is None else self._last()
        before = last if last is not None and last.index == index - 1 else None
        given = {_storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        stays = {_storage_key(tensor) for tensor in _tensors_of(module)}
        if before is not None:
            stays |= given & before.given
        call = _UnitCall(self, index, before, given, stays)
        self._last = weakref.ref(call)
        return call

    def end(self, call: _UnitCall) -> None:
        """A unit's forward pass is over: free the device memory of the one before it."""
        call.known.clear()
        if self._being_copied is not None:
            self._being_copied.free_device()
        self._being_copied = call

    # ---- copies

    def take(self, flat: Tensor) -> tuple[Tensor, Any]:
        """A host buffer for a tensor, and the event after the last copy from it."""
        fitting = [at for at, (buffer, _) in enumerate(self._free) if flat.nbytes <= buffer.numel() <= 2 * flat.nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda at: self._free[at][0].numel()))
        self.bytes += flat.nbytes
        return host_empty(flat.nbytes, dtype=torch.uint8, pinned=_has_streams(flat)), None

    def give_back(self, buffer: Tensor, event: Any) -> None:
        """Take a host buffer back; `event` is the event after the last copy from it."""
        self._free.append((buffer, event))

    def copy_out(self, buffer: Tensor, flat: Tensor, event: Any) -> Any:
        """Copy to the host, once `flat` is computed and `buffer` was read; returns the event after the copy."""
        target = buffer[: flat.nbytes].view(flat.dtype)
        if not _has_streams(flat):
            target.copy_(flat)
            return None
        stream = self._stream(0)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if event is not None:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(flat, non_blocking=True)
        return stream.record_event()

    def copy_back(self, buffer: Tensor, flat: Tensor) -> Any:
        """Copy from the host to memory that the current stream allocated; returns the event after the copy."""
        source = buffer[: flat.nbytes].view(flat.dtype)
        if not _has_streams(flat):
            flat.copy_(source)
            return None
        stream = self._stream(1)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            flat.copy_(source, non_blocking=True)
        return stream.record_event()

    def follow(self, event: Any) -> None:
        """Have the current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _stream(self, which: int) -> Any:
        if self._streams is None:
            out, back = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._streams = out, back
        return self._streams[which]


class _UnitCall:
    """One forward pass of one unit, and what it saved."""

    def __init__(
        self, host: _HostBuffers, index: int, before: _UnitCall | None, given: set[int], stays: set[int]
    ) -> None:
        self.host = host
        self.index = index
        self.given = given
        """The storages of its inputs."""
        self.known: dict[tuple[Any, ...], _Saved] = {}
        """While it computes: a tensor that several operations save is copied once."""
        self._stays = stays
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[_Saved]] = []

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """What autograd keeps in place of a tensor."""
        if (
            tensor.nbytes < LEAST
            or tensor.device.type != self.host.device.type
            or tensor.layout != torch.strided
            or is_sharded(tensor)
            or _storage_key(tensor) in self._stays
        ):
            return tensor
        flat, offset, stride = _dense(tensor)
        key = (_storage_key(flat), flat.storage_offset(), flat.numel(), flat.dtype, version_of(tensor))
        saved = self.known.get(key)
        if saved is None:
            saved = self.known[key] = _Saved(self, flat)
            self._saved.append(weakref.ref(saved))
        return _Packed(saved, tensor.shape, stride, offset)

    def free_device(self) -> None:
        """Free the device memory, once the copies are done."""
        for saved in self._alive():
            self.host.follow(saved.copied)
            saved.flat = None

    def fetch(self) -> None:
        """Copy everything back to the device, and what the unit before saved."""
        self._copy_back()
        before = None if self._before is None else self._before()
        if before is not None:
            before._copy_back()

    def _copy_back(self) -> None:
        for saved in self._alive():
            if saved.flat is None:
                saved.flat = torch.empty(saved.numel, dtype=saved.dtype, device=self.host.device)
                saved.copied = self.host.copy_back(saved.buffer, saved.flat)

    def _alive(self) -> Iterator[_Saved]:
        return (saved for reference in self._saved if (saved := reference()) is not None)


class _Saved:
    """One tensor on the host, and on the device as long as, or once again, it is there."""

    def __init__(self, call: _UnitCall, flat: Tensor) -> None:
        host = call.host
        self.call = call
        self.numel, self.dtype = flat.numel(), flat.dtype
        self.flat: Tensor | None = flat
        self.buffer, event = host.take(flat)
        self.copied = host.copy_out(self.buffer, flat, event)

    def __del__(self) -> None:
        # It may be freed unread while its copy is under way: the device memory must not be reused before that ends.
        self.call.host.follow(self.copied)
        self.call.host.give_back(self.buffer, self.copied)


class _Packed(NamedTuple):
    """A view of something saved."""

    saved: _Saved
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Tensor | _Packed) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    saved = kept.saved
    saved.call.fetch()
    saved.call.host.follow(saved.copied)
    assert saved.flat is not None
    return saved.flat.as_strided(kept.shape, kept.stride, kept.offset)


def _dense(tensor: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """The memory behind a tensor as a flat one, and the tensor's offset and strides in that; a copy where it has gaps.

    Views of the same memory, such as a transpose, come to the same flat tensor.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    if whole <= 2 * tensor.numel():
        return tensor.as_strided((whole,), (1,), 0), int(tensor.storage_offset()), tensor.stride()
    compact = tensor.contiguous() if not tensor.is_contiguous() else tensor
    return compact.view(-1), 0, compact.stride()


@on_fake_tensors(lambda flat: False)
def _has_streams(flat: Tensor) -> bool:
    """Whether a tensor is copied on a separate stream, to and from pinned memory."""
    return flat.is_cuda


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            yield to_local(tensor)


def _storage_key(tensor: Tensor) -> int:
    with torch.no_grad():
        return storage_key(to_local(tensor))
