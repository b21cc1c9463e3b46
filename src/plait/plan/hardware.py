"""The hardware that a plan is made for.

A machine is a preset (`h100-80g`), a file that `plait doctor --measure` wrote, or the one at hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from plait.config import SUFFIXES, choose, listed, nearest, read, show
from plait.errors import ConfigError, Problem

CORE_GBPS = 4.0
"""About how much one core adds to `host_gbps`: 16 cores of a host with an H200 reached 63 GB/s."""
NUMBER_FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Names of the formats in which matrices are multiplied."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A link between devices."""

    kind: str
    """`nvlink`, `pcie`, `infiniband`, `ethernet`, `memory`, or `none`."""
    gbps: float
    """GB/s in one direction, for each device. 1 GB is 10⁹ bytes."""
    latency_us: float
    """Latency of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One type of device, its host, and the network between hosts.

    On a CPU a device is the whole host: its ranks share memory, bandwidth and arithmetic.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_gib: float
    """Memory of one device that a process can use, in GiB of 2³⁰ bytes; less than in the product's name."""
    context_gib: float
    """Memory in use before the first tensor: the CUDA context, its kernels, and NCCL's first buffers."""
    flops: Mapping[str, float]
    """Number format → dense peak in TFLOP/s; without formats that the hardware cannot multiply."""
    matmul_efficiency: float = 0.8
    """Share of the peak that large matrix products reach, if it was not measured."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Number format → TFLOP/s that a large matrix product reached on this machine."""
    memory_gbps: float
    """Bandwidth of the device's memory in GB/s."""
    memory_efficiency: float = 0.6
    """Fraction of `memory_gbps` that elementwise operations reach."""
    attention_efficiency: float = 0.58
    """Fraction of a large matrix multiplication's FLOP/s that attention reaches."""
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability; torch chooses attention kernels by it."""
    per_host: int
    """Devices of one host; on a CPU, how many ranks are reasonable."""
    link: Interconnect
    """Between the devices of a host."""
    network: Interconnect
    """Between hosts."""
    host_memory_gib: float
    host_cores: int = 16
    host_gbps: float = 64.0
    """GB/s that an optimizer update on the host reads and writes, with all cores of the host together."""
    pcie_gbps: float
    """GB/s of copies between device and pinned host memory, in one direction."""
    disk_gbps: float
    """GB/s of reading or writing files, whichever is slower, for the whole host."""
    launch_us: float
    """Host time per operation of a training step, including autograd."""
    dollars_per_hour: float | None = None
    """Price of one device per hour; None: plans show no cost."""

    def rate(self, number_format: str) -> float:
        """Return the FLOP/s that a large matrix multiplication reaches; a format without a rate has that of fp32."""
        known = number_format if number_format in {**self.flops, **self.measured} else "fp32"
        tflops = self.measured.get(known) or self.flops[known] * self.matmul_efficiency
        return tflops * 1e12

    def link_between(self, ranks: int, stride: int = 1) -> Interconnect:
        """Return the slowest link within a group of `ranks` ranks whose numbers differ by `stride`."""
        return self.link if (ranks - 1) * stride < self.per_host else self.network

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `find_hardware` reads a file with them to an equal machine."""
        data = {**asdict(self), "flops": dict(self.flops), "measured": dict(self.measured)}
        return {key: value for key, value in data.items() if value is not None}


def find_hardware(name_or_path: str | Path, *, key: str = "--gpu") -> Hardware:
    """Return the machine with a preset's name, or from a file; `key` names the option in error messages.

    Names may be written differently: `H100`, `h100_80GB` and `NVIDIA H100 80GB HBM3` are `h100-80g`. Raise
    `ConfigError` for a name that matches no preset or several, and for a file with a wrong key or value.
    """
    text = str(name_or_path)
    if Path(text).suffix.lower() in SUFFIXES:
        return _from_file(Path(text))

    names = _matches(text, PRESETS)
    if len(names) == 1:
        return PRESETS[names[0]]
    if names:
        raise ConfigError(Problem(key, f"{text!r} may be {listed(names, 'or')}", "Write which one."))
    meant = nearest(text, [name.partition("-")[0] for name in PRESETS])
    first = f"Did you mean `{meant}`? " if meant else ""
    remedy = (
        f"{first}The presets are {listed(PRESETS)}; `plait doctor --measure --out machine.yaml` describes this one."
    )
    raise ConfigError(Problem(key, f"unknown hardware {text!r}", remedy))


