"""Parameter offload: parameters are kept in host memory or in files, and copied to the device unit by unit.

`ParamStream` does so for training with `fully_shard`, `WeightStream` for generation and evaluation without it. A *unit*
is a module that is copied as a whole, such as a transformer block; *gathering* it is the all-gather of its shards.

[Note: shards without memory] `fully_shard` keeps each rank's shards of a unit as tensors on the device, reads them
when it gathers the unit, and does not read them again until it gathers the unit the next time. So the storage of a
shard is freed after each gathering, and allocated and filled again before the next one. The shard itself stays the same
tensor object in the model, with the same size and strides; only its storage is resized.

[Note: what comes next] Units are gathered in the same order in every step. So units are prefetched in the order of the
step before. A unit whose update is still running is not prefetched: its weights would be old.
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
    """Limits on the parameters on the device, in elements.

    At most `prefetch` are copied before their turn, at most `live` are on the device when more are prefetched, and a
    module with fewer than `persistent` is not offloaded.
    """

    prefetch: int
    live: int
    persistent: int


@dataclass(slots=True)
class _HostWeights:
    """The offloaded weights of one unit: in host memory, or in a file that is read into host memory before each use."""

    copies: list[Tensor] = field(default_factory=list)
    """The weights in host memory; empty if they are in a file."""
    file: OffloadFile | None = None
    buffer: Tensor | None = None
    """The host buffer that the file was, or is being, read into."""
    reading: FileTransfer | None = None

    def prefetch(self) -> None:
        """Begin to read the file, if there is one, into host memory."""
        if self.file is not None and self.buffer is None:
            self.buffer = host_empty(self.file.size, dtype=torch.uint8)
            self.reading = self.file.read(self.buffer)

    def tensors(self) -> Sequence[Tensor]:
        """Wait until the file is read, if there is one; return the weights in host memory."""
        if self.file is None:
            return self.copies
        self.prefetch()
        assert self.reading is not None
        assert self.buffer is not None
        self.reading.wait()
        return list(self.file.views(self.buffer).values())

    def drop(self) -> None:
        """Free the buffer that the file was read into."""
        if self.reading is not None:
            self.reading.wait()
        self.buffer = self.reading = None


@dataclass(slots=True)
class _OffloadedGroup:
    """The shards of one FSDP parameter group."""

    shards: list[Tensor]
    """Flat and padded; they have storage only while `on_device`."""
    numel: int
    params: list[nn.Parameter]
    host: _HostWeights
    on_device: bool = True
    """Whether the shards have storage."""
    copied: Any = None
    """The event after the copies to the device."""

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the device, or were (or are being) read from their file."""
        return self.on_device or self.host.buffer is not None


class ParamStream:
    """Copies the shards of units to the device before they are gathered, and frees them afterwards."""

    def __init__(self, streams: CopyStreams, limits: ParamLimits, folder: Path | None) -> None:
        """`folder`: where the files are; None: weights are in host memory."""
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
        """Offload the weights of a module of `fully_shard`, unless it has fewer than `persistent`.

        From then on they are changed with `target` or `put` only.
        """
        param_group = fsdp_param_group(module)
        members = [] if param_group is None else fsdp_params(param_group)
        params = [fsdp_sharded_param(member) for member in members]
        if param_group is None or sum(param.numel() for param in params) < self._limits.persistent:
            return
        shards = [fsdp_sharded_param_data(member) for member in members]
        host = _HostWeights()
        if self._folder is None or (self._queue is None and self._streams.separate):
            host.copies = [self._streams.host_tensor(shard.shape, shard.dtype) for shard in shards]
        elif self._queue is None:  # CPU ranks are simulated: there are no files, and copies would count as memory
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
                # Before its first use torch checks that the shard is still the same tensor. It is, but without storage.
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
        """`bucket_of` has the bucket of each parameter, by the parameter's `id`; `wait` blocks until it is updated."""
        self._bucket_of, self._wait = bucket_of, wait

    def _buckets(self, group: _OffloadedGroup) -> list[Bucket]:
        buckets = (self._bucket_of.get(id(param)) for param in group.params)
        return list({id(bucket): bucket for bucket in buckets if bucket is not None}.values())

    def host_bytes(self) -> int:
        """Return the bytes of host memory that weights are kept in; 0 if they are in files."""
        return sum(copy.nbytes for group in self._groups for copy in group.host.copies if self._folder is None)

    # ---- in a step

    def _before_unshard(self, number: int, param_group: Any) -> None:
        """Copy a unit's shards to the device, after their update, and begin to prefetch the units that follow."""
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
        """Begin a new step, before weights change: drop what was prefetched, and begin to record a new order."""
        for group in self._groups:
            group.host.drop()
            self._release(group)
        if self._order:
            self._last_order, self._order = self._order, []

    def _following(self) -> list[_OffloadedGroup]:
        """Return the units to prefetch now, in the order of the last step, as far as the limits allow."""
        position = len(self._order)
        if self._last_order[:position] != self._order:
            return []  # the order in this step differs
        following: list[_OffloadedGroup] = []
        live = sum(group.numel for group in self._groups if group.is_loaded)
        early = 0  # elements that are loaded before their turn, including those that were prefetched earlier
        for number in dict.fromkeys(self._last_order[position:]):
            group = self._groups[number]
            if number == self._order[-1]:
                continue
            first = not early
            early += group.numel
            # The next unit is prefetched even if it exceeds the limit, unless the limit is 0.
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
        """Return where a parameter is kept, as an argument of `target` and `put`; None if it stays on the device."""
        return self._locations.get(param)

    def target(self, location: tuple[int, int], shape: torch.Size) -> Tensor:
        """Return this rank's shard in host memory; if it is in a file, a tensor of its shape without memory."""
        number, position = location
        group = self._groups[number]
        if group.host.file is None:
            return group.host.copies[position][: shape.numel()].view(shape)
        return torch.empty((), dtype=group.shards[position].dtype).expand(shape)

    def put(self, location: tuple[int, int], values: Tensor) -> None:
        """Write new values of this rank's shard of a parameter to host memory or to the file."""
        number, position = location
        host = self._groups[number].host
        if host.file is None:
            host.copies[position][: values.numel()].view(values.shape).copy_(values)
        elif values.numel():
            host.file.put((position, "param"), values.contiguous()).wait()


