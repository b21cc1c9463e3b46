"""Parameters that live in host memory or in files, and are copied to the device unit by unit.

[Note: shards without memory] `fully_shard` keeps each rank's shards of a unit as tensors on the device, copies them
into its all-gather, and does not read them until the next one. So the storage behind a shard is freed once it is
copied, and allocated and filled again before the unit is gathered next. The shard itself stays the same tensor, with
its size, strides and place in the model; only its storage is resized.

[Note: what comes next] Units are gathered in the same order in every step. So the order of the last step says which
copies to start before they are needed. A unit whose update is still running is not prefetched: its weights would be
old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.distributed.offload.layout import Bucket, OffloadFile
from plait.distributed.offload.streams import CopyStreams
from plait.distributed.wrap import WrapUnit
from plait.kernels import FileQueue, FileTransfer, host_empty
from plait.torch_internals import (
    fsdp_all_gather_copy_in_stream,
    fsdp_disable_reset_sharded_param,
    fsdp_has_all_gather_result,
    fsdp_is_unsharded,
    fsdp_param_group,
    fsdp_params,
    fsdp_sharded_param,
    fsdp_sharded_param_data,
    fsdp_wrap_unshard,
)


@dataclass(frozen=True, slots=True)
class ParamLimits:
    """How many parameters (in elements) may be on the device."""

    prefetch: int
    live: int
    persistent: int


@dataclass(slots=True)
class _HostWeights:
    """The weights of one unit off the device: in host memory, or in a file that is read into host memory for a use."""

    copies: list[Tensor] = field(default_factory=list)
    """In host memory; none where they are in a file."""
    file: OffloadFile | None = None
    buffer: Tensor | None = None
    """What the file was, or is being, read into."""
    reading: FileTransfer | None = None

    def prefetch(self) -> None:
        """Begin to read the file."""
        if self.file is not None and self.buffer is None:
            self.buffer = host_empty(self.file.size, dtype=torch.uint8)
            self.reading = self.file.read(self.buffer)

    def tensors(self) -> Sequence[Tensor]:
        """The weights in host memory, once they are read."""
        if self.file is None:
            return self.copies
        self.prefetch()
        assert self.reading is not None
        assert self.buffer is not None
        self.reading.wait()
        return list(self.file.views(self.buffer).values())

    def drop(self) -> None:
        """Free what was read."""
        if self.reading is not None:
            self.reading.wait()
        self.buffer = self.reading = None


@dataclass(slots=True)
class _OffloadedGroup:
    """The shards of one FSDP parameter group."""

    shards: list[Tensor]
    """Flat and padded; without storage between their uses."""
    numel: int
    params: list[nn.Parameter]
    host: _HostWeights
    on_device: bool = True
    """Whether the shards have storage."""
    copied: Any = None
    """The event after the copies to the device."""

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the device, or read from their file."""
        return self.on_device or self.host.buffer is not None