def hardware_here(device_type: str = "auto") -> Hardware:
    """Return this machine: its preset, with its actual memory and numbers of cores and devices. Measure nothing.

    `device_type` is `cuda`, `cpu`, or `auto`: CUDA where there is a GPU.
    """
    import psutil
    import torch

    from plait.launch import cpu_count

    host = psutil.virtual_memory().total / 2**30
    if device_type == "cpu" or not torch.cuda.is_available():
        cores = cpu_count()
        cpu = PRESETS["cpu"]
        flops = {dtype_name: tflops * cores / cpu.per_host for dtype_name, tflops in cpu.flops.items()}
        cpu = replace(cpu, memory_gib=host, host_memory_gib=host, per_host=cores, flops=flops)
        return with_cores(cpu, cores)
    device = torch.cuda.get_device_properties(0)
    memory = device.total_memory / 2**30
    known = [PRESETS[name] for name in _matches(device.name, PRESETS)]
    if not known:
        remedy = "Run `plait doctor --measure --out machine.yaml`, and give that file."
        raise ConfigError(Problem("--gpu", f"no preset is known for {device.name!r}", remedy))
    nearest_size = min(known, key=lambda preset: abs(preset.memory_gib - memory))
    machine = replace(nearest_size, memory_gib=memory, host_memory_gib=host, per_host=torch.cuda.device_count())
    return with_cores(machine, cpu_count())


def with_cores(hardware: Hardware, cores: int) -> Hardware:
    """Return the machine with another number of cores, and their update bandwidth."""
    return replace(hardware, host_cores=cores, host_gbps=min(hardware.host_gbps, cores * CORE_GBPS))


def _matches(text: str, names: Mapping[str, Hardware]) -> list[str]:
    """Return the presets that match a name: the one with that name, or all of that model."""
    folded = _fold(text)
    exact = [name for name in names if _fold(name) == folded]
    if exact or len(folded) < 3:
        return exact
    models = {name: _fold(name.partition("-")[0]) for name in names}
    # `nvidia h100 80gb hbm3` contains a model and a size, and `4090` is a part of a model's name. Only whole words and
    # numbers match: neither an H20 nor a GH200 is an H200.
    spaced = re.sub(r"(?<=[a-z])[^a-z0-9]+(?=[0-9])", "", text.lower())
    named = [name for name, model in models.items() if re.search(rf"(?<![a-z]){model}(?![0-9])", spaced)]
    sized = [name for name in named if all(_fold(piece) in folded for piece in name.split("-"))]
    return sized or named or [name for name, model in models.items() if re.search(rf"{folded}(?![0-9])", model)]


def _fold(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).replace("gb", "g").replace("geforce", "")


def _from_file(path: Path) -> Hardware:
    data = read(path)
    known = {field.name: field for field in fields(Hardware)}
    problems = [_unknown(path, key, known) for key in data if key not in known]
    link_keys = [field.name for field in fields(Interconnect)]
    for key in ("link", "network"):
        if isinstance(data.get(key), Mapping):
            problems += [_unknown(path, inner, link_keys, key) for inner in data[key] if inner not in link_keys]
    if problems:
        raise ConfigError(problems)
    from pydantic import TypeAdapter, ValidationError

    try:
        hardware = TypeAdapter(Hardware).validate_python(data)
    except ValidationError as error:
        details = [(".".join(map(str, detail["loc"])), detail) for detail in error.errors()]
        raise ConfigError(
            [
                Problem(key, _describe(detail), "Measure it again with `plait doctor --measure`.", str(path))
                for key, detail in details
            ]
        ) from None
    if problems := list(_impossible(hardware, str(path))):
        raise ConfigError(problems)
    return hardware


def _describe(error: Any) -> str:
    value = "" if error["type"] == "missing" else f"{show(error['input'])}: "
    return f"{value}{error['msg'][:1].lower()}{error['msg'][1:]}"


def _unknown(path: Path, key: str, known: Any, section: str = "") -> Problem:
    meant = nearest(key, known)
    remedy = f"Did you mean `{meant}`?" if meant else f"The keys are {listed(known)}."
    return Problem(f"{section}.{key}" if section else key, "unknown key", remedy, str(path))


def _impossible(hardware: Hardware, origin: str) -> list[Problem]:
    """Return a problem for each value that is not positive (a plan divides by them), and for wrong number formats."""
    numbers = {
        "memory_gib": hardware.memory_gib,
        "matmul_efficiency": hardware.matmul_efficiency,
        "memory_gbps": hardware.memory_gbps,
        "per_host": hardware.per_host,
        "link.gbps": hardware.link.gbps,
        "network.gbps": hardware.network.gbps,
        "host_memory_gib": hardware.host_memory_gib,
        "host_cores": hardware.host_cores,
        "host_gbps": hardware.host_gbps,
        "pcie_gbps": hardware.pcie_gbps,
        "disk_gbps": hardware.disk_gbps,
        **{f"flops.{name}": value for name, value in hardware.flops.items()},
        **{f"measured.{name}": value for name, value in hardware.measured.items()},
    }
    problems = [
        Problem(key, f"{value:g}", "It must be more than 0.", origin) for key, value in numbers.items() if not value > 0
    ]
    unknown = [name for name in (*hardware.flops, *hardware.measured) if name not in NUMBER_FORMATS]
    problems += [
        Problem(f"flops.{name}", "no such number format", choose(name, NUMBER_FORMATS, "format"), origin)
        for name in unknown
    ]
    if "fp32" not in hardware.flops:
        problems.append(Problem("flops", "missing `fp32`", "Add its rate: every machine has one.", origin))
    return problems


