"""Activations that wait for the backward pass in host memory.

[Note: activations come and go] What a unit saves for its backward pass is copied to the host while the next unit
computes, and let go of on the device when that one is done: then the copy is over too, or the device waits for it. The
backward pass fetches a whole unit at its first use of it, and at the same time the unit before, which comes next. So
the device holds the activations of about two units, and copies both ways run beside the computing. Weights and what all
units share stay where they are. A unit that recomputes saves its inputs only, and those travel.

No memory is handed to another stream's care: a copy out is waited for, on the device, before the tensor is dropped, and
a copy back goes to memory that the computing stream got and will reuse. So the host runs ahead without the allocator
having to keep anything longer.
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

from plait.distributed.dtensor import is_sharded, local_part
from plait.distributed.wrap import WrapUnit
from plait.errors import ConfigError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.kernels import host_empty
from plait.torch_internals import storage_key, tree_leaves, version_of

LEAST = 1 << 16
"""Smaller tensors stay: their copies would cost more than they free."""


def offload_activations(units: Sequence[WrapUnit], wanted: str | Sequence[str], device: torch.device) -> list[str]:
    """Let units keep their activations on the host; returns the names of those that do.

    `wanted` is `none`, `all`, or patterns of the units' names. The units' `forward` is replaced, as recomputing does
    it, so no parameter changes its name.
    """
    if wanted == "none":
        return []
    patterns = ["*"] if isinstance(wanted, str) else wanted
    for pattern in patterns:
        if not any(fnmatchcase(unit.name, pattern) for unit in units):
            names = ", ".join(unit.name for unit in units[:20]) or "none"
            problem = f"{pattern!r} fits no unit of the model"
            raise ConfigError(Problem("strategy.offload.activations", problem, f"There are: {names}."))
    chosen = [unit for unit in units if any(fnmatchcase(unit.name, pattern) for pattern in patterns)]
    luggage = _Luggage(device)
    for index, unit in enumerate(chosen):
        _replace_forward(unit.module, index, luggage)
    return [unit.name for unit in chosen]


def _replace_forward(module: nn.Module, index: int, luggage: _Luggage) -> None:
    forward, uncompiled = module.forward, torch.compiler.disable
    # A compiler takes all that runs while a unit does for the unit's own, and would trace it anew for every shape that
    # is saved.
    begin, pack, end = (uncompiled(each) for each in (luggage.begin, _Trip.pack, luggage.end))  # type: ignore[no-untyped-call]

    @uncompiled(recursive=False)  # type: ignore[untyped-decorator,no-untyped-call]
    @wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        trip = begin(index, module, (args, kwargs))
        with saved_tensors_hooks(partial(pack, trip), _unpack):
            outputs = forward(*args, **kwargs)
        end(trip)
        return outputs

    module.forward = offloading
    offloading.luggage = luggage


def activations_on_host(model: nn.Module) -> int:
    """Bytes of host memory that a model's activations have taken so far; they are kept for the next step."""
    found = {getattr(module.forward, "luggage", None) for module in model.modules()}
    return sum(luggage.bytes for luggage in found if isinstance(luggage, _Luggage))


