"""From flags to a launch: which hosts, which ranks, which launcher."""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plait.config import read_lines, whole_number
from plait.errors import WorldError
from plait.launch import remote
from plait.launch.elastic import is_elastic, range_of_nodes
from plait.launch.environment import check_address, with_variables
from plait.launch.heartbeat import FOLDER_VARIABLE
from plait.launch.hostfile import MOST_SLOTS, Pool, choose, limit, read_hostfile
from plait.launch.job import Job, Node, cpu_count, parse_cores
from plait.launch.local import gpu_count
from plait.launch.network import DEFAULT_PORT, check_port, free_port, is_this_host, resolve, source_address
from plait.launch.options import DEFAULT_HOSTFILE, LaunchOptions, is_own_launcher
from plait.launch.remote import FAMILIES
from plait.launch.setup import Setup, all_here

# Which variables go along to other hosts. Only those named here do; nothing is passed by accident.


PREFIXES = ("NCCL_", "PYTHON", "TORCH_", "PYTORCH_", "GLOO_", "UCX_", "MV2_", "FI_", "OMP_", "MLFLOW", "PLAIT_")
"""Variables whose names begin so are forwarded."""

_NOT = {"PYTHONHOME", "PYTHONSTARTUP", FOLDER_VARIABLE}
"""They describe this host or this process, not the run."""

ENV_FILES = (".deepspeed_env", ".plait_env")
"""Looked for at home and in the current folder; later ones win."""


def forwarded(present: Mapping[str, str], *, home: Path, folder: Path) -> dict[str, str]:
    """What every rank on every host gets: variables with a known prefix, then those of the files.

    `DS_ENV_FILE` names the file instead, by its name or its path.
    """
    found = {name: value for name, value in present.items() if name.startswith(PREFIXES) and name not in _NOT}
    names = (present["DS_ENV_FILE"],) if "DS_ENV_FILE" in present else ENV_FILES
    read = set()
    for name in names:
        for base in (home, folder):
            path = (base / name).absolute()  # an absolute name stays as it is
            if path.is_file() and path not in read:
                read.add(path)
                found |= read_env_file(path)
    if "DS_ENV_FILE" in present and not read:
        raise WorldError(f"DS_ENV_FILE={present['DS_ENV_FILE']}: there is no such file in {home} or {folder}")
    return found


def forwarded_here(present: Mapping[str, str] | None = None) -> dict[str, str]:
    """`forwarded`, from this process's environment, home and current folder."""
    return forwarded(os.environ if present is None else present, home=Path.home(), folder=Path.cwd())


