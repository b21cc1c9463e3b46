"""Weights of a sharded model that live in host memory or in files, and come to the device when a unit gathers them.

[Note: shards without memory] `fully_shard` keeps each rank's part of a unit as a tensor on the device, copies it into
its all-gather, and does not look at it until the next one. So the memory behind a part is given back once it is
copied, and taken and filled again when the unit is to be gathered next. The part itself stays the tensor it was, with
size, strides and place in the model; only its storage comes and goes.

[Note: what comes next] The units are gathered in the same order in every step. So the order of the last step says
which ones to begin with before they are asked for. Nothing is begun whose update is still running: it would be old.
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
    """How many numbers may be in memory."""

    prefetch: int
    live: int
    persistent: int


@dataclass(slots=True)
class _Group:
    """The parts of one unit that are gathered together."""

    shards: list[Tensor]
    """This rank's parts, padded, flat; without memory between their uses."""
    numel: int
    copies: list[Tensor] = field(default_factory=list)
    """The same in host memory; none where they lie in a file."""
    shelf: OffloadFile | None = None
    room: Tensor | None = None
    reading: FileTransfer | None = None
    here: bool = True
    """Whether the parts have memory."""
    arrived: Any = None
    params: list[nn.Parameter] = field(default_factory=list)


class ParamStream:
    """Fetches the weights of units before they are gathered and lets go of them afterwards."""

    def __init__(self, lanes: CopyStreams, limits: ParamLimits, folder: Path | None) -> None:
        """`folder`: for files; absent: host memory."""
        self.lanes = lanes
        self._limits = limits
        self._folder = folder
        self._queue = FileQueue() if folder is not None and not lanes.fake else None
        self._groups: list[_Group] = []
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self._before: list[int] = []
        self._now: list[int] = []
        self._bucket_of: Mapping[int, Bucket] = {}
        self._wait: Callable[[Bucket], None] | None = None

    @property
    def in_files(self) -> bool:
        """Whether the weights lie in files."""
        return self._queue is not None

    # ---- at the start

    def take(self, module: nn.Module) -> None:
        """Take a module of `fully_shard` over: from now on its weights are those that `put` was given."""
        group = fsdp_param_group(module)
        members = [] if group is None else fsdp_params(group)
        params = [fsdp_sharded_param(member) for member in members]
        if group is None or sum(param.numel() for param in params) < self._limits.persistent:
            return
        shards = [fsdp_sharded_param_data(member) for member in members]
        mine = _Group(shards, sum(shard.numel() for shard in shards))
        mine.params = params
        if self._folder is None or (self._queue is None and self.lanes.separate):
            mine.copies = [self.lanes.room(shard.shape, shard.dtype) for shard in shards]
        elif self._queue is None:  # a plan of CPU ranks: there are no files, and nothing else may take memory
            mine.copies = shards
        else:
            layout = [((number, "param"), shard.dtype, shard.shape) for number, shard in enumerate(shards)]
            mine.shelf = OffloadFile(self._queue, self._folder, layout)
        with torch.no_grad():
            for position, (member, shard) in enumerate(zip(members, shards, strict=True)):
                if mine.shelf is None:
                    mine.copies[position].copy_(shard)
                else:
                    mine.shelf.put((position, "param"), shard.cpu()).wait()
                # Before its first use torch looks whether this is still the tensor that was sharded. It is.
                fsdp_disable_reset_sharded_param(member)
        self._places |= {param: (len(self._groups), position) for position, param in enumerate(mine.params)}
        self._groups.append(mine)
        self._surround(group, len(self._groups) - 1)
        self._release(mine)

    def follow_updates(self, bucket_of: Mapping[int, Bucket], wait: Callable[[Bucket], None]) -> None:
        """Learn in which bucket a parameter (by its `id`) is updated, and how to wait for one."""
        self._bucket_of, self._wait = bucket_of, wait

    def _buckets(self, group: _Group) -> list[Bucket]:
        found = (self._bucket_of.get(id(param)) for param in group.params)
        return list({id(bucket): bucket for bucket in found if bucket is not None}.values())

    def _surround(self, group: Any, number: int) -> None:
        def fetch() -> None:
            if not fsdp_is_unsharded(group) and not fsdp_has_all_gather_result(group):
                self._arrive(number, group)

        def release() -> None:
            if fsdp_is_unsharded(group):
                self._release(self._groups[number])

        fsdp_wrap_unshard(group, fetch, release)

    def host_bytes(self) -> int:
        """Host memory that the weights take; those in files only while they pass."""
        return sum(copy.nbytes for group in self._groups for copy in group.copies if self._folder is None)

    # ---- in a step

    def _arrive(self, number: int, group: Any) -> None:
        """See that a unit's parts are on the device, and begin with those that follow."""
        self._now.append(number)
        mine = self._groups[number]
        for bucket in self._buckets(mine):
            assert self._wait is not None
            self._wait(bucket)
        self._bring(mine)
        if mine.arrived is not None:
            for stream in (fsdp_all_gather_copy_in_stream(group), torch.cuda.current_stream(self.lanes.device)):
                stream.wait_event(mine.arrived)
                for shard in mine.shards:
                    shard.record_stream(stream)
        for following in self._following():
            self._begin(following)

    def restart(self) -> None:
        """Weights are about to change: whatever was begun too early would be old, and the next order begins."""
        for group in self._groups:
            if group.reading is not None:
                group.reading.wait()
            group.room = group.reading = None
            self._release(group)
        if self._now:
            self._before, self._now = self._now, []

    def _following(self) -> list[_Group]:
        """The units that come next, as far as the limits allow."""
        at = len(self._now)
        if self._before[:at] != self._now:
            return []  # this step goes another way
        found: list[_Group] = []
        live = sum(group.numel for group in self._groups if group.here or group.room is not None)
        early = 0  # of all that are there before their turn, those that came with an earlier unit among them
        for number in dict.fromkeys(self._before[at:]):
            group = self._groups[number]
            if number == self._now[-1]:
                continue
            first = not early
            early += group.numel
            # The next unit comes early however large it is, unless nothing is to.
            if early > self._limits.prefetch and not (first and self._limits.prefetch):
                break
            if group.here or group.room is not None:
                continue
            live += group.numel
            if live > self._limits.live:
                break
            if any(bucket.update is not None and not bucket.update.done() for bucket in self._buckets(group)):
                break
            found.append(group)
        return found

    def _begin(self, group: _Group) -> None:
        if group.shelf is None:
            self._bring(group)
        else:
            self._read(group)

    def _read(self, group: _Group) -> None:
        assert group.shelf is not None
        if group.room is None:
            group.room = host_empty(group.shelf.size, dtype=torch.uint8)
            group.reading = group.shelf.read(group.room)

    def _bring(self, group: _Group) -> None:
        if group.here:
            return
        copies: Sequence[Tensor] = group.copies
        if group.shelf is not None:
            self._read(group)
            assert group.reading is not None
            assert group.room is not None
            group.reading.wait()
            copies = list(group.shelf.views(group.room).values())
        for shard in group.shards:
            shard.untyped_storage().resize_(shard.numel() * shard.itemsize)
        with torch.no_grad():
            self.lanes.hold_back(self.lanes.mark())
            with self.lanes.backwards():
                for shard, copy in zip(group.shards, copies, strict=True):
                    shard.copy_(copy, non_blocking=group.shelf is None)
                    self.lanes.fills(shard)
            group.arrived = self.lanes.mark_back()
        group.room = group.reading = None
        group.here = True

    def _release(self, group: _Group) -> None:
        if group.here:
            for shard in group.shards:
                shard.untyped_storage().resize_(0)
            group.here = False
            group.arrived = None

    # ---- for those who write weights

    def place_of(self, param: nn.Parameter) -> tuple[int, int] | None:
        """Where the weights of a parameter are kept; None for one that stays on the device."""
        return self._places.get(param)

    def target(self, place: tuple[int, int], shape: torch.Size) -> Tensor:
        """Host memory for this rank's part; of one in a file, a tensor of the right shape without memory."""
        number, position = place
        group = self._groups[number]
        if group.shelf is None:
            return group.copies[position][: shape.numel()].view(shape)
        return torch.empty((), dtype=group.shards[position].dtype).expand(shape)

    def put(self, place: tuple[int, int], values: Tensor) -> None:
        """Write this rank's part of a parameter to where it is kept."""
        number, position = place
        group = self._groups[number]
        if group.shelf is None:
            group.copies[position][: values.numel()].view(values.shape).copy_(values)
        elif values.numel():
            group.shelf.put((position, "param"), values.contiguous()).wait()


