"""The NVMe swapper: optimizer state in files, of which a few buckets at a time are in host memory.

[Note: host buffers] While one bucket is updated, the next one is read and the previous one is written. So three buffers
of host memory, each as large as a bucket, are enough for any number of parameters.
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
    """Host memory that is reused for one bucket after another; `bucket` is the number of the one in it."""

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
    """Stores the fp32 weights and optimizer states of buckets in files.

    The tensors that the optimizer holds have memory only between `swap_in` and `swap_out` of their bucket.
    """

    def __init__(
        self, buckets: Sequence[Bucket], folder: Path, log: Callable[[str], None], *, pinned: bool = False
    ) -> None:
        """`pinned`: use pinned buffers, since a device copies from and to them."""
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
        """States that are named tuples of tensors (8-bit moments): the tuples, with None in place of each tensor."""
        self._buffers = [_HostBuffer(pinned=pinned) for _ in range(HOST_BUFFERS)]
        self._optimizer: Optimizer | None = None
        for bucket in self._buckets:
            self._release(bucket)
        if self._weights and not self._weights[0].file.direct:
            why = self._weights[0].file.buffered_because
            log(f"offload: files in {folder} go through the page cache, which is slower: {why}")

    # ---- weights at the start

    def put_weight(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Write the fp32 weights of one parameter to the file."""
        self._weights[self._number[id(bucket)]].put((index, _WEIGHT), values.contiguous()).wait()

    def attach(self, optimizer: Optimizer) -> None:
        """Set the optimizer, and write the states that it has before the first step to files."""
        self._optimizer = optimizer
        for number, bucket in enumerate(self._buckets):
            if self._tensors(bucket):
                self._store_states(number, bucket)
                self._release(bucket)

    # ---- swapping one bucket

    def swap_in(self, bucket: Bucket) -> None:
        """Read a bucket's tensors and set them in the optimizer; start to read the next bucket."""
        number = self._number[id(bucket)]
        buffer = self._fetch(number)
        buffer.wait()
        self._set_tensors(bucket, self._views(number, buffer))
        if number + 1 < len(self._buckets):
            self._fetch(number + 1)

    def swap_out(self, bucket: Bucket) -> None:
        """Start to write a bucket's tensors to its files; the optimizer's tensors have no memory afterwards."""
        number = self._number[id(bucket)]
        buffer = self._buffers[number % HOST_BUFFERS]
        states = self._states[number]
        weights = self._weights[number]
        buffer.under_way.append(weights.write(buffer.memory(0, weights.size)))
        if states is None or {key for key, _ in self._tensors(bucket)} != states.regions.keys():
            self._store_states(number, bucket)  # the first update created states, whose files do not exist yet
        else:
            buffer.under_way.append(states.write(buffer.memory(1, states.size)))
        buffer.bucket = None
        self._release(bucket)

    def is_last(self, bucket: Bucket) -> bool:
        """Whether this is the last bucket to be updated."""
        return bucket is self._buckets[-1]

    def weights(self, bucket: Bucket) -> list[Tensor]:
        """Return a bucket's fp32 weights, in a buffer that the next call overwrites; for use outside of a step."""
        number = self._number[id(bucket)]
        buffer, file = self._buffers[number % HOST_BUFFERS], self._weights[number]
        buffer.wait()
        buffer.bucket = None
        memory = buffer.memory(0, file.size)
        file.read(memory).wait()
        return list(file.views(memory).values())

    def weight(self, bucket: Bucket, index: int) -> Tensor:
        """Return the fp32 weights of one parameter, as a memory map of their file. No transfer may be pending."""
        return self._weights[self._number[id(bucket)]].mapped()[index, _WEIGHT]

    def settle(self) -> None:
        """Block until all pending reads and writes of files are done."""
        for buffer in self._buffers:
            buffer.wait()
            buffer.bucket = None

    def _fetch(self, number: int) -> _HostBuffer:
        buffer = self._buffers[number % HOST_BUFFERS]
        if buffer.bucket != number:
            buffer.wait()  # until the previous bucket in this buffer is written
            weights, states = self._weights[number], self._states[number]
            buffer.under_way.append(weights.read(buffer.memory(0, weights.size)))
            if states is not None:
                buffer.under_way.append(states.read(buffer.memory(1, states.size)))
            buffer.bucket = number
        return buffer

    def _views(self, number: int, buffer: _HostBuffer) -> dict[Key, Tensor]:
        weights, states = self._weights[number], self._states[number]
        weight_views = weights.views(buffer.memory(0, weights.size))
        return weight_views if states is None else weight_views | states.views(buffer.memory(1, states.size))

    # ---- for checkpoints

    def map_files(self) -> None:
        """Let the optimizer's tensors of every bucket be memory maps of the files, until `unmap_files`."""
        self.settle()
        for number, bucket in enumerate(self._buckets):
            for file in (self._weights[number], self._states[number]):
                if file is not None:
                    self._set_tensors(bucket, file.mapped())

    def sync_files(self) -> None:
        """Flush memory maps that were written to: direct I/O, which reads the files later, bypasses the page cache."""
        for file in (*self._weights, *self._states):
            if file is not None:
                file.sync()

    def unmap_files(self) -> None:
        """End `map_files`; references to the memory maps stay valid."""
        for bucket in self._buckets:
            self._release(bucket)

    def allocate_states(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> None:
        """Create the files of states that a checkpoint will be loaded into.

        `wanted` has for each parameter index and state a function that allocates the state.
        """
        for number, bucket in enumerate(self._buckets):
            tensors = []
            for index, master, _ in bucket.items():
                whole = torch.empty(master.shape, dtype=master.dtype)
                state = {key: make(whole) for key, make in wanted.get(index, {}).items()}
                tensors += [((index, key), leaf.dtype, leaf.shape) for key, leaf in state_tensors(state)]
                self._record_packed(index, state)
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
        file = OffloadFile(self._queue, self._folder, [(key, value.dtype, value.shape) for key, value in tensors])
        for transfer in [file.put(key, value.contiguous()) for key, value in tensors]:
            transfer.wait()
        self._states[number] = file
        assert self._optimizer is not None
        for index, master, _ in bucket.items():
            self._record_packed(index, self._optimizer.state[master])

    def _record_packed(self, index: int, state: Mapping[str, Any]) -> None:
        """Record the named tuples that hold several tensors of a state, to rebuild them when the tensors are read."""
        for name, value in state.items():
            if hasattr(value, "_replace"):
                empty = {field: None for field in value._fields if isinstance(getattr(value, field), Tensor)}
                self._packed[index, name] = value._replace(**empty)

    def _set_tensors(self, bucket: Bucket, tensors: Mapping[Key, Tensor]) -> None:
        masters = dict(zip(bucket.span.indices, bucket.masters, strict=True))
        for (index, key), tensor in tensors.items():
            if key == _WEIGHT:
                masters[index].data = tensor
            else:
                assert self._optimizer is not None
                state = self._optimizer.state[masters[index]]
                name, _, field = key.partition(STATE_SEPARATOR)
                if field:
                    whole = state[name] if hasattr(state.get(name), "_replace") else self._packed[index, name]
                    state[name] = whole._replace(**{field: tensor})
                else:
                    state[name] = tensor

    def _release(self, bucket: Bucket) -> None:
        for _, master, _ in bucket.items():
            # One element, expanded to the shape of the master: it takes no memory.
            master.data = torch.empty((), dtype=master.dtype).expand(master.shape)
            state = self._optimizer.state.get(master, {}) if self._optimizer is not None else {}
            for key in {key.partition(STATE_SEPARATOR)[0] for key, _ in state_tensors(state)}:
                del state[key]


# How much host memory and disk an offloaded run takes, and whether the CPU or the device computes its updates.


_SAMPLE = (64, 256)
"""The shape of the parameter with which `state_bytes` measures."""
_IO_BYTES = 10 << 20
"""Bytes of `budget_gib` that are reserved for the I/O threads and their buffers; at most a quarter of it."""
_WARN_SHARE = 0.8
"""A warning is logged if offload takes at least this fraction of the free host memory."""
_PATH = "strategy.offload"


LINK_GBPS_PER_CORE = 2.0
"""How many GB/s of PCIe or NVLink bandwidth are worth one host core, in deciding where to update.

A core updates about 4 GB/s of host memory (16 cores of an H200 machine reached 63), and an update on the host moves
twice as many bytes of memory per element as an update on the device moves over the link."""


def updates_on_device(config: RunConfig, device_type: str, *, cores: float, link_gbps: Callable[[], float]) -> bool:
    """Return whether a device of this type computes the update, by `strategy.offload.update`.

    `auto` compares `cores`, the host cores per device, with `link_gbps()`, which measures the bandwidth of copies to
    the device; it is called only if needed.
    """
    offload = config.strategy.offload
    if offload.update != "auto":
        return offload.update == "device"
    if device_type != "cuda" or offload.delayed or offload.params != "none":
        return False
    # With 8-bit moments the host's update is limited by its arithmetic, not by memory bandwidth.
    return isinstance(config.optim, AdamW8bitConfig) or link_gbps() > LINK_GBPS_PER_CORE * cores


def state_bytes(config: RunConfig) -> float:
    """Return the bytes of optimizer state per parameter element, measured by updating a small sample."""
    sample = torch.nn.Parameter(torch.zeros(_SAMPLE, device="cpu"))
    optimizer = build_optimizer(config.optim, [OptimizerGroup(("sample",), [sample])])
    sample.grad = torch.zeros_like(sample)
    optimizer.step()
    kept = [value for value in optimizer.state[sample].values() if not isinstance(value, torch.Tensor) or value.ndim]
    return sum(int(value.nbytes) for value in kept) / sample.numel()


def bucket_elements(config: RunConfig, sizes: Sequence[int], names: Sequence[str]) -> int:
    """Return the largest number of elements in a bucket, by `bucket_mb` and `budget_gib`.

    `sizes` and `names` are those of the trained parameters on this rank. Raises `ConfigError` if the budget is too
    small for the largest of them.
    """
    offload = config.strategy.offload
    wanted = max(int(offload.bucket_mb * 2**20 / 4), 1)
    if offload.budget_gib is None:
        return wanted
    budget = offload.budget_gib * 2**30
    bytes_per_number = _bytes_in_passing(config)
    limit = int((budget - min(_IO_BYTES, budget / 4)) / bytes_per_number)
    largest = max(range(len(sizes)), key=lambda index: sizes[index])
    if sizes[largest] > limit:
        message = (
            f"{offload.budget_gib:g} has memory for {limit:,} elements at a time, but {names[largest]} has "
            f"{sizes[largest]:,} on this rank"
        )
        raise ConfigError(
            Problem(
                f"{_PATH}.budget_gib",
                message,
                f"Write at least {sizes[largest] * bytes_per_number * 4 / 3 / 2**30:.3g}.",
            )
        )
    return min(wanted, limit)


def host_need(config: RunConfig, numbers: int) -> float:
    """Return the bytes of host memory that offload takes on one rank with `numbers` trained elements."""
    offload = config.strategy.offload
    away = numbers * (1.0 - offload.share - offload.host_ratio)
    computing = _computing_bytes(config)
    gradients = computing * (3 if offload.delayed else 1)  # two sets of them, and delayed weights
    in_memory = 4 + state_bytes(config) + gradients
    params = numbers * computing if offload.params == "cpu" else 0
    if offload.optimizer == "nvme":
        bucket = offload.bucket_mb * 2**20 / 4
        passing = min(bucket, away) * _bytes_in_passing(config)
        buffers = passing if offload.budget_gib is None else offload.budget_gib * 2**30
        return params + buffers + numbers * offload.host_ratio * in_memory
    return params + away * in_memory


def file_need(config: RunConfig, numbers: int) -> float:
    """Return the bytes of disk that offload takes on one rank with `numbers` trained elements."""
    offload = config.strategy.offload
    away = numbers * (1.0 - offload.share - offload.host_ratio) if offload.optimizer == "nvme" else 0.0
    params = numbers * _computing_bytes(config) if offload.params == "nvme" else 0.0
    return away * (4 + state_bytes(config)) + params


def _computing_bytes(config: RunConfig) -> int:
    """Return the bytes per element of the compute dtype."""
    return 2 if config.precision.compute in ("bf16", "fp16") else 4


def _bytes_in_passing(config: RunConfig) -> float:
    """Return the bytes of host memory per element of a bucket in files: its buffers, a gradient, an updated weight."""
    return HOST_BUFFERS * (4 + state_bytes(config)) + 8


def check_space(config: RunConfig, world: World, sizes: Sequence[int], folder: Path | None) -> str:
    """Raise `ConfigError` if offloaded state does not fit in memory or disk; return a warning if it barely fits, or "".

    `sizes` are the elements of the trained parameters on this rank. Every rank must call it.
    """
    numbers = sum(sizes)
    my_node = world.ranks.rank // world.ranks.local_size
    needs = world.gather((my_node, host_need(config, numbers), file_need(config, numbers)))
    host = sum(need for node, need, _ in needs if node == my_node)
    files = sum(need for node, _, need in needs if node == my_node)
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
        raise ConfigError(problems or [Problem(_PATH, "the state does not fit on another host", "See its message.")])
    if host < _WARN_SHARE * free:
        return ""
    return f"offload takes {format_bytes(host)} of the {format_bytes(free)} of memory that are free on this host"
