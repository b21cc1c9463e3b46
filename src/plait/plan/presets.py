"""Machines that everybody knows, from their makers' data sheets.

Peaks are dense (sheets like to print twice that, for sparse matrices), and links are for one direction (sheets print
the sum of both). Memory is what CUDA reports, with ECC and the driver's share taken off. Hosts are the maker's own:
eight devices behind NVLink switches with one Infiniband port a device (DGX), or four cards on PCIe; of their memory's
bandwidth an update reaches about two thirds. Latencies, launch times, disks and the context are ordinary values, which
`plait doctor --measure` replaces by those of a machine.
"""

from __future__ import annotations

from dataclasses import replace

from plait.plan.hardware import Hardware, Link

_HDR = Link("infiniband", 25.0, 8.0)
"""200 Gbit/s a device."""
_NDR = Link("infiniband", 50.0, 8.0)
"""400 Gbit/s a device."""
_EDR = Link("infiniband", 6.25, 10.0)
"""Four ports of 100 Gbit/s for eight devices."""
_ETHERNET = Link("ethernet", 3.0, 30.0)
"""25 Gbit/s a device, by TCP."""

_V100 = Hardware(
    name="v100-16g",
    kind="cuda",
    memory_gib=15.77,
    context_gib=0.6,
    flops={"fp32": 15.7, "fp16": 125.0},
    memory_gbps=900.0,
    per_host=8,
    link=Link("nvlink", 150.0, 6.0),
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
    link=Link("nvlink", 300.0, 5.0),
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
    link=Link("nvlink", 450.0, 5.0),
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
        link=Link("nvlink", 900.0, 5.0),
    ),
    Hardware(
        name="rtx4090-24g",
        kind="cuda",
        memory_gib=23.6,
        context_gib=0.6,
        # GeForce cards add up 16-bit products in fp32, as training needs, at half the rate of the sheet's first line.
        flops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
        memory_gbps=1008.0,
        per_host=4,
        link=Link("pcie", 20.0, 15.0),
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
        link=Link("memory", 2.0, 150.0),
        network=_ETHERNET,
        host_memory_gib=64.0,
        host_cores=8,
        host_gbps=32.0,
        pcie_gbps=10.0,
        disk_gbps=1.0,
        launch_us=12.0,
    ),
)

PRESETS = {each.name: each for each in _MACHINES}
"""Name → machine."""
