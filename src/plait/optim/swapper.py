"""Buckets in files pass through a few rooms of host memory.

[Note: rooms] While one bucket is updated, the next is being read and the one before is being written: three rooms, in
turn. They are all the host memory that the state of any number of parameters takes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.config import AdamW8bitConfig, RunConfig
from plait.distributed import STATE_SEPARATOR, Bucket, Key, OffloadFile, World, state_tensors
from plait.errors import ConfigError, Problem
from plait.kernels import FileQueue, FileTransfer, host_empty
from plait.launch import cgroup_limit
from plait.monitor import format_bytes
from plait.optim.base import MakeState
from plait.optim.groups import OptimizerGroup
from plait.optim.optimizers import build_optimizer

HOST_BUFFERS = 3
_WEIGHT = "weight"


class _HostBuffer:
    """Host memory for one bucket at a time."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: list[Tensor] = []
        self.under_way: list[FileTransfer] = []
        self.bucket: int | None = None

    def memory(self, number: int, size: int) -> Tensor:
        while len(self._memory) <= number:
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[number].numel() < size:
            self._memory[number] = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory[number] = host_empty(size, dtype=torch.uint8, pinned=self._pinned)
        return self._memory[number]

    def wait(self) -> None:
        transfers, self.under_way = self.under_way, []
        for transfer in transfers:
            transfer.wait()


