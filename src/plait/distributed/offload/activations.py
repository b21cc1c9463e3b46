"""Activation offloading: the tensors that units save for the backward pass are kept in host memory.

[Note: activations come and go] The tensors that a unit saves for its backward pass are copied to the host while the
next unit computes. They are freed on the device after the next unit's forward pass; the computing stream first waits
for the copy. When the backward pass first needs a saved tensor of a unit, all tensors of this unit are copied back, and
at the same time those of the unit before it, whose backward pass is next. So the device holds the activations of about
two units, and copies in both directions overlap with the computation. Weights, and inputs that all units share, stay on
the device. A unit that recomputes saves its inputs only, and those are offloaded.

Streams are ordered by events: the computing stream waits for the copy to the host before the tensor's memory is freed,
and a copy back writes to memory that the computing stream allocated and will reuse. So the host never blocks, and no
memory has to be kept longer with `record_stream`.
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
"""In bytes. Smaller tensors stay on the device: a copy costs more than the memory is worth."""


def offload_activations(units: Sequence[WrapUnit], wanted: str | Sequence[str], device: torch.device) -> list[str]:
    """Offload the activations of some units to the host; return the names of these units.

    `wanted` is `none`, `all`, or patterns of the units' names; a pattern without a match is a `ConfigError`. The units'
    `forward` is replaced, as for activation checkpointing, so no parameter changes its name.
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
    # torch.compile would trace these functions into the unit, and compile again for every shape that is saved.
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
    """Return the bytes of host memory that are allocated for a model's activations; the next step reuses them."""
    all_buffers = {getattr(module.forward, "host_buffers", None) for module in model.modules()}
    return sum(host.bytes for host in all_buffers if isinstance(host, _HostBuffers))


class _HostBuffers:
    """The state that all units share: the copy streams, the host buffers, and which unit ran last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[Any, Any] | None = None
        self.bytes = 0
        """The size of all buffers, in use or free."""
        self._free: list[tuple[Tensor, Any]] = []
        """Free host buffers, each with the event after the last copy from it."""
        self._last: weakref.ref[_UnitCall] | None = None
        self._being_copied: _UnitCall | None = None
        """The unit whose tensors may still be being copied to the host."""

    def begin(self, index: int, module: nn.Module, inputs: Any) -> _UnitCall:
        """Return a new `_UnitCall` for a unit's forward pass that begins with these inputs."""
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
        """End a unit's forward pass: free on the device what the unit before it saved."""
        call.known.clear()
        if self._being_copied is not None:
            self._being_copied.free_device()
        self._being_copied = call

    # ---- copies

    def take(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Return a host buffer for a tensor, a free one if it fits, and the event after the last copy from it."""
        fitting = [at for at, (buffer, _) in enumerate(self._free) if flat.nbytes <= buffer.numel() <= 2 * flat.nbytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda at: self._free[at][0].numel()))
        self.bytes += flat.nbytes
        return host_empty(flat.nbytes, dtype=torch.uint8, pinned=_has_streams(flat)), None

    def give_back(self, buffer: Tensor, event: Any) -> None:
        """Mark a host buffer as free; `event` is the event after the last copy from it."""
        self._free.append((buffer, event))

    def copy_out(self, buffer: Tensor, flat: Tensor, event: Any) -> Any:
        """Copy `flat` to `buffer` after the current stream's work and `event`; return the event after the copy."""
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
        """Copy `buffer` to `flat`, which the current stream allocated; return the event after the copy."""
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
        """Have the current stream wait for the event after a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _stream(self, which: int) -> Any:
        if self._streams is None:
            out, back = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._streams = out, back
        return self._streams[which]


class _UnitCall:
    """One forward pass of one unit, with the tensors that it saved."""

    def __init__(
        self, host: _HostBuffers, index: int, before: _UnitCall | None, given: set[int], stays: set[int]
    ) -> None:
        self.host = host
        self.index = index
        self.given = given
        """The storages of its inputs."""
        self.known: dict[tuple[Any, ...], _Saved] = {}
        """The tensors saved so far, for the forward pass: one that several operations save is copied once."""
        self._stays = stays
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[_Saved]] = []

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """Copy a tensor to the host, and return what autograd keeps in its place; the tensor itself if it stays."""
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
        """Free the tensors on the device; the current stream waits for their copies to the host first."""
        for saved in self._alive():
            self.host.follow(saved.copied)
            saved.flat = None

    def fetch(self) -> None:
        """Begin to copy the tensors of this unit and of the unit before it back to the device."""
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
    """A saved tensor: its copy on the host (`buffer`), and the tensor on the device (`flat`; None if freed)."""

    def __init__(self, call: _UnitCall, flat: Tensor) -> None:
        host = call.host
        self.call = call
        self.numel, self.dtype = flat.numel(), flat.dtype
        self.flat: Tensor | None = flat
        self.buffer, event = host.take(flat)
        self.copied = host.copy_out(self.buffer, flat, event)

    def __del__(self) -> None:
        # It may be dropped while a copy is running: the device memory must not be reused before the copy has ended.
        self.call.host.follow(self.copied)
        self.call.host.give_back(self.buffer, self.copied)


class _Packed(NamedTuple):
    """What autograd keeps in place of a tensor: a view of a `_Saved`."""

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
    """Return a flat tensor with the memory of `tensor`, and the offset and strides of `tensor` in it.

    Views of the same storage, such as a transpose, give the same flat tensor. If a tensor has less than half of its
    storage, the flat tensor has its elements alone, copied where they are not contiguous.
    """
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    if whole <= 2 * tensor.numel():
        return tensor.as_strided((whole,), (1,), 0), int(tensor.storage_offset()), tensor.stride()
    compact = tensor.contiguous() if not tensor.is_contiguous() else tensor
    return compact.view(-1), 0, compact.stride()


@on_fake_tensors(lambda flat: False)
def _has_streams(flat: Tensor) -> bool:
    """Return whether a tensor is copied on a separate stream, to and from pinned memory."""
    return flat.is_cuda


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            yield to_local(tensor)


def _storage_key(tensor: Tensor) -> int:
    with torch.no_grad():
        return storage_key(to_local(tensor))
