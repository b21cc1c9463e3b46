"""`plait doctor`: what this machine offers to training, line by line with a verdict.

Loads no torch: a child process asks it.
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
    """One thing, how it is, and whether that is good."""

    name: str
    value: str
    verdict: Health = "ok"
    """`note`: training works without it; `bad`: training will be slow or fail."""
    remedy: str = ""


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
    """Return what only torch and the engines know about themselves, from a process of its own."""
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
    remedy = "install a torch that docs/versions.md lists; what needs these names will be refused"
    return EnvironmentFact("torch internals", f"{len(missing)} of {count} missing: {named}", "bad", remedy)


def _collectives(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    if "error" in facts:
        return
    works = facts["gloo"] == ""
    yield EnvironmentFact(
        "gloo", "works" if works else facts["gloo"], "ok" if works else "bad", "" if works else _HOSTNAME
    )
    needed = bool(facts["gpus"])
    there = facts["nccl"]
    yield EnvironmentFact(
        "nccl", there or "not in this torch", "ok" if there else "bad" if needed else "note", _NO_NCCL * needed
    )
    yield EnvironmentFact(
        "torch with mpi", "yes" if facts["mpi"] else "no; gloo and nccl need none", "ok" if facts["mpi"] else "note"
    )


_HOSTNAME = "does the host's own name resolve? set GLOO_SOCKET_IFNAME to a network interface"
_NO_NCCL = "install a torch with CUDA"


def _devices(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if driver is not None:
        yield EnvironmentFact("nvidia driver", driver)
    gpus = facts.get("gpus", [])
    for index, gpu in enumerate(gpus):
        yield EnvironmentFact(
            f"gpu {index}", f"{gpu['name']}, {gpu['memory'] / _GIB:.0f} GiB, {gpu['free'] / _GIB:.0f} GiB free"
        )
    if not gpus and driver is not None:
        remedy = "install a torch with CUDA, and look at CUDA_VISIBLE_DEVICES"
        yield EnvironmentFact("gpu", "there, but torch sees none", "bad", remedy)
    elif not gpus:
        yield EnvironmentFact("gpu", "none; training runs on the CPU", "note")
    if len(gpus) > 1:
        yield EnvironmentFact("gpu links", facts["links"], "ok" if "every" in facts["links"] else "note")
    infiniband = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if infiniband:
        yield EnvironmentFact("infiniband", ", ".join(infiniband))


def _launchers() -> Iterable[EnvironmentFact]:
    programs = {"ssh": "ssh", "mpi": "mpirun", "slurm": "srun", "pdsh": "pdsh"}
    for name, program in programs.items():
        if shutil.which(program) is None:
            yield EnvironmentFact(
                name, f"no {program}", "note", f"needed only for --launcher {_LAUNCHER.get(name, name)}"
            )
        else:
            flag = "--version" if program == "mpirun" else "-V"
            yield EnvironmentFact(name, _first_line([program, flag]) or program)


_LAUNCHER = {"mpi": "openmpi, mpich, mvapich or impi"}


def _compilers() -> Iterable[EnvironmentFact]:
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if compiler is None:
        yield EnvironmentFact(
            "c++ compiler", "none", "note", "torch.compile on the CPU and DeepSpeed's kernels need one"
        )
    else:
        yield EnvironmentFact("c++ compiler", _first_line([compiler, "--version"]) or compiler)
    nvcc = next((line for line in _lines(["nvcc", "--version"]) if "release" in line), None)
    yield EnvironmentFact(
        "nvcc", nvcc or "none", "ok" if nvcc else "note", "" if nvcc else "only DeepSpeed's CUDA kernels need it"
    )
    triton = _version("triton")
    yield EnvironmentFact(
        "triton", triton or "not installed", "ok" if triton else "note", "" if triton else "for torch.compile on GPUs"
    )


def _engines(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    for name, engine in facts.get("engines", {}).items():
        if engine.get("version") is None:
            yield EnvironmentFact(name, "not installed", "note", f"optional: pip install {name}")
        elif "error" in engine:
            yield EnvironmentFact(
                name,
                f"{engine['version']} does not load: {engine['error']}",
                "bad",
                "install a version that fits this torch",
            )
        else:
            yield EnvironmentFact(name, engine["version"])
            if engine.get("parts"):
                working = [kernel for kernel, works in engine["parts"].items() if works]
                rest = [kernel for kernel, works in engine["parts"].items() if not works]
                yield EnvironmentFact(f"{name} kernels", f"can be built: {', '.join(working) or 'none'}")
                if rest:
                    yield EnvironmentFact(
                        f"{name} kernels", f"cannot: {', '.join(rest)}", "note", "they need CUDA or a library"
                    )
    for name in ("transformers", "tensorboard", "wandb"):
        found_version = _version(name)
        yield EnvironmentFact(name, found_version or "not installed", "ok" if found_version else "note")


def _memory() -> Iterable[EnvironmentFact]:
    import psutil

    memory = psutil.virtual_memory()
    yield EnvironmentFact("cpu", f"{cpu_count()} cores")
    little = memory.available < 2 * _GIB
    value = f"{memory.total / _GIB:.0f} GiB, {memory.available / _GIB:.0f} GiB free"
    yield EnvironmentFact("memory", value, "bad" if little else "ok", "end what holds it" if little else "")
    limit = cgroup_limit()
    if limit is not None and limit < memory.total:
        yield EnvironmentFact(
            "memory limit", f"{limit / _GIB:.1f} GiB for this container", "note", "ranks beyond it are killed"
        )


def _limits(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    shared = "/dev/shm"  # noqa: S108  # nothing is written there: only its size is asked for
    if Path(shared).is_dir():
        free = shutil.disk_usage(shared).free
        small = free < _GIB
        remedy = "data workers and NCCL use shared memory: docker run --shm-size=8g" if small else ""
        yield EnvironmentFact(shared, f"{free / _GIB:.1f} GiB free", "bad" if small else "ok", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    needed = Path("/sys/class/infiniband").exists() and bool(facts.get("gpus"))
    low = locked != resource.RLIM_INFINITY
    yield EnvironmentFact(
        "locked memory",
        _amount(locked),
        "bad" if low and needed else "ok",
        "ulimit -l unlimited" if low and needed else "",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < 4096
    yield EnvironmentFact(
        "open files",
        "unlimited" if files == resource.RLIM_INFINITY else str(files),
        "note" if few else "ok",
        "ulimit -n 65536" if few else "",
    )
    free = shutil.disk_usage(os.curdir).free
    yield EnvironmentFact("disk here", f"{free / _GIB:.0f} GiB free", "note" if free < 10 * _GIB else "ok")


def _amount(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number >> 10} KiB"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    return next((line.strip() for line in _lines(command) if line.strip()), None)


def _lines(command: list[str]) -> list[str]:
    """Return a program's output; nothing where it is not installed or fails."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (said.stdout or said.stderr).splitlines() if said.returncode == 0 else []


def doctor(out: str | None = None, *, as_json: bool = False) -> None:
    """Print the facts, with a verdict on each line. `out` is refused: only measurements are written to a file."""
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
