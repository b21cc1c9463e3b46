"""`deepspeed.runtime.utils`: what is in use of the device's and the host's memory."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch.distributed as dist

from plait.frontends.deepspeed.accelerator import get_accelerator
from plait.frontends.deepspeed.missing_names import not_offered

_GIB = 1024**3


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print, on rank 0, what is in use. As in DeepSpeed, nothing without `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device: Any = get_accelerator()
    parts = (
        ("MA", device.memory_allocated()),
        ("Max_MA", device.max_memory_allocated()),
        ("CA", device.memory_reserved()),
        ("Max_CA", device.max_memory_reserved()),
    )
    host = psutil.virtual_memory()
    used = (host.total - host.available) / _GIB
    print(message)
    print("  ".join(f"{name} {value / _GIB:.2f} GB" for name, value in parts))
    print(f"CPU Virtual Memory:  used = {used:.2f} GB, percent = {host.percent}%", flush=True)
    device.reset_peak_memory_stats()


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
