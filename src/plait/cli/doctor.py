"""`plait doctor`."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch
from rich.console import Console
from rich.table import Table

from plait.launch import cpu_count


def doctor() -> None:
    """One table of what is here."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in _rows():
        table.add_row(label, value)
    Console(soft_wrap=True).print(table)


def _rows() -> list[tuple[str, str]]:
    distributed = torch.distributed
    backends = [
        name
        for name, there in (
            ("gloo", distributed.is_gloo_available()),
            ("nccl", distributed.is_nccl_available()),
            ("mpi", distributed.is_mpi_available()),
        )
        if there
    ]
    rows = [
        ("plait", _version("plait")),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("collectives", ", ".join(backends) or "none"),
        ("cpu", f"{cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory"),
    ]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append((f"gpu {index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("gpu", "none that torch can see"))
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    rows.append(("compile on cpu", f"yes, with {compiler}" if compiler else "no: no C++ compiler"))
    for extra in ("transformers", "tensorboard", "wandb", "deepspeed", "colossalai"):
        rows.append((extra, _version(extra)))
    return rows


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
