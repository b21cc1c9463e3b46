"""`deepspeed.accelerator.get_accelerator()`: the device of this machine, and its memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from plait.distributed import detect_ranks, device_from_env
from plait.frontends.deepspeed.module_layout import not_offered

__all__ = ["DeepSpeedAccelerator", "get_accelerator"]


@dataclass(frozen=True, slots=True)
class DeepSpeedAccelerator:
    """The devices of one type."""

    _name: str

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return `cuda`, or `cuda:1` with an index; the CPU has no index."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device as a `torch.device`."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """Return the index of the current device; 0 on the CPU."""
        return 0 if self._name == "cpu" else int(self._module.current_device())

    def current_device_name(self) -> str:
        """Return the name of the current device."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a device the current one; do nothing on the CPU."""
        if self._name != "cpu":
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of devices; on the CPU, the number of ranks on this host."""
        return detect_ranks().local_size if self._name == "cpu" else int(self._module.device_count())

    def is_available(self) -> bool:
        """Return whether there is such a device."""
        return self._name == "cpu" or bool(self._module.is_available())

    def communication_backend_name(self) -> str:
        """Return the backend for collectives of tensors on these devices."""
        return {"cuda": "nccl", "xpu": "xccl"}.get(self._name, "gloo")

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all kernels of the device."""
        if self._name != "cpu":
            self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        """Release cached memory."""
        if self._name != "cpu":
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the device; 0 on the CPU, where they are not counted."""
        return 0 if self._name == "cpu" else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_allocated`."""
        return 0 if self._name == "cpu" else int(self._module.max_memory_allocated(device_index))

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes of device memory that torch's allocator has reserved."""
        return 0 if self._name == "cpu" else int(self._module.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of `memory_reserved`."""
        return 0 if self._name == "cpu" else int(self._module.max_memory_reserved(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset `max_memory_allocated`."""
        if self._name != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device, or on the CPU of this host."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().total)
        return int(self._module.get_device_properties(self.device(device_index)).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that are free."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().available)
        return int(self._module.mem_get_info(device_index)[0])

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Return the seed that was set last."""
        return int(torch.initial_seed() if self._name == "cpu" else self._module.initial_seed())

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return self._name == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that the device computes in."""
        smaller = [torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]
        return [torch.float32, *smaller]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device of this type."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a tensor in pinned host memory; on the CPU, the tensor itself."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        raise not_offered(__name__, name)


_GIB = 1024**3
DEVICE_VARIABLE = "DS_ACCELERATOR"
"""DeepSpeed's environment variable for the type of device."""


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the devices of the type that `DS_ACCELERATOR` names; by default CUDA, XPU or the CPU, as available."""
    if (named := device_from_env(DEVICE_VARIABLE)) != "auto":
        return DeepSpeedAccelerator(named)
    for name in ("cuda", "xpu"):
        if getattr(torch, name).is_available():
            return DeepSpeedAccelerator(name)
    return DeepSpeedAccelerator("cpu")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory in use, on rank 0; as in DeepSpeed, only with `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device = get_accelerator()
    figures = (
        ("MA", device.memory_allocated()),
        ("Max_MA", device.max_memory_allocated()),
        ("CA", device.memory_reserved()),
        ("Max_CA", device.max_memory_reserved()),
    )
    host = psutil.virtual_memory()
    used = (host.total - host.available) / _GIB
    print(message)
    print("  ".join(f"{name} {value / _GIB:.2f} GB" for name, value in figures))
    print(f"CPU Virtual Memory:  used = {used:.2f} GB, percent = {host.percent}%", flush=True)
    device.reset_peak_memory_stats()