def read_env_file(path: Path) -> dict[str, str]:
    """Lines of `NAME=value`; `export` before it and quotes around the value are allowed, `#` begins a comment."""
    found = {}
    for number, line in enumerate(read_lines(path, WorldError), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            raise WorldError(f"{path}:{number}: cannot read {text!r}; write `NAME=value`")
        value = match[2]
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[match[1]] = value[1:-1] if quoted else value
    return found


def prepare(options: LaunchOptions, words: Sequence[str]) -> Setup:
    """Decide everything that can be decided without asking another host."""
    options = with_variables(options)
    own = is_own_launcher(options.launcher)
    if is_elastic(options) and (own or options.launcher in ("slurm", "pdsh", *FAMILIES)):
        raise WorldError(
            f"--launcher {options.launcher} starts a fixed number of ranks; elastic training goes with ssh"
        )
    if options.launcher == "slurm":
        return _on_slurm(options, words)
    pool = _pool(options)
    if pool is None:
        return _without_hostfile(options, words)
    nodes = _nodes(_chosen(pool, options))
    job = _job(options, nodes, devices=True)
    here = all_here(nodes, options)
    launcher = options.launcher or ("local" if here and len(nodes) == 1 else "ssh")
    if launcher in ("ssh", "pdsh") and here and len(nodes) == 1:
        launcher = "local"
    if launcher == "local" and not (here and len(nodes) == 1):
        raise WorldError(f"--launcher local starts ranks on this host only, not on {nodes[-1].host}; use ssh")
    if here:
        job = _meeting_here(job, options)
    else:
        job = replace(job, address=options.master_addr or _address(nodes), port=options.master_port or DEFAULT_PORT)
    if launcher != "local":
        job = replace(job, folder=os.getcwd(), environment=forwarded_here())
    return Setup(options, launcher, job, words=tuple(words))


def _pool(options: LaunchOptions) -> Pool | None:
    if options.hostfile is not None:
        return read_hostfile(Path(options.hostfile))
    if Path(DEFAULT_HOSTFILE).is_file():
        return read_hostfile(Path(DEFAULT_HOSTFILE))
    return {"localhost": tuple(range(_ranks_a_host(options) or gpu_count() or 1))} if options.force_multi else None


def _chosen(pool: Pool, options: LaunchOptions) -> Pool:
    if options.include or options.exclude:
        return choose(pool, include=options.include, exclude=options.exclude)
    hosts = options.num_nodes
    if hosts is None and options.nnodes is not None:
        hosts = min(range_of_nodes(options, len(pool))[1], len(pool))
    return limit(pool, hosts=hosts, slots=_ranks_a_host(options))


def _nodes(pool: Pool) -> tuple[Node, ...]:
    return tuple(Node(host, slots) for host, slots in pool.items())


def _ranks_a_host(options: LaunchOptions) -> int | None:
    """As the flags say; None where they do not."""
    count = _count(options)
    if count is not None and count > MOST_SLOTS:
        raise WorldError(f"{count} ranks a host are more than the {MOST_SLOTS} that there may be; use a smaller number")
    return count


def _count(options: LaunchOptions) -> int | None:
    text = options.nproc_per_node
    if text is None:
        return options.num_gpus
    if count := whole_number(text):
        return count
    if text == "cpu":
        return cpu_count()
    if text not in ("gpu", "auto"):
        raise WorldError(f"--nproc_per_node {text!r} is no number of ranks; use a number from 1, gpu, cpu or auto")
    count = gpu_count()
    if count == 0 and text == "gpu":
        raise WorldError("--nproc_per_node gpu: no GPU can be seen here; use a number, or cpu")
    return count or cpu_count()


def _without_hostfile(options: LaunchOptions, words: Sequence[str]) -> Setup:
    """This host alone, or one of several that are each started by hand, as with torchrun."""
    own = is_own_launcher(options.launcher)
    if not own and options.launcher not in (None, "local", *FAMILIES):
        raise WorldError(f"--launcher {options.launcher} needs hosts; name a file with --hostfile")
    slots = _local_slots(options)
    count = range_of_nodes(options, 1)[1] if options.nnodes else 1
    if options.num_nodes is not None and options.num_nodes > 1:
        raise WorldError(
            f"--num_nodes {options.num_nodes}: without a hostfile only this host is known; name one with --hostfile, "
            "or run the same command on each host with --nnodes, --node_rank and --master_addr"
        )
    devices = options.num_gpus is not None or bool(options.include or options.exclude)
    node = options.node_rank or 0
    if count == 1:
        job = _job(options, (Node("localhost", slots),), devices=devices)
        return Setup(options, options.launcher or "local", _meeting_here(job, options), words=tuple(words))
    if is_elastic(options):
        if options.rdzv_endpoint is None:
            raise WorldError(f"--nnodes {options.nnodes}: hosts need a place to meet; name it with --rdzv_endpoint")
        job = _job(options, (Node("localhost", slots),), devices=devices)
        return Setup(options, "local", job, words=tuple(words))
    if options.node_rank is None or options.master_addr is None or not 0 <= node < count:
        raise WorldError(
            f"--nnodes {count} without a hostfile: every host is started by hand, and needs --master_addr, the address "
            f"of the first, and --node_rank, 0 to {count - 1}"
        )
    port = options.master_port or DEFAULT_PORT
    if node == 0:
        check_port(port, asked_by=options.master_port_by)
    job = _job(options, tuple(Node(f"node-{index}", slots) for index in range(count)), devices=devices)
    return Setup(options, "local", replace(job, address=options.master_addr, port=port), node, tuple(words))


def _local_slots(options: LaunchOptions) -> tuple[int, ...]:
    count = _ranks_a_host(options)
    if count is None:
        count = max(gpu_count(), 1)
    pool = choose({"localhost": tuple(range(count))}, include=options.include, exclude=options.exclude)
    return pool["localhost"]


def _on_slurm(options: LaunchOptions, words: Sequence[str]) -> Setup:
    if options.hostfile is not None:
        raise WorldError(f"--hostfile {options.hostfile}: with Slurm, hosts come from Slurm; leave it out")
    if not remote.in_allocation():
        job = _job(options, (Node("localhost", (0,)),), devices=False)
        return Setup(options, "slurm", replace(job, environment=forwarded_here()), words=tuple(words))
    pool = remote.allocation(_ranks_a_host(options))
    nodes = _nodes(choose(pool, include=options.include, exclude=options.exclude))
    job = _job(options, nodes[: options.num_nodes], devices=False)
    address = options.master_addr or nodes[0].host
    return Setup(
        options,
        "slurm",
        replace(job, address=address, port=options.master_port or remote.job_port(), environment=forwarded_here()),
        words=tuple(words),
    )


def _meeting_here(job: Job, options: LaunchOptions) -> Job:
    """With a place for ranks of one host to meet."""
    check_address(options.master_addr)
    fixed = options.master_port
    port = free_port() if fixed is None else check_port(fixed, asked_by=options.master_port_by)
    return replace(job, address=options.master_addr or "127.0.0.1", port=port)


def _address(nodes: Sequence[Node]) -> str:
    """Of the first host, as the others see it; empty where only the host itself can tell."""
    first = nodes[0].host
    try:
        if not is_this_host(first):
            return resolve(first)
        others = [resolve(node.host) for node in nodes[1:] if not is_this_host(node.host)]
        return source_address(others[0]) if others else resolve(first)
    except (WorldError, OSError):
        return ""  # a name of ssh's own configuration: the host is asked


def _job(options: LaunchOptions, nodes: tuple[Node, ...], *, devices: bool) -> Job:
    if options.no_python:
        program: tuple[str, ...] = (options.script,)
    else:
        program = (sys.executable, "-u", *(("-m",) if options.module else ()), options.script)
    return Job(
        program,
        nodes,
        options.arguments,
        id=uuid.uuid4().hex[:8],
        devices=devices,
        local_rank_flag=options.pass_local_rank,
        bind_cores=options.bind_cores_to_rank,
        cores=parse_cores(options.bind_core_list) if options.bind_core_list else (),
        log_dir=options.enable_each_rank_log,
        log_prefix=time.strftime("%Y%m%d%H%M%S_"),
    )