class _Luggage:
    """What all units share: the streams, host memory for reuse, and which unit went last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[Any, Any] | None = None
        self.bytes = 0
        """Of all rooms, free or not."""
        self._rooms: list[tuple[Tensor, Any]] = []
        """Host memory that is free, each with the mark of the last copy from it."""
        self._last: weakref.ref[_Trip] | None = None
        self._leaving: _Trip | None = None
        """The unit whose tensors may still be on their way out."""

    def begin(self, index: int, module: nn.Module, inputs: Any) -> _Trip:
        """A unit's forward pass begins."""
        last = None if self._last is None else self._last()
        before = last if last is not None and last.index == index - 1 else None
        given = {_storage(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        stays = {_storage(tensor) for tensor in _own(module)}
        if before is not None:
            stays |= given & before.given
        trip = _Trip(self, index, before, given, stays)
        self._last = weakref.ref(trip)
        return trip

    def end(self, trip: _Trip) -> None:
        """A unit's forward pass is over: the one before it has to be gone by now."""
        trip.known.clear()
        if self._leaving is not None:
            self._leaving.leave()
        self._leaving = trip

    # ---- copies

    def room_for(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Host memory of a tensor's size, and the mark of the last copy from it."""
        fitting = [at for at, (room, _) in enumerate(self._rooms) if flat.nbytes <= room.numel() <= 2 * flat.nbytes]
        if fitting:
            return self._rooms.pop(min(fitting, key=lambda at: self._rooms[at][0].numel()))
        self.bytes += flat.nbytes
        return host_empty(flat.nbytes, dtype=torch.uint8, pinned=_has_streams(flat)), None

    def free(self, room: Tensor, mark: Any) -> None:
        """Take host memory back."""
        self._rooms.append((room, mark))

    def copy_out(self, room: Tensor, flat: Tensor, mark: Any) -> Any:
        """Copy to the host, once `flat` is computed and `room` was read; returns a mark."""
        target = room[: flat.nbytes].view(flat.dtype)
        if not _has_streams(flat):
            target.copy_(flat)
            return None
        stream = self._stream(0)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if mark is not None:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            target.copy_(flat, non_blocking=True)
        return stream.record_event()

    def copy_back(self, room: Tensor, flat: Tensor) -> Any:
        """Copy from the host to memory that the current stream got; returns a mark."""
        source = room[: flat.nbytes].view(flat.dtype)
        if not _has_streams(flat):
            flat.copy_(source)
            return None
        stream = self._stream(1)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            flat.copy_(source, non_blocking=True)
        return stream.record_event()

    def follow(self, mark: Any) -> None:
        """Let the current stream wait for a copy."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def _stream(self, which: int) -> Any:
        if self._streams is None:
            out, back = (torch.cuda.Stream(self.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._streams = out, back
        return self._streams[which]


class _Trip:
    """One forward pass of one unit, and what it saved."""

    def __init__(self, luggage: _Luggage, index: int, before: _Trip | None, given: set[int], stays: set[int]) -> None:
        self.luggage = luggage
        self.index = index
        self.given = given
        """Where its inputs lie."""
        self.known: dict[tuple[Any, ...], _Saved] = {}
        """While it computes: a tensor that several operations save is copied once."""
        self._stays = stays
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[_Saved]] = []

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """What autograd keeps in a tensor's place."""
        if (
            tensor.nbytes < LEAST
            or tensor.device.type != self.luggage.device.type
            or tensor.layout != torch.strided
            or is_sharded(tensor)
            or _storage(tensor) in self._stays
        ):
            return tensor
        flat, offset, stride = _dense(tensor)
        key = (_storage(flat), flat.storage_offset(), flat.numel(), flat.dtype, version_of(tensor))
        saved = self.known.get(key)
        if saved is None:
            saved = self.known[key] = _Saved(self, flat)
            self._saved.append(weakref.ref(saved))
        return _Packed(saved, tensor.shape, stride, offset)

    def leave(self) -> None:
        """Let go of the device's memory, as soon as the copies are there."""
        for saved in self._living():
            self.luggage.follow(saved.copied)
            saved.flat = None

    def fetch(self) -> None:
        """Bring everything back, and what the unit before saved."""
        self._bring()
        before = None if self._before is None else self._before()
        if before is not None:
            before._bring()

    def _bring(self) -> None:
        for saved in self._living():
            if saved.flat is None:
                saved.flat = torch.empty(saved.numel, dtype=saved.dtype, device=self.luggage.device)
                saved.copied = self.luggage.copy_back(saved.room, saved.flat)

    def _living(self) -> Iterator[_Saved]:
        return (saved for each in self._saved if (saved := each()) is not None)


class _Saved:
    """One tensor on the host, and on the device where it is still, or again."""

    def __init__(self, trip: _Trip, flat: Tensor) -> None:
        luggage = trip.luggage
        self.trip = trip
        self.numel, self.dtype = flat.numel(), flat.dtype
        self.flat: Tensor | None = flat
        self.room, mark = luggage.room_for(flat)
        self.copied = luggage.copy_out(self.room, flat, mark)

    def __del__(self) -> None:
        # Something may die unread, its copy still on the way: the device's memory must not be used again before.
        self.trip.luggage.follow(self.copied)
        self.trip.luggage.free(self.room, self.copied)


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
    saved.trip.fetch()
    saved.trip.luggage.follow(saved.copied)
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
    """Whether a tensor travels on a stream of its own, to and from pinned memory."""
    return flat.is_cuda


def _own(module: nn.Module) -> Iterator[Tensor]:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            yield local_part(tensor)


def _storage(tensor: Tensor) -> int:
    with torch.no_grad():
        return storage_key(local_part(tensor))
