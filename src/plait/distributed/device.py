"""Which device this rank computes on, and the backend that belongs to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from plait.distributed.ranks import DEFAULT_PORT, Ranks
from plait.errors import WorldError
from plait.torch_internals import set_allocator_settings

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "mps": "gloo"}


def choose_device(setting: str, ranks: Ranks) -> torch.device:
    """The device of this rank: what `device` says, or the best that is there."""
    kind = _best_kind(ranks) if setting == "auto" else setting
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps":
        return _choose_mps(ranks)
    module = getattr(torch, kind)
    if not module.is_available():
        raise WorldError(f"device: {kind} was asked for, but torch {torch.__version__} sees none; set device: cpu")
    count = module.device_count()
    if ranks.local_rank >= count:
        raise WorldError(
            f"rank {ranks.rank} has no {kind} device: {ranks.local_size} processes on this host, {count} devices. "
            f"Start at most {count} here, or set device: cpu"
        )
    device = torch.device(kind, ranks.local_rank)
    module.set_device(device)
    if kind == "cuda" and wants_growing_segments(os.environ, sys.platform):
        let_segments_grow()
    return device


def device_from_env(variable: str) -> str:
    """The kind of device that an environment variable names: `auto` where it names none.

    Raises `WorldError` for one that Plait does not compute on.
    """
    kind = os.environ.get(variable) or "auto"
    if kind not in ("auto", *BACKENDS):
        raise WorldError(f"{variable}={kind}: Plait computes on {', '.join(BACKENDS)}; write one of these, or unset it")
    if kind not in ("auto", "cpu") and not torch.get_device_module(kind).is_available():
        raise WorldError(
            f"{variable}={kind}, but torch {torch.__version__} sees no such device; write cpu, or unset it"
        )
    return kind


def wants_growing_segments(environment: Mapping[str, str], platform: str) -> bool:
    """Whether the allocator's settings are ours to choose: on Linux, where the user has chosen none."""
    return platform == "linux" and not any(environment.get(name) for name in _ALLOCATOR_SETTINGS)


def let_segments_grow() -> None:
    """Let torch's CUDA allocator extend a segment in place rather than take another one beside it.

    Otherwise what is freed in the backward pass, in pieces of one size, cannot serve the update, which wants others: of
    a device that is almost full, a few per cent are lost to that.
    """
    # The public way is an environment variable. It is read once, perhaps before this, and children would inherit it.
    set_allocator_settings("expandable_segments:True")


def _best_kind(ranks: Ranks) -> str:
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return kind
    return "mps" if ranks.size == 1 and torch.backends.mps.is_available() else "cpu"


def _choose_mps(ranks: Ranks) -> torch.device:
    if not torch.backends.mps.is_available():
        raise WorldError("device: mps was asked for, but torch sees none; set device: cpu")
    if ranks.size > 1:
        raise WorldError(f"device: mps has no collectives, and there are {ranks.size} ranks; set device: cpu")
    return torch.device("mps")


def choose_backend(setting: str, device: torch.device) -> str:
    """The process-group backend: what `backend` says, or the one that belongs to the device."""
    if setting == "auto":
        return BACKENDS[device.type]
    if not torch.distributed.is_backend_available(setting):
        built = f"torch {torch.__version__} was built without it"
        raise WorldError(f"backend: {setting} was asked for, but {built}; set backend: auto")
    if setting in ("nccl", "xccl") and setting not in BACKENDS[device.type]:
        raise WorldError(f"backend: {setting} has no collectives on {device.type}; set backend: auto")
    return setting


# Telling other libraries, in the one way that they listen to, what this process knows.


def export_ranks(ranks: Ranks) -> None:
    """Set torchrun's variables, for libraries that read them, where another launcher left them out."""
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
    """Make a process group for one process alone, for libraries that want one; nothing where there is a group."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(choose_backend("auto", device), store=store, rank=0, world_size=1)