class ParamStream:
    """Copies the shards of units to the device before they are gathered, and frees them afterwards."""

    def __init__(self, streams: CopyStreams, limits: ParamLimits, folder: Path | None) -> None:
        """`folder`: for files; absent: host memory."""
        self._streams = streams
        self._limits = limits
        self._folder = folder
        self._queue = FileQueue() if folder is not None and not streams.fake else None
        self._groups: list[_OffloadedGroup] = []
        self._locations: dict[nn.Parameter, tuple[int, int]] = {}
        self._last_order: list[int] = []
        self._order: list[int] = []
        self._bucket_of: Mapping[int, Bucket] = {}
        self._wait: Callable[[Bucket], None] | None = None

    @property
    def in_files(self) -> bool:
        """Whether the weights are in files."""
        return self._queue is not None

    # ---- at the start

    def take(self, module: nn.Module) -> None:
        """Offload the weights of a module of `fully_shard`: from now on they are what `put` was given."""
        param_group = fsdp_param_group(module)
        members = [] if param_group is None else fsdp_params(param_group)
        params = [fsdp_sharded_param(member) for member in members]
        if param_group is None or sum(param.numel() for param in params) < self._limits.persistent:
            return
        shards = [fsdp_sharded_param_data(member) for member in members]
        host = _HostWeights()
        if self._folder is None or (self._queue is None and self._streams.separate):
            host.copies = [self._streams.host_tensor(shard.shape, shard.dtype) for shard in shards]
        elif self._queue is None:  # a plan of CPU ranks: there are no files, and nothing else may take memory
            host.copies = shards
        else:
            layout = [((number, "param"), shard.dtype, shard.shape) for number, shard in enumerate(shards)]
            host.file = OffloadFile(self._queue, self._folder, layout)
        with torch.no_grad():
            for position, (member, shard) in enumerate(zip(members, shards, strict=True)):
                if host.file is None:
                    host.copies[position].copy_(shard)
                else:
                    host.file.put((position, "param"), shard.cpu()).wait()
                # Before its first use torch checks whether this is still the tensor that was sharded. It is.
                fsdp_disable_reset_sharded_param(member)
        number = len(self._groups)
        group = _OffloadedGroup(shards, sum(shard.numel() for shard in shards), params, host)
        self._locations |= {param: (number, position) for position, param in enumerate(params)}
        self._groups.append(group)

        def fetch() -> None:
            if not fsdp_is_unsharded(param_group) and not fsdp_has_all_gather_result(param_group):
                self._before_unshard(number, param_group)

        def release() -> None:
            if fsdp_is_unsharded(param_group):
                self._release(group)

        fsdp_wrap_unshard(param_group, fetch, release)
        self._release(group)

    def follow_updates(self, bucket_of: Mapping[int, Bucket], wait: Callable[[Bucket], None]) -> None:
        """Set in which bucket a parameter (by its `id`) is updated, and how to wait for one."""
        self._bucket_of, self._wait = bucket_of, wait

    def _buckets(self, group: _OffloadedGroup) -> list[Bucket]:
        buckets = (self._bucket_of.get(id(param)) for param in group.params)
        return list({id(bucket): bucket for bucket in buckets if bucket is not None}.values())

    def host_bytes(self) -> int:
        """Host memory that the weights take; those in files only while they are read."""
        return sum(copy.nbytes for group in self._groups for copy in group.host.copies if self._folder is None)

    # ---- in a step

    def _before_unshard(self, number: int, param_group: Any) -> None:
        """Put a unit's shards on the device, and begin with those that follow."""
        self._order.append(number)
        group = self._groups[number]
        for bucket in self._buckets(group):
            assert self._wait is not None
            self._wait(bucket)
        self._copy_to_device(group)
        if group.copied is not None:
            copy_in = fsdp_all_gather_copy_in_stream(param_group)
            for stream in (copy_in, torch.cuda.current_stream(self._streams.device)):
                stream.wait_event(group.copied)
                for shard in group.shards:
                    shard.record_stream(stream)
        for following in self._following():
            if following.host.file is None:
                self._copy_to_device(following)
            else:
                following.host.prefetch()

    def restart(self) -> None:
        """Weights are about to change: drop what was prefetched, which would be old, and begin a new order."""
        for group in self._groups:
            group.host.drop()
            self._release(group)
        if self._order:
            self._last_order, self._order = self._order, []

    def _following(self) -> list[_OffloadedGroup]:
        """The units that come next, as far as the limits allow."""
        position = len(self._order)
        if self._last_order[:position] != self._order:
            return []  # another order in this step
        following: list[_OffloadedGroup] = []
        live = sum(group.numel for group in self._groups if group.is_loaded)
        early = 0  # of all that are loaded before their turn, those that came with an earlier unit among them
        for number in dict.fromkeys(self._last_order[position:]):
            group = self._groups[number]
            if number == self._order[-1]:
                continue
            first = not early
            early += group.numel
            # The next unit comes early however large it is, unless nothing is to.
            if early > self._limits.prefetch and not (first and self._limits.prefetch):
                break
            if group.is_loaded:
                continue
            live += group.numel
            if live > self._limits.live:
                break
            if any(bucket.update is not None and not bucket.update.done() for bucket in self._buckets(group)):
                break
            following.append(group)
        return following

    def _copy_to_device(self, group: _OffloadedGroup) -> None:
        if group.on_device:
            return
        copies = group.host.tensors()
        for shard in group.shards:
            shard.untyped_storage().resize_(shard.numel() * shard.itemsize)
        with torch.no_grad():
            self._streams.h2d_wait(self._streams.record())
            with self._streams.h2d():
                for shard, copy in zip(group.shards, copies, strict=True):
                    shard.copy_(copy, non_blocking=group.host.file is None)
                    self._streams.keep_for_h2d(shard)
            group.copied = self._streams.record_h2d()
        group.host.drop()
        group.on_device = True

    def _release(self, group: _OffloadedGroup) -> None:
        if group.on_device:
            for shard in group.shards:
                shard.untyped_storage().resize_(0)
            group.on_device = False
            group.copied = None

    # ---- for updates, which write weights

    def location_of(self, param: nn.Parameter) -> tuple[int, int] | None:
        """Where the weights of a parameter are kept; None for one that stays on the device."""
        return self._locations.get(param)

    def target(self, location: tuple[int, int], shape: torch.Size) -> Tensor:
        """Host memory for this rank's shard; of one in a file, a tensor of the right shape without memory."""
        number, position = location
        group = self._groups[number]
        if group.host.file is None:
            return group.host.copies[position][: shape.numel()].view(shape)
        return torch.empty((), dtype=group.shards[position].dtype).expand(shape)

    def put(self, location: tuple[int, int], values: Tensor) -> None:
        """Write this rank's shard of a parameter to where it is kept."""
        number, position = location
        host = self._groups[number].host
        if host.file is None:
            host.copies[position][: values.numel()].view(values.shape).copy_(values)
        elif values.numel():
            host.file.put((position, "param"), values.contiguous()).wait()