# A model larger than its device, for generation and evaluation: weights come unit by unit, and go again.
#
# [Note: one unit ahead] While a unit computes, the next one travels: from pinned host memory, or from a file, which is
# read one unit earlier still. So the device holds two units and what belongs to none, the host of the `nvme` tier two
# units more. Units are called in the same order for every token, so the order of the last pass says which is next.


@dataclass(slots=True)
class _Held:
    """The weights of one unit."""

    names: list[str]
    params: list[nn.Parameter]
    """Without memory between their uses."""
    copies: list[Tensor] = field(default_factory=list)
    """In host memory; none where they lie in a file."""
    shelf: OffloadFile | None = None
    room: Tensor | None = None
    reading: FileTransfer | None = None
    here: list[Tensor] | None = None
    """On the device, or on the way there."""
    mark: Any = None


class WeightStream:
    """The weights of a model's units, in host memory or files. Made by `stream_weights`, filled through `tensors`."""

    def __init__(self, model: nn.Module, device: torch.device, folder: Path | None) -> None:
        self._model = model
        self._lanes = CopyStreams(device, fake=False)
        self._folder = folder
        self._queue = FileQueue() if folder is not None else None
        self._held: list[_Held] = []
        self._before: list[int] = []
        self._now: list[int] = []

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter by name, to be filled; those of units in host memory, or as memory of their files."""
        found: dict[str, Tensor] = {name: param.detach() for name, param in self._model.named_parameters()}
        for held in self._held:
            copies = held.copies if held.shelf is None else list(held.shelf.mapped().values())
            found.update(zip(held.names, copies, strict=True))
        return found

    def filled(self) -> None:
        """The tensors have their values: see that the files do."""
        for held in self._held:
            if held.shelf is not None:
                held.shelf.sync()

    def device_bytes(self) -> int:
        """What weights take on the device now."""
        resting = sum(p.nbytes for p in self._model.parameters() if p.untyped_storage().nbytes() >= p.nbytes)
        return resting + sum(each.nbytes for held in self._held for each in held.here or ())

    def hold(self, names: Sequence[str], module: nn.Module) -> None:
        """Take over the weights of a unit, with these names in the model."""
        device = self._lanes.device
        params: dict[int, nn.Parameter] = {}
        for inner in module.modules():
            for key, param in inner._parameters.items():
                if param is not None:
                    empty = torch.empty((), dtype=param.dtype, device=device).expand(param.shape)
                    if id(param) not in params:
                        params[id(param)] = nn.Parameter(empty, requires_grad=False)
                    inner._parameters[key] = params[id(param)]
        held = _Held(list(names), list(params.values()))
        if self._queue is None:
            held.copies = [self._lanes.room(param.shape, param.dtype) for param in held.params]
        else:
            assert self._folder is not None
            layout = [((number, "param"), param.dtype, param.shape) for number, param in enumerate(held.params)]
            held.shelf = OffloadFile(self._queue, self._folder, layout)
        number = len(self._held)
        self._held.append(held)
        module.register_forward_pre_hook(lambda _module, _inputs: self._arrive(number))
        module.register_forward_hook(lambda _module, _inputs, _outputs: self._leave(number), always_call=True)

    def _arrive(self, number: int) -> None:
        if not self._now or number in self._now:  # a new pass
            self._before, self._now = self._now or self._before, []
        self._now.append(number)
        held = self._held[number]
        self._bring(held)
        assert held.here is not None
        self._lanes.follow(held.mark)
        for param, tensor in zip(held.params, held.here, strict=True):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
            param.data = tensor
        following = [self._held[each] for each in self._next(2)]
        for each in following[:1]:
            self._bring(each)
        for each in following[1:]:
            self._read(each)

    def _leave(self, number: int) -> None:
        held = self._held[number]
        for param in held.params:
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        held.here = held.mark = None

    def _next(self, count: int) -> list[int]:
        """The units that come next: as in the last pass, which begins anew after its end."""
        at = len(self._now)
        if not self._before or self._before[:at] != self._now:
            return []
        around = self._before[at:] + self._before
        return [each for each in dict.fromkeys(around[:count]) if each != self._now[-1]]

    def _read(self, held: _Held) -> None:
        if held.shelf is not None and held.room is None and held.here is None:
            held.room = host_empty(held.shelf.size, dtype=torch.uint8)
            held.reading = held.shelf.read(held.room)

    def _bring(self, held: _Held) -> None:
        if held.here is not None:
            return
        copies: Sequence[Tensor] = held.copies
        if held.shelf is not None:
            self._read(held)
            assert held.reading is not None
            assert held.room is not None
            held.reading.wait()
            copies = list(held.shelf.views(held.room).values())
        if not self._lanes.separate:
            held.here = list(copies)  # a CPU computes with them where they are
        else:
            with torch.no_grad(), self._lanes.backwards():
                held.here = [copy.to(self._lanes.device, non_blocking=held.shelf is None) for copy in copies]
            held.mark = self._lanes.mark_back()
        held.room = held.reading = None


def stream_weights(
    model: nn.Module,
    units: Sequence[WrapUnit],
    *,
    device: torch.device,
    tier: Literal["cpu", "nvme"],
    folder: Path | None = None,
) -> WeightStream:
    """Make a model run on a device that its weights do not fit: those of `units` live on the host or in `folder`.

    The model may lie on the meta device; weights are then filled through the stream's `tensors`, and its buffers have
    memory and no values yet. For forward passes only.
    """
    stream = WeightStream(model, device, folder if tier == "nvme" else None)
    names = {id(param): name for name, param in model.named_parameters()}
    values = {name: param.data for name, param in model.named_parameters() if not param.is_meta}
    for unit in units:
        seen = {id(param): param for param in unit.module.parameters()}
        stream.hold([names[key] for key in seen], unit.module)
    inside = {id(inner) for unit in units for inner in unit.module.modules()}
    moved: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for module in model.modules():
            _settle(module, device, moved if id(module) not in inside else None)
    model.requires_grad_(False)
    if values:
        with torch.no_grad():
            for name, tensor in stream.tensors().items():
                if name in values:
                    tensor.copy_(values[name])
        stream.filled()
    return stream


def _settle(module: nn.Module, device: torch.device, moved: dict[int, nn.Parameter] | None) -> None:
    """Bring a module's buffers to the device, and, where it is in no unit, its parameters; tied ones stay tied."""
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