class NvmeSwapper:
    """The fp32 weights and optimizer state of buckets in files. Between their turns the tensors have no memory."""

    def __init__(
        self, buckets: Sequence[Bucket], folder: Path, say: Callable[[str], None], *, pinned: bool = False
    ) -> None:
        """`pinned`: a device copies from and to the rooms."""
        self._folder = folder
        self._queue = FileQueue()
        self._buckets = list(buckets)
        self._number = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._weights = [
            OffloadFile(
                self._queue,
                folder,
                [((index, _WEIGHT), master.dtype, master.shape) for index, master, _ in bucket.items()],
            )
            for bucket in self._buckets
        ]
        self._states: list[OffloadFile | None] = [None] * len(self._buckets)
        self._packed: dict[Key, Any] = {}
        """States that are several tensors: what they are made of, without the tensors."""
        self._rooms = [_HostBuffer(pinned=pinned) for _ in range(HOST_BUFFERS)]
        self._optimizer: Optimizer | None = None
        for bucket in self._buckets:
            self._hide(bucket)
        if self._weights and not self._weights[0].file.direct:
            why = self._weights[0].file.buffered_because
            say(f"offload: files in {folder} go through the page cache, which is slower: {why}")

    # ---- weights at the start

    def put_weight(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Store the fp32 weights of one parameter."""
        self._weights[self._number[id(bucket)]].put((index, _WEIGHT), values.contiguous()).wait()

    def attach(self, optimizer: Optimizer) -> None:
        """Take over what state the optimizer has from the start."""
        self._optimizer = optimizer
        for number, bucket in enumerate(self._buckets):
            if self._tensors(bucket):
                self._store_states(number, bucket)
                self._hide(bucket)

    # ---- one bucket's turn

    def enter(self, bucket: Bucket) -> None:
        """Give a bucket its tensors, and begin to read the next."""
        number = self._number[id(bucket)]
        room = self._fetch(number)
        room.wait()
        self._show(bucket, self._views(number, room))
        if number + 1 < len(self._buckets):
            self._fetch(number + 1)

    def leave(self, bucket: Bucket) -> None:
        """Begin to write a bucket's tensors back, and take them away."""
        number = self._number[id(bucket)]
        room = self._rooms[number % HOST_BUFFERS]
        states = self._states[number]
        weights = self._weights[number]
        room.under_way.append(weights.write(room.memory(0, weights.size)))
        if states is None or {key for key, _ in self._tensors(bucket)} != states.regions.keys():
            self._store_states(number, bucket)  # the first update has made some, in memory of their own
        else:
            room.under_way.append(states.write(room.memory(1, states.size)))
        room.bucket = None
        self._hide(bucket)

    def is_last(self, bucket: Bucket) -> bool:
        """Whether no other one has its turn after it."""
        return bucket is self._buckets[-1]

    def weights(self, bucket: Bucket) -> list[Tensor]:
        """A bucket's fp32 weights, until the next call: for bringing the model up to date outside of an update."""
        number = self._number[id(bucket)]
        room, shelf = self._rooms[number % HOST_BUFFERS], self._weights[number]
        room.wait()
        room.bucket = None
        memory = room.memory(0, shelf.size)
        shelf.read(memory).wait()
        return list(shelf.views(memory).values())

    def weight(self, bucket: Bucket, index: int) -> Tensor:
        """The fp32 weights of one parameter, as memory of their file. Nothing may be under way."""
        return self._weights[self._number[id(bucket)]].mapped()[index, _WEIGHT]

    def settle(self) -> None:
        """Wait until the files hold everything."""
        for room in self._rooms:
            room.wait()
            room.bucket = None

    def _fetch(self, number: int) -> _HostBuffer:
        room = self._rooms[number % HOST_BUFFERS]
        if room.bucket != number:
            room.wait()  # for the writing of the bucket that was here
            weights, states = self._weights[number], self._states[number]
            room.under_way.append(weights.read(room.memory(0, weights.size)))
            if states is not None:
                room.under_way.append(states.read(room.memory(1, states.size)))
            room.bucket = number
        return room

    def _views(self, number: int, room: _HostBuffer) -> dict[Key, Tensor]:
        weights, states = self._weights[number], self._states[number]
        found = weights.views(room.memory(0, weights.size))
        return found if states is None else found | states.views(room.memory(1, states.size))

    # ---- for checkpoints

    def reveal(self) -> None:
        """Give every bucket its tensors as memory of the files; `hide` takes them away again."""
        self.settle()
        for number, bucket in enumerate(self._buckets):
            for shelf in (self._weights[number], self._states[number]):
                if shelf is not None:
                    self._show(bucket, shelf.mapped())

    def loaded(self) -> None:
        """Somebody wrote into revealed tensors: let the disk have it, past which direct requests would not see it."""
        for shelf in (*self._weights, *self._states):
            if shelf is not None:
                shelf.sync()

    def hide(self) -> None:
        """Take the tensors away; whoever holds one can still use it."""
        for bucket in self._buckets:
            self._hide(bucket)

    def make_room(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> None:
        """Files for the state that a checkpoint is about to fill: for each parameter, what makes each of its states."""
        for number, bucket in enumerate(self._buckets):
            tensors = []
            for index, master, _ in bucket.items():
                whole = torch.empty(master.shape, dtype=master.dtype)
                state = {key: make(whole) for key, make in wanted.get(index, {}).items()}
                tensors += [((index, key), leaf.dtype, leaf.shape) for key, leaf in state_tensors(state)]
                self._remember(index, state)
            self._states[number] = OffloadFile(self._queue, self._folder, tensors) if tensors else None

    # ---- the tensors that the optimizer knows

    def _tensors(self, bucket: Bucket) -> list[tuple[Key, Tensor]]:
        assert self._optimizer is not None
        return [
            ((index, key), value)
            for index, master, _ in bucket.items()
            for key, value in state_tensors(self._optimizer.state.get(master, {}))
        ]

    def _store_states(self, number: int, bucket: Bucket) -> None:
        tensors = self._tensors(bucket)
        shelf = OffloadFile(self._queue, self._folder, [(key, value.dtype, value.shape) for key, value in tensors])
        for transfer in [shelf.put(key, value.contiguous()) for key, value in tensors]:
            transfer.wait()
        self._states[number] = shelf
        assert self._optimizer is not None
        for index, master, _ in bucket.items():
            self._remember(index, self._optimizer.state[master])

    def _remember(self, index: int, state: Mapping[str, Any]) -> None:
        """What the states of a parameter are made of, for when their tensors come back."""
        for name, value in state.items():
            if hasattr(value, "_replace"):
                empty = {field: None for field in value._fields if isinstance(getattr(value, field), Tensor)}
                self._packed[index, name] = value._replace(**empty)

    def _show(self, bucket: Bucket, tensors: Mapping[Key, Tensor]) -> None:
        masters = dict(zip(bucket.span.indices, bucket.masters, strict=True))
        for (index, key), tensor in tensors.items():
            if key == _WEIGHT:
                masters[index].data = tensor
            else:
                assert self._optimizer is not None
                state = self._optimizer.state[masters[index]]
                name, _, part = key.partition(STATE_SEPARATOR)
                if part:
                    whole = state[name] if hasattr(state.get(name), "_replace") else self._packed[index, name]
                    state[name] = whole._replace(**{part: tensor})
                else:
                    state[name] = tensor

    def _hide(self, bucket: Bucket) -> None:
        for _, master, _ in bucket.items():
            # The right shape, and no memory.
            master.data = torch.empty((), dtype=master.dtype).expand(master.shape)
            state = self._optimizer.state.get(master, {}) if self._optimizer is not None else {}
            for key in {key.partition(STATE_SEPARATOR)[0] for key, _ in state_tensors(state)}:
                del state[key]


# Where an offloaded run has its place: how much host memory and disk it takes, and who computes its updates.


_SAMPLE = (64, 256)
_ASIDE = 10 << 20
"""Of a budget, for the threads that read and write files and their buffers; at most a quarter."""
_MOST = 0.8
"""From this share of the free memory on, a run says so."""
_PATH = "strategy.offload"


LINK_OF_A_CORE = 2.0
"""GB/s to the device that are worth as much as one of the host's cores. A core updates about 4 GB/s of host memory (16
beside an H200 did 63), and twice as many bytes of a number pass through it as come to the device to be updated there.
"""


def updates_on_device(config: RunConfig, kind: str, *, cores: float, link_gbps: Callable[[], float]) -> bool:
    """Whether a device of this kind computes the update, with so many cores of the host for each device.

    `link_gbps`: how fast copies to the device are, where that decides it.
    """
    offload = config.strategy.offload
    if offload.update != "auto":
        return offload.update == "device"
    if kind != "cuda" or offload.delayed or offload.params != "none":
        return False
    # With 8-bit moments cores are busy with arithmetic, for longer than with their memory.
    return isinstance(config.optim, AdamW8bitConfig) or link_gbps() > LINK_OF_A_CORE * cores


def state_bytes(config: RunConfig) -> float:
    """Bytes that the optimizer keeps for each number, found by asking it to update a few."""
    sample = torch.nn.Parameter(torch.zeros(_SAMPLE, device="cpu"))
    optimizer = build_optimizer(config.optim, [OptimizerGroup(("sample",), [sample])])
    sample.grad = torch.zeros_like(sample)
    optimizer.step()
    kept = [value for value in optimizer.state[sample].values() if not isinstance(value, torch.Tensor) or value.ndim]
    return sum(int(value.nbytes) for value in kept) / sample.numel()


def numbers_in_a_bucket(config: RunConfig, sizes: Sequence[int], names: Sequence[str]) -> int:
    """How many numbers are updated as one."""
    offload = config.strategy.offload
    wanted = max(int(offload.bucket_mb * 2**20 / 4), 1)
    if offload.budget_gib is None:
        return wanted
    budget = offload.budget_gib * 2**30
    each = _bytes_in_passing(config)
    limit = int((budget - min(_ASIDE, budget / 4)) / each)
    largest = max(range(len(sizes)), key=lambda index: sizes[index])
    if sizes[largest] > limit:
        message = (
            f"{offload.budget_gib:g} has room for {limit:,} numbers at a time, but {names[largest]} has "
            f"{sizes[largest]:,} on this rank"
        )
        raise ConfigError(
            Problem(f"{_PATH}.budget_gib", message, f"Write at least {sizes[largest] * each * 4 / 3 / 2**30:.3g}.")
        )
    return min(wanted, limit)


def host_need(config: RunConfig, numbers: int) -> float:
    """Bytes of host memory that one rank takes for so many trained numbers, beside what training takes anyway."""
    offload = config.strategy.offload
    away = numbers * (1.0 - offload.share - offload.host_ratio)
    computing = _computing_bytes(config)
    gradients = computing * (3 if offload.delayed else 1)  # two sets of them, and weights that are late
    in_memory = 4 + state_bytes(config) + gradients
    params = numbers * computing if offload.params == "cpu" else 0
    if offload.optimizer == "nvme":
        bucket = offload.bucket_mb * 2**20 / 4
        passing = min(bucket, away) * _bytes_in_passing(config)
        rooms = passing if offload.budget_gib is None else offload.budget_gib * 2**30
        return params + rooms + numbers * offload.host_ratio * in_memory
    return params + away * in_memory


def file_need(config: RunConfig, numbers: int) -> float:
    """Bytes of disk that one rank takes."""
    offload = config.strategy.offload
    away = numbers * (1.0 - offload.share - offload.host_ratio) if offload.optimizer == "nvme" else 0.0
    params = numbers * _computing_bytes(config) if offload.params == "nvme" else 0.0
    return away * (4 + state_bytes(config)) + params


def _computing_bytes(config: RunConfig) -> int:
    """Of a number in the format that computes."""
    return 2 if config.precision.compute in ("bf16", "fp16") else 4


def _bytes_in_passing(config: RunConfig) -> float:
    """Host memory for each number of a bucket in files: its rooms, a gradient, and a weight on its way back."""
    return HOST_BUFFERS * (4 + state_bytes(config)) + 8


def check_space(config: RunConfig, world: World, sizes: Sequence[int], folder: Path | None) -> str:
    """Refuse a run whose state has no place; returns a warning where it has just enough. Every rank must ask."""
    numbers = sum(sizes)
    here = world.ranks.rank // world.ranks.local_size
    parts = world.gather((here, host_need(config, numbers), file_need(config, numbers)))
    host = sum(need for node, need, _ in parts if node == here)
    files = sum(need for node, _, need in parts if node == here)
    free = min(psutil.virtual_memory().available, cgroup_limit() or sys.maxsize)
    problems = []
    if host > free:
        message = (
            f"the offloaded state takes {format_bytes(host)} of this host's memory, and {format_bytes(free)} are free"
        )
        remedy = f"Use more hosts, `{_PATH}.ratio` to keep a share on the device, or `{_PATH}.optimizer: nvme`."
        problems.append(Problem(f"{_PATH}.optimizer", message, remedy))
    if folder is not None:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        left = shutil.disk_usage(existing).free
        if files > left:
            message = (
                f"the offloaded state takes {format_bytes(files)} of disk, and {folder} has {format_bytes(left)} free"
            )
            problems.append(Problem(f"{_PATH}.path", message, "Free space, or name a folder on a larger disk."))
    if world.any(bool(problems)):
        raise ConfigError(problems or [Problem(_PATH, "another host has no space for its state", "See its message.")])
    if host < _MOST * free:
        return ""
    return f"offload takes {format_bytes(host)} of this host's memory, of {format_bytes(free)} that are free"