# Presets, from the makers' data sheets.
#
# Peaks are dense (data sheets often print twice that, for sparse matrices), and links are for one direction (data
# sheets print the sum of both). Memory is what CUDA reports, without ECC and what the driver uses. Hosts are typical:
# eight devices on NVLink switches with an InfiniBand port for each (DGX), or four cards on PCIe; an optimizer update
# reaches about two thirds of the bandwidth of their memory. Latencies, launch times, disks and the context are typical
# values, which `plait doctor --measure` replaces by those of a machine.


_HDR = Interconnect("infiniband", 25.0, 8.0)
"""200 Gbit/s per device."""
_NDR = Interconnect("infiniband", 50.0, 8.0)
"""400 Gbit/s per device."""
_EDR = Interconnect("infiniband", 6.25, 10.0)
"""Four ports of 100 Gbit/s for eight devices."""
_ETHERNET = Interconnect("ethernet", 3.0, 30.0)
"""25 Gbit/s per device, by TCP."""

_V100 = Hardware(
    name="v100-16g",
    kind="cuda",
    memory_gib=15.77,
    context_gib=0.6,
    flops={"fp32": 15.7, "fp16": 125.0},
    memory_gbps=900.0,
    per_host=8,
    link=Interconnect("nvlink", 150.0, 6.0),
    network=_EDR,
    host_memory_gib=512.0,
    host_cores=40,
    host_gbps=100.0,
    pcie_gbps=12.0,
    disk_gbps=2.0,
    launch_us=12.0,
)
_A100 = Hardware(
    name="a100-40g",
    kind="cuda",
    memory_gib=39.39,
    context_gib=0.8,
    flops={"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
    memory_gbps=1555.0,
    per_host=8,
    link=Interconnect("nvlink", 300.0, 5.0),
    network=_HDR,
    host_memory_gib=1024.0,
    host_cores=128,
    host_gbps=250.0,
    pcie_gbps=25.0,
    disk_gbps=5.0,
    launch_us=12.0,
)
_H100 = Hardware(
    name="h100-80g",
    kind="cuda",
    memory_gib=79.1,
    context_gib=1.0,
    flops={"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    memory_gbps=3350.0,
    per_host=8,
    link=Interconnect("nvlink", 450.0, 5.0),
    network=_NDR,
    host_memory_gib=2048.0,
    host_cores=112,
    host_gbps=400.0,
    pcie_gbps=50.0,
    disk_gbps=8.0,
    launch_us=12.0,
)
_MACHINES = (
    _V100,
    replace(_V100, name="v100-32g", memory_gib=31.73),
    _A100,
    replace(_A100, name="a100-80g", memory_gib=79.25, memory_gbps=2039.0),
    _H100,
    replace(_H100, name="h200-141g", memory_gib=139.8, memory_gbps=4800.0),
    replace(
        _H100,
        name="b200-192g",
        memory_gib=178.3,
        flops={"fp32": 80.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        memory_gbps=8000.0,
        link=Interconnect("nvlink", 900.0, 5.0),
    ),
    Hardware(
        name="rtx4090-24g",
        kind="cuda",
        memory_gib=23.6,
        context_gib=0.6,
        # With fp32 accumulation, which training needs, GeForce cards have half the 16-bit rate of the data sheets.
        flops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
        memory_gbps=1008.0,
        per_host=4,
        link=Interconnect("pcie", 20.0, 15.0),
        network=_ETHERNET,
        host_memory_gib=256.0,
        host_cores=32,
        host_gbps=120.0,
        pcie_gbps=25.0,
        disk_gbps=3.0,
        launch_us=12.0,
    ),
    Hardware(
        name="cpu",
        kind="cpu",
        memory_gib=64.0,
        context_gib=0.37,
        flops={"fp32": 0.4, "bf16": 0.4},
        memory_gbps=40.0,
        per_host=8,
        link=Interconnect("memory", 2.0, 150.0),
        network=_ETHERNET,
        host_memory_gib=64.0,
        host_cores=8,
        host_gbps=32.0,
        pcie_gbps=10.0,
        disk_gbps=1.0,
        launch_us=12.0,
    ),
)

PRESETS = {machine.name: machine for machine in _MACHINES}
"""Name → the preset of a machine."""
