"""Environment variables that launchers read: where ranks meet, and how many there are. Flags take precedence."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch.network import check_port, free_port, is_this_host
from plait.launch.options import LaunchOptions

_TORCHRUNS = ("nnodes", "node_rank", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
"""Flags that torchrun also reads from `PET_…`, as Kubernetes' operators set them."""


def with_variables(options: LaunchOptions) -> LaunchOptions:
    """Return the options; flags that are not given have the values of their environment variables."""
    if options.standalone:  # this flag chooses its own rendezvous
        return options
    options_read: dict[str, Any] = {}
    for name in _TORCHRUNS:
        text = os.environ.get(f"PET_{name.upper()}")
        if text and getattr(options, name) is None and options.hostfile is None:
            options_read[name] = _number(f"PET_{name.upper()}", text) if name == "node_rank" else text
    if options.num_gpus is not None:
        options_read.pop("nproc_per_node", None)
    if options.master_addr is None and (address := _first("MASTER_ADDR", "PET_MASTER_ADDR")) is not None:
        options_read["master_addr"] = address[1]
    if options.master_port is None and (port := _first("MASTER_PORT", "PET_MASTER_PORT")) is not None:
        options_read |= {"master_port": _number(*port), "master_port_by": port[0]}
    return replace(options, **options_read)


def check_address(address: str | None) -> None:
    """Raise an error if the address is another host's: used where ranks start only on this host."""
    if address is not None and not is_this_host(address):
        raise WorldError(
            f"--master_addr or MASTER_ADDR is {address}, which is not this host, and ranks are to start on this host "
            "only; leave it out, or say which of how many hosts this one is: plait launch --nnodes N --node_rank I … "
            "(a described run: --no_python plait train run.yaml)"
        )


def rendezvous_address() -> tuple[str, int]:
    """Return the address and port where ranks of this host meet, for launches without flags for them."""
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


def unused_hosts_note() -> str | None:
    """Return a note about hosts that Slurm has allocated to this job and the run does not use, or None."""
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
