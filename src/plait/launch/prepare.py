"""From flags to a launch: which hosts, which ranks, which launcher."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch import forward, slurm
from plait.launch.binding import cpu_count, parse_cores
from plait.launch.elastic import is_elastic, range_of_nodes
from plait.launch.flags import DEFAULT_HOSTFILE, is_own_launcher
from plait.launch.hostfile import MOST_SLOTS, Pool, choose, limit, read_hostfile
from plait.launch.job import Job, Node
from plait.launch.local import gpu_count
from plait.launch.mpi import FAMILIES
from plait.launch.network import is_this_host, resolve, source_address
from plait.launch.options import Options
from plait.launch.ports import DEFAULT_PORT, check_port, free_port
from plait.launch.setup import Setup, all_here
from plait.launch.variables import check_address, with_variables


def prepare(options: Options, words: Sequence[str]) -> Setup:
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
        job = replace(job, folder=os.getcwd(), environment=forward.here())
    return Setup(options, launcher, job, words=tuple(words))


def _pool(options: Options) -> Pool | None:
    if options.hostfile is not None:
        return read_hostfile(Path(options.hostfile))
    if Path(DEFAULT_HOSTFILE).is_file():
        return read_hostfile(Path(DEFAULT_HOSTFILE))
    return {"localhost": tuple(range(_ranks_a_host(options) or gpu_count() or 1))} if options.force_multi else None


def _chosen(pool: Pool, options: Options) -> Pool:
    if options.include or options.exclude:
        return choose(pool, include=options.include, exclude=options.exclude)
    hosts = options.num_nodes
    if hosts is None and options.nnodes is not None:
        hosts = min(range_of_nodes(options, len(pool))[1], len(pool))
    return limit(pool, hosts=hosts, slots=_ranks_a_host(options))


def _nodes(pool: Pool) -> tuple[Node, ...]:
    return tuple(Node(host, slots) for host, slots in pool.items())


def _ranks_a_host(options: Options) -> int | None:
    """As the flags say; None where they do not."""
    count = _count(options)
    if count is not None and count > MOST_SLOTS:
        raise WorldError(f"{count} ranks a host are more than the {MOST_SLOTS} that there may be; use a smaller number")
    return count


def _count(options: Options) -> int | None:
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


def _without_hostfile(options: Options, words: Sequence[str]) -> Setup:
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


def _local_slots(options: Options) -> tuple[int, ...]:
    count = _ranks_a_host(options)
    if count is None:
        count = max(gpu_count(), 1)
    pool = choose({"localhost": tuple(range(count))}, include=options.include, exclude=options.exclude)
    return pool["localhost"]


def _on_slurm(options: Options, words: Sequence[str]) -> Setup:
    if options.hostfile is not None:
        raise WorldError(f"--hostfile {options.hostfile}: with Slurm, hosts come from Slurm; leave it out")
    if not slurm.in_allocation():
        job = _job(options, (Node("localhost", (0,)),), devices=False)
        return Setup(options, "slurm", replace(job, environment=forward.here()), words=tuple(words))
    pool = slurm.allocation(_ranks_a_host(options))
    nodes = _nodes(choose(pool, include=options.include, exclude=options.exclude))
    job = _job(options, nodes[: options.num_nodes], devices=False)
    address = options.master_addr or nodes[0].host
    return Setup(
        options,
        "slurm",
        replace(job, address=address, port=options.master_port or slurm.job_port(), environment=forward.here()),
        words=tuple(words),
    )


def _meeting_here(job: Job, options: Options) -> Job:
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


def _job(options: Options, nodes: tuple[Node, ...], *, devices: bool) -> Job:
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