# A model larger than its device, for generation and evaluation: weights are copied to the device unit by unit.
#
# [Note: one unit ahead] While a unit computes, the next one is copied: from pinned host memory, or from a file, which
# is read one unit earlier still. So the device holds two units and what belongs to none, the host of the `nvme` tier
# two units more. Units are called in the same order for every token, so the order of the last pass says which is next.


@dataclass(slots=True)
class _StreamedUnit:
    """The weights of one unit."""

    names: list[str]
    params: list[nn.Parameter]
    """Without memory between their uses."""
    host: _HostWeights
    on_device: list[Tensor] | None = None
    """On the device, or being copied there."""
    copied: Any = None
    """The event after the copies."""


class WeightStream:
    """The weights of a model's units, in host memory or files. Made by `stream_weights`, filled through `tensors`."""

    def __init__(self, model: nn.Module, device: torch.device, folder: Path | None) -> None:
        self._model = model
        self._streams = CopyStreams(device, fake=False)
        self._folder = folder
        self._queue = FileQueue() if folder is not None else None
        self._units: list[_StreamedUnit] = []
        self._last_order: list[int] = []
        self._order: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter by name, to be filled; those of units in host memory, or as memory of their files."""
        tensors: dict[str, Tensor] = {name: param.detach() for name, param in self._model.named_parameters()}
        for unit in self._units:
            file = unit.host.file
            tensors.update(zip(unit.names, unit.host.copies if file is None else file.mapped().values(), strict=True))
        return tensors

    def filled(self) -> None:
        """The tensors have their values: write them to the files."""
        for unit in self._units:
            if unit.host.file is not None:
                unit.host.file.sync()

    def device_bytes(self) -> int:
        """Memory that weights take on the device now."""
        resting = sum(p.nbytes for p in self._model.parameters() if p.untyped_storage().nbytes() >= p.nbytes)
        return resting + sum(tensor.nbytes for unit in self._units for tensor in unit.on_device or ())

    def add_unit(self, names: Sequence[str], module: nn.Module) -> None:
        """Offload the weights of a unit, with these names in the model."""
        device = self._streams.device
        params: dict[int, nn.Parameter] = {}
        for inner in module.modules():
            for key, param in inner._parameters.items():
                if param is not None:
                    empty = torch.empty((), dtype=param.dtype, device=device).expand(param.shape)
                    if id(param) not in params:
                        params[id(param)] = nn.Parameter(empty, requires_grad=False)
                    inner._parameters[key] = params[id(param)]
        unit = _StreamedUnit(list(names), list(params.values()), _HostWeights())
        if self._queue is None:
            unit.host.copies = [self._streams.host_tensor(param.shape, param.dtype) for param in unit.params]
        else:
            assert self._folder is not None
            layout = [((number, "param"), param.dtype, param.shape) for number, param in enumerate(unit.params)]
            unit.host.file = OffloadFile(self._queue, self._folder, layout)
        number = len(self._units)
        self._units.append(unit)
        module.register_forward_pre_hook(lambda _module, _inputs: self._before_forward(number))
        module.register_forward_hook(lambda _module, _inputs, _outputs: self._release(number), always_call=True)

    def _before_forward(self, number: int) -> None:
        if not self._order or number in self._order:  # a new pass
            self._last_order, self._order = self._order or self._last_order, []
        self._order.append(number)
        unit = self._units[number]
        self._copy_to_device(unit)
        assert unit.on_device is not None
        self._streams.wait(unit.copied)
        for param, tensor in zip(unit.params, unit.on_device, strict=True):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            param.data = tensor
        following = [self._units[index] for index in self._next(2)]
        for next_unit in following[:1]:
            self._copy_to_device(next_unit)
        for next_unit in following[1:]:
            if next_unit.on_device is None:
                next_unit.host.prefetch()

    def _release(self, number: int) -> None:
        unit = self._units[number]
        for param in unit.params:
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        unit.on_device = unit.copied = None

    def _next(self, count: int) -> list[int]:
        """The units that come next: as in the last pass, which begins again after its end."""
        position = len(self._order)
        if not self._last_order or self._last_order[:position] != self._order:
            return []
        upcoming = self._last_order[position:] + self._last_order
        return [number for number in dict.fromkeys(upcoming[:count]) if number != self._order[-1]]

    def _copy_to_device(self, unit: _StreamedUnit) -> None:
        if unit.on_device is not None:
            return
        copies = unit.host.tensors()
        if not self._streams.separate:
            unit.on_device = list(copies)  # a CPU computes with them where they are
        else:
            with torch.no_grad(), self._streams.h2d():
                pinned = unit.host.file is None
                unit.on_device = [copy.to(self._streams.device, non_blocking=pinned) for copy in copies]
            unit.copied = self._streams.record_h2d()
        unit.host.drop()


def stream_weights(
    model: nn.Module,
    units: Sequence[WrapUnit],
    *,
    device: torch.device,
    tier: Literal["cpu", "nvme"],
    folder: Path | None = None,
) -> WeightStream:
    """Make a model run on a device that is too small for its weights: those of `units` stay on the host or in `folder`.

    The model may be on the meta device; weights are then filled through the stream's `tensors`, and its buffers have
    memory and no values yet. For forward passes only.
    """
    stream = WeightStream(model, device, folder if tier == "nvme" else None)
    names = {id(param): name for name, param in model.named_parameters()}
    values = {name: param.data for name, param in model.named_parameters() if not param.is_meta}
    for unit in units:
        seen = {id(param): param for param in unit.module.parameters()}
        stream.add_unit([names[key] for key in seen], unit.module)
    inside = {id(inner) for unit in units for inner in unit.module.modules()}
    moved: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in model.modules():
            _move(module, device, moved if id(module) not in inside else None)
    model.requires_grad_(False)
    if values:
        with torch.no_grad():
            for name, tensor in stream.tensors().items():
                if name in values:
                    tensor.copy_(values[name])
        stream.filled()
    return stream


def _move(module: nn.Module, device: torch.device, moved: dict[int, nn.Parameter] | None) -> None:
    """Move a module's buffers to the device, and, where it is in no unit, its parameters; tied ones stay tied."""
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    for key, param in module._parameters.items() if moved is not None else ():
        if param is None:
            continue
        assert moved is not None
        if id(param) not in moved:
            data = torch.empty_like(param, device=device) if param.is_meta else param.data.to(device)
            moved[id(param)] = nn.Parameter(data, requires_grad=False)
        module._parameters[key] = moved[id(param)]
