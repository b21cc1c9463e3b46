"""The rank of this process, from the environment of its launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import WorldError

DEFAULT_PORT = 29500
"""The same as torchrun's."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, and what else the launcher says about the run."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this host."""
    local_size: int
    launcher: str
    """`torchrun`, `slurm`, `mpi`, or `none`."""
    address: str = "127.0.0.1"
    """The host where rank 0 listens."""
    port: int = 0
    attempt: int = 0
    """How often the launcher has restarted these ranks after a failure."""
    most: int = 0
    """The largest number of ranks with which the launcher may restart the run; 0: it does not restart."""
    split: int = 1
    """The number of parts that each micro-batch is split into; above 1 after an attempt that ran out of memory."""


def detect_ranks(env: Mapping[str, str] | None = None) -> Ranks:
    """Return the ranks from the environment of torchrun, Slurm or MPI; without any of these, a single process.

    Raise `WorldError` if the environment contradicts itself.
    """
    env = os.environ if env is None else env
    ranks = _detect(env)
    if not 0 <= ranks.rank < ranks.size:
        raise WorldError(
            f"the environment of {ranks.launcher} says rank {ranks.rank} of {ranks.size}, but ranks go from 0 to "
            f"{ranks.size - 1}; it is set by the launcher, perhaps by an earlier one"
        )
    if ranks.size > 1 and not 0 < ranks.port < 1 << 16:
        raise WorldError(
            f"MASTER_PORT is {ranks.port}, a port that nobody can join: write one from 1 to 65535. torchrun finds a "
            "free one itself with `--standalone`, and so does `plait launch` without --master_port"
        )
    return ranks


def _detect(env: Mapping[str, str]) -> Ranks:
    if "RANK" in env:
        return _from_torchrun(env)
    # SLURM_PROCID is also set in a batch script, outside of srun; SLURM_STEP_NUM_TASKS only in processes of srun.
    if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return _from_slurm(env)
    for names in _MPI_FLAVOURS:
        if names[0] in env:
            return _from_mpi(env, names)
    attempt, split = _integer(env, "PLAIT_ATTEMPT", 0), _integer(env, "PLAIT_SPLIT", 1)
    return Ranks(0, 1, 0, 1, "none", attempt=attempt, split=split)


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        written = "not set" if text is None else repr(text)
        raise WorldError(
            f"the environment variable {name} is {written}, expected a whole number; it is set by the launcher"
        ) from None


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    size = _integer(env, "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", _integer(env, "RANK"))
    return Ranks(
        rank=_integer(env, "RANK"),
        size=size,
        local_rank=local_rank,
        local_size=_integer(env, "LOCAL_WORLD_SIZE", size),
        launcher="torchrun",
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_integer(env, "MASTER_PORT", DEFAULT_PORT),
        attempt=_integer(env, "PLAIT_ATTEMPT", _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        most=_integer(env, "PLAIT_MOST_RANKS", 0),
        split=_integer(env, "PLAIT_SPLIT", 1),
    )


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    size = _integer(env, "SLURM_STEP_NUM_TASKS")
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Ranks(
        rank=_integer(env, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_size=int(per_node.group()) if per_node else size,
        launcher="slurm",
        address=env.get("MASTER_ADDR") or first_host(hosts),
        port=_integer(env, "MASTER_PORT", _job_port(env.get("SLURM_JOB_ID", "0") + env.get("SLURM_STEP_ID", ""))),
    )


# rank, size, local rank, local size
_MPI_FLAVOURS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _from_mpi(env: Mapping[str, str], names: tuple[str, str, str, str]) -> Ranks:
    rank, size = _integer(env, names[0]), _integer(env, names[1])
    local_size = _integer(env, names[3], size)
    if "MASTER_ADDR" not in env and local_size < size:
        raise WorldError(
            f"{size} MPI ranks over several hosts need the address of rank 0: "
            "pass it on with `mpirun -x MASTER_ADDR=<host> …`"
        )
    return Ranks(
        rank=rank,
        size=size,
        local_rank=_integer(env, names[2], rank),
        local_size=local_size,
        launcher="mpi",
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_integer(env, "MASTER_PORT", _mpi_port(env, one_host=local_size == size)),
    )


def _mpi_port(env: Mapping[str, str], *, one_host: bool) -> int:
    """Return a port that all ranks compute alike, without communication."""
    if "PMIX_NAMESPACE" in env:
        return _job_port(env["PMIX_NAMESPACE"])
    # On one host all ranks have the same parent process, mpirun. On several hosts only a fixed port is known to all.
    return _job_port(str(os.getppid())) if one_host else DEFAULT_PORT


def _job_port(job: str) -> int:
    digits = int("".join(re.findall(r"\d", job)) or "0")
    return 20000 + digits % 10000


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[07-09,12],cpu1` → `gpu07`."""
    # In each bracket, keep only what is before the first comma or dash. The other commas then separate host names.
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist).partition(",")[0].strip()
    if not re.fullmatch(r"[^\s\[\]]+", host):
        raise WorldError(f"cannot read the first host of the Slurm node list {nodelist!r}; set MASTER_ADDR")
    return host


# The variables of `accelerate launch`.

_ACCELERATE = "ACCELERATE_"


def accelerate_environment() -> dict[str, str]:
    """Return the variables of `accelerate launch`, without their prefix; empty under another launcher.

    It is recognized by ACCELERATE_MIXED_PRECISION, which it always sets. Other variables with the prefix are no sign of
    it: the library Accelerate sets some too.
    """
    if f"{_ACCELERATE}MIXED_PRECISION" not in os.environ:
        return {}
    return {name.removeprefix(_ACCELERATE): value for name, value in os.environ.items() if name.startswith(_ACCELERATE)}
