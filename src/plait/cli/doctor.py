"""`plait doctor`: check this machine for training; prints one line with a verdict per property.

This process does not import torch: a child process does, and reports what it finds.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.cli.files import write_file
from plait.config import yaml_io
from plait.errors import ConfigError, Problem
from plait.launch import cgroup_limit, cpu_count
from plait.plugins import installed_plugins

Health = Literal["ok", "note", "bad"]
_CHILD_S = 180.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EnvironmentFact:
    """One property of this machine or its software: name, value and verdict."""

    name: str
    value: str
    verdict: Health = "ok"
    """`note`: training works without it; `bad`: training will be slow or fail."""
    remedy: str = ""


def _fact(name: str, value: str, *, good: bool, otherwise: Health = "note", remedy: str = "") -> EnvironmentFact:
    """Return a fact with the verdict `ok` if `good`, else with the verdict `otherwise` and the remedy."""
    return EnvironmentFact(name, value) if good else EnvironmentFact(name, value, otherwise, remedy)


def report() -> list[EnvironmentFact]:
    """Return all facts that `plait doctor` shows."""
    facts = torch_facts()
    return [
        *_software(facts),
        *_collectives(facts),
        *_devices(facts),
        *_launchers(),
        *_compilers(),
        *_engines(facts),
        *_memory(),
        *_limits(facts),
    ]


def torch_facts() -> dict[str, Any]:
    """Return what a child process reports about torch and the engines; `{"error": …}` if it fails."""
    command = [sys.executable, "-m", "plait.cli.torch_facts"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_CHILD_S:.0f} seconds"}
    try:
        facts: dict[str, Any] = json.loads(said.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]}
    return facts


def _software(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    yield EnvironmentFact("plait", _version("plait") or "not installed")
    yield EnvironmentFact("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    if "error" in facts:
        yield EnvironmentFact("torch", f"does not load: {facts['error']}", "bad", "pip install --force-reinstall torch")
    else:
        cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ", built without CUDA"
        yield EnvironmentFact("torch", facts["torch"] + cuda)
        yield _internals(facts)


def _internals(facts: Mapping[str, Any]) -> EnvironmentFact:
    """Return the fact about the private names of torch that Plait uses; see `plait/torch_internals.py`."""
    missing, count = facts["missing"], facts["internals"]
    if not missing:
        return EnvironmentFact("torch internals", f"all {count} found")
    named = "; ".join(f"{internal['path']}, for {internal['purpose']}" for internal in missing)
    remedy = "install a torch that docs/versions.md lists; features that need these names will be refused"
    return EnvironmentFact("torch internals", f"{len(missing)} of {count} missing: {named}", "bad", remedy)


def _collectives(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    if "error" in facts:
        return
    remedy = "does the host's own name resolve? set GLOO_SOCKET_IFNAME to a network interface"
    yield _fact("gloo", facts["gloo"] or "works", good=not facts["gloo"], otherwise="bad", remedy=remedy)
    nccl, has_gpus = facts["nccl"] or "not in this torch", bool(facts["gpus"])
    remedy = "install a torch with CUDA" if has_gpus else ""
    yield _fact("nccl", nccl, good=bool(facts["nccl"]), otherwise="bad" if has_gpus else "note", remedy=remedy)
    yield _fact("torch with mpi", "yes" if facts["mpi"] else "no; gloo and nccl do not need it", good=facts["mpi"])


def _devices(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if driver is not None:
        yield EnvironmentFact("nvidia driver", driver)
    gpus = facts.get("gpus", [])
    for index, gpu in enumerate(gpus):
        memory = f"{gpu['memory'] / _GIB:.0f} GiB, {gpu['free'] / _GIB:.0f} GiB free"
        yield EnvironmentFact(f"gpu {index}", f"{gpu['name']}, {memory}")
    if not gpus and driver is not None:
        remedy = "install a torch with CUDA, and look at CUDA_VISIBLE_DEVICES"
        yield EnvironmentFact("gpu", "nvidia-smi finds one, torch does not", "bad", remedy)
    elif not gpus:
        yield EnvironmentFact("gpu", "none; training runs on the CPU", "note")
    if len(gpus) > 1:
        yield _fact("gpu links", facts["links"], good="every" in facts["links"])
    infiniband = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if infiniband:
        yield EnvironmentFact("infiniband", ", ".join(infiniband))


def _launchers() -> Iterable[EnvironmentFact]:
    programs = {"ssh": "ssh", "mpi": "mpirun", "slurm": "srun", "pdsh": "pdsh"}
    for name, program in programs.items():
        version_line = _first_line([program, "--version" if program == "mpirun" else "-V"]) or program
        there = shutil.which(program) is not None
        launcher = "openmpi, mpich, mvapich or impi" if name == "mpi" else name
        remedy = f"needed only for --launcher {launcher}"
        yield _fact(name, version_line if there else f"no {program}", good=there, remedy=remedy)


def _compilers() -> Iterable[EnvironmentFact]:
    name = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "")
    compiler = name and (_first_line([name, "--version"]) or name)
    remedy = "torch.compile on the CPU and DeepSpeed's kernels need one"
    yield _fact("c++ compiler", compiler or "none", good=bool(compiler), remedy=remedy)
    nvcc = next((line for line in _lines(["nvcc", "--version"]) if "release" in line), "none")
    yield _fact("nvcc", nvcc, good=nvcc != "none", remedy="only DeepSpeed's CUDA kernels need it")
    yield _package("triton", "for torch.compile on GPUs")


def _package(name: str, remedy: str = "") -> EnvironmentFact:
    installed_version = _version(name)
    return _fact(name, installed_version or "not installed", good=installed_version is not None, remedy=remedy)


def _engines(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    for name, engine in facts.get("engines", {}).items():
        if engine.get("version") is None:
            yield EnvironmentFact(name, "not installed", "note", f"optional: pip install {name}")
        elif "error" in engine:
            value = f"{engine['version']} does not load: {engine['error']}"
            yield EnvironmentFact(name, value, "bad", "install a version that fits this torch")
        else:
            yield EnvironmentFact(name, engine["version"])
            if kernels := engine.get("parts"):
                buildable = ", ".join(kernel for kernel, works in kernels.items() if works)
                others = ", ".join(kernel for kernel, works in kernels.items() if not works)
                yield EnvironmentFact(f"{name} kernels", f"can be built: {buildable or 'none'}")
                if others:
                    yield EnvironmentFact(f"{name} kernels", f"cannot: {others}", "note", "they need CUDA or a library")
    yield from map(_package, ("transformers", "tensorboard", "wandb"))


def _memory() -> Iterable[EnvironmentFact]:
    import psutil

    memory = psutil.virtual_memory()
    yield EnvironmentFact("cpu", f"{cpu_count()} cores")
    value = f"{memory.total / _GIB:.0f} GiB, {memory.available / _GIB:.0f} GiB free"
    remedy = "stop other programs that use memory"
    yield _fact("memory", value, good=memory.available >= 2 * _GIB, otherwise="bad", remedy=remedy)
    limit = cgroup_limit()
    if limit is not None and limit < memory.total:
        value = f"{limit / _GIB:.1f} GiB for this container"
        yield EnvironmentFact("memory limit", value, "note", "ranks that exceed it are killed")


def _limits(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    shared = "/dev/shm"  # noqa: S108  # nothing is written there: only its size is asked for
    if Path(shared).is_dir():
        free = shutil.disk_usage(shared).free
        remedy = "data workers and NCCL use shared memory: docker run --shm-size=8g"
        yield _fact(shared, f"{free / _GIB:.1f} GiB free", good=free >= _GIB, otherwise="bad", remedy=remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    needed = Path("/sys/class/infiniband").exists() and bool(facts.get("gpus"))
    value, remedy = "unlimited" if unlimited else f"{locked >> 10} KiB", "ulimit -l unlimited"
    yield _fact("locked memory", value, good=unlimited or not needed, otherwise="bad", remedy=remedy)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = files == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else str(files)
    yield _fact("open files", value, good=unlimited or files >= 4096, remedy="ulimit -n 65536")
    free = shutil.disk_usage(os.curdir).free
    yield _fact("disk here", f"{free / _GIB:.0f} GiB free", good=free >= 10 * _GIB)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    return next((line.strip() for line in _lines(command) if line.strip()), None)


def _lines(command: list[str]) -> list[str]:
    """Return the lines of a program's output; an empty list if it is not installed or fails."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (said.stdout or said.stderr).splitlines() if said.returncode == 0 else []


