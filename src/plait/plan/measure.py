"""Measure this machine, for `plait doctor --measure`.

A rate is the best of several short runs: other programs can only make a run slower, not faster.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from plait.errors import ConfigError, WorldError
from plait.kernels import AdamNumbers, ThreadPool, adam_step, copy_gbps, host_empty
from plait.launch import cpu_count, run_ranks
from plait.plan.hardware import PRESETS, Hardware, Interconnect, hardware_here, with_cores
from plait.plan.timing import starts_kernel
from plait.torch_internals import intercept_operations

# The rate at which this host updates offloaded weights.


_NUMBERS = 1 << 24
"""Weights in the measurement: more than fit in caches."""
_BYTES = 2 + 2 * 12 + 2
"""Bytes per weight: a 16-bit gradient read, weight and moments read and written, a 16-bit weight written."""


def measure_update(cores: int, seconds: float) -> float:
    """Return the GB/s that AdamW reads and writes on the host with `cores` threads; the best run in `seconds`."""
    weight, mean, square = (torch.zeros(_NUMBERS) for _ in range(3))
    grad, narrow = (torch.ones(_NUMBERS, dtype=torch.bfloat16) for _ in range(2))
    pool = ThreadPool(cores)
    best, count, end = float("inf"), 0, 0.0
    try:
        while count < 3 or time.perf_counter() < end:
            count += 1
            start = time.perf_counter()
            adam_step(AdamNumbers(count, lr=1e-3), [weight], [grad], [mean], [square], [narrow], pool=pool)
            best = min(best, time.perf_counter() - start)
            end = end or start + seconds
    finally:
        pool.close()
    return _NUMBERS * _BYTES / best / 1e9


_SECONDS = 0.3
"""Seconds for which each rate is measured."""
_COPIES = 16
"""Copies of 256 MiB between host and device; they take about as long."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """A measured machine, and rows (name, value) that show the figures to a person."""

    hardware: Hardware
    rows: tuple[tuple[str, str], ...]


def measure_hardware(*, folder: str | Path = ".") -> MeasuredMachine:
    """Return the measured rates of arithmetic, memory, the host, the disk under `folder`, and collectives.

    Collectives are measured between one rank per GPU, or two on a CPU; with one GPU they are not measured.
    Figures that cannot be measured here (such as the network) are those of the nearest preset, and their rows say so.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = _base(device)
    rows = [("machine", base.name), ("memory", f"{base.memory_gib:.1f} GiB, host {base.host_memory_gib:.1f} GiB")]
    launch = _launch_us(device)
    rates = {name: rate for name in ("fp32", "tf32", "bf16", "fp16", "fp8") if (rate := _matmul(name, device))}
    rows += [(f"matmul {dtype_name}", f"{rate:.3g} TFLOP/s") for dtype_name, rate in rates.items()]
    memory = round(_memory_gbps(device), 2)  # the same value is shown and written to the file
    rows += [("memory bandwidth", f"{memory:.1f} GB/s"), ("start of an operation", f"{launch:.1f} µs")]
    pcie = base.pcie_gbps
    if device.type == "cuda":
        to_device, to_host = _host_link(device)
        pcie = min(to_device, to_host)
        rows.append(("host to device, back", f"{to_device:.1f}, {to_host:.1f} GB/s (pinned)"))
    update = measure_update(base.host_cores, _SECONDS)
    rows.append(("update on the host", f"{update:.1f} GB/s with {base.host_cores} cores"))
    write, read = measure_disk(Path(folder))
    rows.append(("disk write, read", f"{write:.2f}, {read:.2f} GB/s in {Path(folder).resolve()}"))
    link, said = _collectives(device, base)
    rows.append(("between ranks", said))
    network = f"{base.network.gbps:g} GB/s, {base.network.kind} (not measured)"
    rows.append(("between hosts", network))
    context = _context_gib(device, base)
    rows.append(("taken before the first tensor", f"{context:.2f} GiB"))
    peaks = {**rates, **base.flops} if device.type == "cuda" else rates
    hardware = replace(
        base,
        flops=_rounded(peaks),
        measured=_rounded(rates),
        memory_gbps=memory,
        link=link,
        host_gbps=round(update, 2),
        pcie_gbps=round(pcie, 2),
        disk_gbps=round(max(min(write, read), 0.001), 3),
        launch_us=round(launch, 2),
        context_gib=round(context, 3),
    )
    return MeasuredMachine(hardware, tuple(rows))


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {dtype_name: float(f"{rate:.4g}") for dtype_name, rate in rates.items()}


