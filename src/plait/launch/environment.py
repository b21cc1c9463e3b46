"""What this machine offers to training, line by line with a verdict. Loads no torch; a child process asks it."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch.job import cpu_count
from plait.launch.network import check_port, free_port, is_this_host
from plait.launch.options import LaunchOptions

Health = Literal["ok", "note", "bad"]
_CHILD_S = 180.0
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EnvironmentFact:
    """One thing, how it is, and whether that is good."""

    name: str
    value: str
    verdict: Health = "ok"
    """`note`: works without; `bad`: training will suffer or fail."""
    remedy: str = ""


def report() -> list[EnvironmentFact]:
    """Everything that `plait doctor` shows."""
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
    """What only torch and the engines can tell about themselves, from a process of their own."""
    command = [sys.executable, "-m", "plait.cli.torch_facts"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_CHILD_S:.0f} seconds"}
    try:
        found: dict[str, Any] = json.loads(said.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]}
    return found


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
    """The private names of torch that Plait uses; see `plait/torch_internals.py`."""
    missing, count = facts["missing"], facts["internals"]
    if not missing:
        return EnvironmentFact("torch internals", f"all {count} found")
    named = "; ".join(f"{each['path']}, for {each['purpose']}" for each in missing)
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
    for name, found in facts.get("engines", {}).items():
        if found.get("version") is None:
            yield EnvironmentFact(name, "not installed", "note", f"optional: pip install {name}")
        elif "error" in found:
            yield EnvironmentFact(
                name,
                f"{found['version']} does not load: {found['error']}",
                "bad",
                "install a version that fits this torch",
            )
        else:
            yield EnvironmentFact(name, found["version"])
            if found.get("parts"):
                working = [part for part, works in found["parts"].items() if works]
                rest = [part for part, works in found["parts"].items() if not works]
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


def cgroup_limit() -> int | None:
    """Bytes that the kernel lets this process's group have; None without a limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


def _limits(facts: Mapping[str, Any]) -> Iterable[EnvironmentFact]:
    shared = "/dev/shm"  # noqa: S108  # nothing is written there: only its size is asked for
    if Path(shared).is_dir():
        free = shutil.disk_usage(shared).free
        small = free < _GIB
        remedy = "data workers and NCCL share memory there: docker run --shm-size=8g" if small else ""
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
    """What a program prints about itself; nothing where it is not there or fails."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (said.stdout or said.stderr).splitlines() if said.returncode == 0 else []


# What the environment says about where ranks meet, for those who start them. A flag goes before its variable.


_TORCHRUNS = ("nnodes", "node_rank", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
"""Flags that torchrun also reads from `PET_…`, as Kubernetes' operators set them."""


def with_variables(options: LaunchOptions) -> LaunchOptions:
    """The flags, and what the environment says where they say nothing."""
    if options.standalone:  # a meeting place of its own
        return options
    found: dict[str, Any] = {}
    for name in _TORCHRUNS:
        text = os.environ.get(f"PET_{name.upper()}")
        if text and getattr(options, name) is None and options.hostfile is None:
            found[name] = _number(f"PET_{name.upper()}", text) if name == "node_rank" else text
    if options.num_gpus is not None:
        found.pop("nproc_per_node", None)
    if options.master_addr is None and (address := _first("MASTER_ADDR", "PET_MASTER_ADDR")) is not None:
        found["master_addr"] = address[1]
    if options.master_port is None and (port := _first("MASTER_PORT", "PET_MASTER_PORT")) is not None:
        found |= {"master_port": _number(*port), "master_port_by": port[0]}
    return replace(options, **found)


def check_address(address: str | None) -> None:
    """Ranks of this host alone cannot meet on another one."""
    if address is not None and not is_this_host(address):
        raise WorldError(
            f"--master_addr or MASTER_ADDR is {address}, which is not this host, and ranks are to start on this host "
            "only; leave it out, or say which of how many hosts this one is: plait launch --nnodes N --node_rank I … "
            "(a described run: --no_python plait train run.yaml)"
        )


def meeting_place() -> tuple[str, int]:
    """Where ranks of this host meet that are started without flags for it."""
    count = _first("PET_NNODES")
    if count is not None and count[1] not in ("1", "1:1"):
        raise WorldError(
            f"PET_NNODES={count[1]}, but ranks are to start on this host only; start the run with `plait launch "
            "--no_python plait train …`, which reads PET_NNODES, or unset it"
        )
    address, port = _first("MASTER_ADDR"), _first("MASTER_PORT")
    check_address(None if address is None else address[1])
    number = free_port() if port is None else check_port(_number(*port), asked_by=port[0])
    return "127.0.0.1" if address is None else address[1], number


def unused_hosts() -> str | None:
    """A sentence about hosts that Slurm gave to this job and nobody uses; None where there are none."""
    hosts = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    if hosts in ("", "1") or "SLURM_STEP_NUM_TASKS" in os.environ:
        return None
    return (
        f"this Slurm job has {hosts} hosts, and the run uses this one only; `srun` before the command, or `plait "
        "launch --launcher slurm --no_python plait train …` uses all of them"
    )


def _first(*names: str) -> tuple[str, str] | None:
    return next(((name, value) for name in names if (value := os.environ.get(name))), None)


def _number(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise WorldError(
            f"the environment variable {name} is {text!r}, expected a whole number; unset it, or correct it"
        )
    return number
