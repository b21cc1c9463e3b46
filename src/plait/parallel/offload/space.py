"""Where an offloaded run has its place: how much host memory and disk it takes, and who computes its updates."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from plait.config import AdamW8bitConfig, RunConfig
from plait.errors import ConfigError, Problem
from plait.launch import cgroup_limit
from plait.optim import ViewGroup, build_optimizer
from plait.parallel.offload.passage import ROOMS
from plait.world import World

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
    optimizer = build_optimizer(config.optim, [ViewGroup(("sample",), [sample])])
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
    return ROOMS * (4 + state_bytes(config)) + 8


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
        message = f"the offloaded state takes {_gib(host)} of this host's memory, and {_gib(free)} are free"
        remedy = f"Use more hosts, `{_PATH}.ratio` to keep a share on the device, or `{_PATH}.optimizer: nvme`."
        problems.append(Problem(f"{_PATH}.optimizer", message, remedy))
    if folder is not None:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        left = shutil.disk_usage(existing).free
        if files > left:
            message = f"the offloaded state takes {_gib(files)} of disk, and {folder} has {_gib(left)} free"
            problems.append(Problem(f"{_PATH}.path", message, "Free space, or name a folder on a larger disk."))
    if world.any(bool(problems)):
        raise ConfigError(problems or [Problem(_PATH, "another host has no space for its state", "See its message.")])
    if host < _MOST * free:
        return ""
    return f"offload takes {_gib(host)} of this host's memory, of {_gib(free)} that are free"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