# Generation and evaluation with a model larger than its device: weights are copied to the device unit by unit.
#
# [Note: one unit ahead] While a unit computes, the next one is copied to the device from pinned host memory. With the
# `nvme` tier its file was read into host memory one unit earlier. So the device holds the weights of two units and of
# the modules outside of units, and with `nvme` the host holds two units more. Units are called in the same order in
# every forward pass of the model, so the order of the last pass says which unit is next.


@dataclass(slots=True)
class _StreamedUnit:
    """The weights of one unit."""

    names: list[str]
    params: list[nn.Parameter]
    """The parameters in the model; without memory while the unit does not compute."""
    host: _HostWeights
    on_device: list[Tensor] | None = None
    """The weights on the device, or being copied there; None if they are not."""
    copied: Any = None
    """The event after the copies."""


class WeightStream:
    """Keeps the weights of units in host memory or files, and copies them; `stream_weights` creates it."""

    def __init__(self, model: nn.Module, device: torch.device, folder: Path | None) -> None:
        self._model = model
        self._streams = CopyStreams(device, fake=False)
        self._folder = folder
        self._queue = FileQueue() if folder is not None else None
        self._units: list[_StreamedUnit] = []
        self._last_order: list[int] = []
        self._order: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter by name, to be filled; those of units in host memory, or memory-mapped from files."""
        tensors: dict[str, Tensor] = {name: param.detach() for name, param in self._model.named_parameters()}
        for unit in self._units:
            file = unit.host.file
            tensors.update(zip(unit.names, unit.host.copies if file is None else file.mapped().values(), strict=True))
        return tensors

    def filled(self) -> None:
        """Flush to the files what was written into `tensors`; to be called once they are filled."""
        for unit in self._units:
            if unit.host.file is not None:
                unit.host.file.sync()

    def device_bytes(self) -> int:
        """Return the bytes of weights on the device now."""
        resting = sum(p.nbytes for p in self._model.parameters() if p.untyped_storage().nbytes() >= p.nbytes)
        return resting + sum(tensor.nbytes for unit in self._units for tensor in unit.on_device or ())

    def add_unit(self, names: Sequence[str], module: nn.Module) -> None:
        """Offload the weights of a unit, whose names in the model are `names`; tied parameters stay tied."""
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
        """Return at most `count` units that come next in the order of the last pass; after its end, it begins again."""
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
            unit.on_device = list(copies)  # a CPU computes with the host tensors themselves
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
    """Make a model run on a device that is too small for its weights; return the stream that copies them.

    The weights of `units` are kept in host memory (`cpu`) or in files in `folder` (`nvme`); all other parameters and
    buffers are moved to the device. The model may be on the meta device: then the caller fills the parameters through
    the stream's `tensors`, and the buffers, which are uninitialized. For forward passes only.
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
    """Move the buffers of a module to the device and, unless `moved` is None, its parameters, without its children's.

    `moved` has the parameters that were moved already, by the `id` of the original, so that tied ones stay tied.
    """
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
