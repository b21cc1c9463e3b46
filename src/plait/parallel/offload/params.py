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
from typing import Any

import torch
from torch import Tensor, nn

from plait.ops import FileQueue, Transfer, host_empty
from plait.parallel.offload.buckets import Bucket
from plait.parallel.offload.lanes import Lanes
from plait.parallel.offload.shelf import Shelf
from plait.torch_internals import (
    fsdp_around_gathering,
    fsdp_copy_in_stream,
    fsdp_gathers,
    fsdp_group,
    fsdp_is_gathered,
    fsdp_keep_part,
    fsdp_params,
    fsdp_part,
    fsdp_shard_data,
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
    shelf: Shelf | None = None
    room: Tensor | None = None
    reading: Transfer | None = None
    here: bool = True
    """Whether the parts have memory."""
    arrived: Any = None
    params: list[nn.Parameter] = field(default_factory=list)


class ParamStream:
    """Fetches the weights of units before they are gathered and lets go of them afterwards."""

    def __init__(self, lanes: Lanes, limits: ParamLimits, folder: Path | None) -> None:
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
        group = fsdp_group(module)
        members = [] if group is None else fsdp_params(group)
        params = [fsdp_part(member) for member in members]
        if group is None or sum(param.numel() for param in params) < self._limits.persistent:
            return
        shards = [fsdp_shard_data(member) for member in members]
        mine = _Group(shards, sum(shard.numel() for shard in shards))
        mine.params = params
        if self._folder is None or (self._queue is None and self.lanes.separate):
            mine.copies = [self.lanes.room(shard.shape, shard.dtype) for shard in shards]
        elif self._queue is None:  # a plan of CPU ranks: there are no files, and nothing else may take memory
            mine.copies = shards
        else:
            layout = [((number, "param"), shard.dtype, shard.shape) for number, shard in enumerate(shards)]
            mine.shelf = Shelf(self._queue, self._folder, layout)
        with torch.no_grad():
            for position, (member, shard) in enumerate(zip(members, shards, strict=True)):
                if mine.shelf is None:
                    mine.copies[position].copy_(shard)
                else:
                    mine.shelf.put((position, "param"), shard.cpu()).wait()
                # Before its first use torch looks whether this is still the tensor that was sharded. It is.
                fsdp_keep_part(member)
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
            if not fsdp_is_gathered(group) and not fsdp_gathers(group):
                self._arrive(number, group)

        def release() -> None:
            if fsdp_is_gathered(group):
                self._release(self._groups[number])

        fsdp_around_gathering(group, fetch, release)

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
            for stream in (fsdp_copy_in_stream(group), torch.cuda.current_stream(self.lanes.device)):
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