def doctor(out: str | None = None, *, as_json: bool = False) -> None:
    """Print the facts, with a verdict on each line. `out` raises a `ConfigError`: only `measure` writes a file."""
    if out is not None:
        raise ConfigError(Problem("--out", f"{out!r} has no effect without --measure", "Add --measure."))
    lines = report()
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for line in lines:
        value = f"{line.value}; {line.remedy}" if line.remedy else line.value
        table.add_row(_MARKS[line.verdict], line.name, Text(value))
    Console(soft_wrap=True).print(table)


def show_plugins(*, as_json: bool = False) -> None:
    """Print the plug-ins of installed packages, and their packages. None of them is imported."""
    plugins = installed_plugins()
    if as_json:
        print(json.dumps([asdict(plugin) for plugin in plugins], indent=1))
        return
    console = Console(soft_wrap=True)
    if not plugins:
        console.print("no installed package has plug-ins; see docs/write-your-own.md", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("", "kind", "name", "part", "package", "folder"):
        table.add_column(heading)
    for plugin in plugins:
        mark = _MARKS["bad" if plugin.problem else "ok"]
        table.add_row(mark, plugin.kind, *map(Text, (plugin.name, plugin.target, plugin.package, plugin.folder)))
        if plugin.problem:
            table.add_row("", "", "", Text(plugin.problem))
    console.print(table)


_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def measure(out: str | None, folder: str) -> None:
    """Measure this machine, print the figures, and write them where `plait plan --gpu FILE` can read them."""
    if out is not None and Path(out).suffix not in (".yaml", ".yml"):
        raise ConfigError(Problem("--out", f"{out!r} is not a YAML file", "Write a name that ends in .yaml."))
    from plait.plan import measure_hardware

    measured = measure_hardware(folder=folder)
    _print(measured.rows)
    if out is not None:
        write_file(out, yaml_io.dump(measured.hardware.to_dict()), "--out")
        Console(soft_wrap=True).print(f"{out}: give it to `plait plan --gpu {out}`", markup=False)


def _print(rows: Sequence[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in rows:
        table.add_row(label, value)
    Console(soft_wrap=True).print(table)