def _base(device: torch.device) -> Hardware:
    """Return the preset whose values are kept if they are not measured, with the name of this machine."""
    if device.type == "cpu":
        machine = hardware_here()
        return replace(
            machine,
            name=f"{platform.node() or 'this'}-cpu",
            memory_gib=round(machine.memory_gib, 2),
            host_memory_gib=round(machine.host_memory_gib, 2),
        )
    name = torch.cuda.get_device_name(0)
    try:
        return replace(hardware_here(), name=name)
    except ConfigError:  # a GPU without a preset: all important figures are measured
        memory, host = torch.cuda.mem_get_info()[1] / 2**30, psutil.virtual_memory().total / 2**30
        card, count = PRESETS["rtx4090-24g"], torch.cuda.device_count()
        other = replace(card, name=name, memory_gib=memory, host_memory_gib=host, per_host=count, flops={})
        return with_cores(other, cpu_count())


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    best, end = once(), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        best = min(best, once())
    return best


def _matmul(dtype_name: str, device: torch.device) -> float | None:
    """Return the TFLOP/s of a large matrix multiplication; None if the device does not support the format."""
    size = 8192 if device.type == "cuda" else 1024
    if dtype_name == "fp8":
        work = _fp8_product(size, device)
        return None if work is None else 2 * size**3 / _best_time(work, device) / 1e12
    if device.type == "cpu" and dtype_name in ("tf32", "fp16"):
        return None  # the same as fp32, and a slow emulation
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 8 and dtype_name in ("tf32", "bf16"):
        return None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype_name == "tf32" else "highest")
    try:
        left, right = (torch.randn(size, size, device=device).to(_DTYPES[dtype_name]) for _ in range(2))
        return 2 * size**3 / _best_time(lambda: left @ right, device) / 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def _fp8_product(size: int, device: torch.device) -> Callable[[], object] | None:
    if device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return None
    from torch.nn.functional import ScalingType, scaled_mm

    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one, whole = torch.ones((), device=device), ScalingType.TensorWise

    def product() -> object:
        return scaled_mm(left, right, one, whole, one, whole, output_dtype=torch.bfloat16)

    try:
        product()
    except (RuntimeError, ValueError):
        return None
    return product


def _memory_gbps(device: torch.device) -> float:
    """Return the GB/s that a copy within the device's memory reads and writes."""
    count = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / _best_time(lambda: target.copy_(source), device) / 1e9


def _launch_us(device: torch.device) -> float:
    """Return the µs that the host needs for one operation of a training step, including autograd."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32, device=device), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(8, 32, device=device)

    def step() -> None:
        model(batch).sum().backward()

    launches = 0

    def count_launch(func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal launches
        launches += starts_kernel(func)
        return func(*args, **kwargs)

    with intercept_operations(count_launch):
        step()
    return _best_time(step, device) * 1e6 / launches


def _host_link(device: torch.device) -> tuple[float, float]:
    """Return the GB/s of copies from pinned memory to the device, and back."""
    host = host_empty(2**28, dtype=torch.uint8, pinned=True)
    there = torch.empty_like(host, device=device)
    return copy_gbps(there, host, device, times=_COPIES), copy_gbps(host, there, device, times=_COPIES)


def measure_disk(folder: Path) -> tuple[float, float]:
    """Return the GB/s of writing a file to the disk (with `fsync`), and of reading it without the page cache."""
    block, blocks = os.urandom(2**22), 32
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            file.seek(0)
            while file.read(2**22):
                pass
            got = time.perf_counter() - start
    except OSError as error:
        raise WorldError(f"the disk under {folder} cannot be measured: {error}; give a folder to write to") from error
    size = len(block) * blocks / 1e9
    return size / wrote, size / got


def _context_gib(device: torch.device, base: Hardware) -> float:
    """Return the GiB in use without tensors: on CUDA, also by other processes; on a CPU, by this process with torch."""
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss) / 2**30
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = (total - free - torch.cuda.memory_reserved()) / 2**30
    return max(used, base.context_gib) if base.per_host > 1 else used


def _collectives(device: torch.device, base: Hardware) -> tuple[Interconnect, str]:
    """Return the link between ranks of this host, and a text that describes it."""
    ranks = base.per_host if device.type == "cuda" else 2
    if ranks < 2:
        return base.link, f"{base.link.gbps:g} GB/s, {base.link.kind} (not measured: there is one device)"
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        out = Path(folder) / "link.json"
        code = run_ranks([sys.executable, "-m", "plait.plan.probe", device.type, str(out)], ranks)
        if code != 0 or not out.exists():
            return base.link, f"{base.link.gbps:g} GB/s, {base.link.kind} (measuring failed with exit code {code})"
        figures = json.loads(out.read_text(encoding="utf-8"))
    link = Interconnect(base.link.kind, round(figures["gbps"], 3), round(figures["latency_us"], 1))
    return link, f"{link.gbps:.2f} GB/s, {link.latency_us:.0f} µs between {ranks} ranks"
