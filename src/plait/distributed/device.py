"""Choose the device of this rank, and the process-group backend for it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from plait.distributed.ranks import DEFAULT_PORT, Ranks
from plait.errors import WorldError
from plait.torch_internals import set_allocator_settings

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "mps": "gloo"}


def choose_device(setting: str, ranks: Ranks) -> torch.device:
    """Return the device of this rank: the type that `setting` (the key `device`) names, or the best available one.

    It becomes the current device. Raise a `WorldError` if this rank has no such device.
    """
    device_type = _best_device_type(ranks) if setting == "auto" else setting
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type == "mps":
        return _choose_mps(ranks)
    module = getattr(torch, device_type)
    if not module.is_available():
        raise WorldError(f"device: {device_type}, but torch {torch.__version__} sees none; set device: cpu")
    count = module.device_count()
    if ranks.local_rank >= count:
        raise WorldError(
            f"rank {ranks.rank} has no {device_type} device: {ranks.local_size} processes on this host, {count} "
            f"devices. Start at most {count} here, or set device: cpu"
        )
    device = torch.device(device_type, ranks.local_rank)
    module.set_device(device)
    if device_type == "cuda" and may_set_expandable_segments(os.environ, sys.platform):
        use_expandable_segments()
    return device


def device_from_env(variable: str) -> str:
    """Return the device type that an environment variable names; `auto` if it is not set.

    Raise a `WorldError` for a type that Plait does not support or that torch does not find.
    """
    device_type = os.environ.get(variable) or "auto"
    if device_type not in ("auto", *BACKENDS):
        raise WorldError(
            f"{variable}={device_type}: Plait computes on {', '.join(BACKENDS)}; write one of these, or unset it"
        )
    if device_type not in ("auto", "cpu") and not torch.get_device_module(device_type).is_available():
        raise WorldError(
            f"{variable}={device_type}, but torch {torch.__version__} sees no such device; write cpu, or unset it"
        )
    return device_type


def may_set_expandable_segments(environment: Mapping[str, str], platform: str) -> bool:
    """Return whether Plait may change allocator settings: on Linux, unless the user has set some."""
    return platform == "linux" and not any(environment.get(name) for name in _ALLOCATOR_SETTINGS)


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator extend a segment in place, rather than allocate another one.

    Otherwise the optimizer's update cannot use memory that the backward pass freed in blocks of other sizes: on a
    device that is almost full, a few per cent are lost to this fragmentation.
    """
    # The public setting is an environment variable, which torch may have read already and children inherit.
    set_allocator_settings("expandable_segments:True")


def _best_device_type(ranks: Ranks) -> str:
    for device_type in ("cuda", "xpu"):
        if getattr(torch, device_type).is_available():
            return device_type
    return "mps" if ranks.size == 1 and torch.backends.mps.is_available() else "cpu"


def _choose_mps(ranks: Ranks) -> torch.device:
    if not torch.backends.mps.is_available():
        raise WorldError("device: mps was asked for, but torch sees none; set device: cpu")
    if ranks.size > 1:
        raise WorldError(f"device: mps has no collectives, and there are {ranks.size} ranks; set device: cpu")
    return torch.device("mps")


def choose_backend(setting: str, device: torch.device) -> str:
    """Return the process-group backend that `setting` (the key `backend`) names, or the default one for the device.

    Raise a `WorldError` for a backend that is not built in or does not support the device.
    """
    if setting == "auto":
        return BACKENDS[device.type]
    if not torch.distributed.is_backend_available(setting):
        built = f"torch {torch.__version__} was built without it"
        raise WorldError(f"backend: {setting} was asked for, but {built}; set backend: auto")
    if setting in ("nccl", "xccl") and setting not in BACKENDS[device.type]:
        raise WorldError(f"backend: {setting} has no collectives on {device.type}; set backend: auto")
    return setting


# For other libraries, which read the environment or need a process group.


def export_ranks(ranks: Ranks) -> None:
    """Set the environment variables of torchrun, for libraries that read them, unless they are set."""
    known = {
        "RANK": ranks.rank,
        "WORLD_SIZE": ranks.size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_size,
        "LOCAL_SIZE": ranks.local_size,
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": ranks.port or DEFAULT_PORT,
    }
    for name, value in known.items():
        os.environ.setdefault(name, str(value))


def open_group_of_one(device: torch.device) -> None:
    """Create a process group with this process alone, for libraries that need one, unless there is a group."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(choose_backend("auto", device), store=store, rank=0, world_size=1)


def peak_host_memory() -> int:
    """Return the peak memory of this process. Not `getrusage`: on Linux it has the parent's if that is higher."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(match[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
