"""What a runner is told about its process: launcher, back end, seeds, limits."""

from __future__ import annotations

import random
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.config import choose
from plait.errors import ConfigError, Problem, WorldError
from plait.frontends import Answer
from plait.frontends.mmengine.dist import sync_random_seed
from plait.frontends.mmengine.registry import check_arguments
from plait.frontends.mmengine.strategy.table import Row, Sheet, honoured, noted, refused, unneeded
from plait.world import Ranks, detect_ranks, make_deterministic

LAUNCHERS = {"pytorch": "torchrun", "slurm": "slurm", "mpi": "mpi", "none": "none"}
_STARTED_BY = {"pytorch": "torchrun", "slurm": "srun", "mpi": "mpirun"}


def check_launcher(launcher: str | None, ranks: Ranks | None = None) -> None:
    """Raise where `launcher` does not fit how this process was started. None: whatever started it is right."""
    if launcher is None:
        return
    if launcher not in LAUNCHERS:
        raise ConfigError(Problem("launcher", f"{launcher!r}", choose(launcher, LAUNCHERS, "word")))
    found = ranks or detect_ranks()
    if found.launcher == LAUNCHERS[launcher] or found.launcher == "caller":
        return
    if launcher == "none":
        if found.size > 1:
            word = next(key for key, value in LAUNCHERS.items() if value == found.launcher)
            raise WorldError(
                f"launcher='none', but {found.launcher} started {found.size} processes, which would each train by "
                f"themselves and write over each other: pass launcher={word!r} (--launcher {word})"
            )
        return
    raise WorldError(
        f"launcher={launcher!r}, but this process was not started by {_STARTED_BY[launcher]}: start it with that, or "
        "pass launcher='none' for one process"
    )


def _backend(sheet: Sheet, key: str, value: Any) -> None:
    if value not in ("nccl", "gloo", "mpi"):
        refused("write nccl, gloo or mpi")(sheet, key, value)
    elif value == "nccl" and not torch.cuda.is_available():  # it stands in every script, those for CPU among them
        sheet.account.add(Answer.MAPPED, key, value, "backend: gloo, as there is no CUDA device")
    else:
        honoured("backend")(sheet, key, value)


def _seconds(value: Any) -> float:
    return float(value.total_seconds() if hasattr(value, "total_seconds") else value)


_DISTRIBUTED: dict[str, Row] = {
    "backend": _backend,
    "timeout": honoured("timeout_s", _seconds),
    "init_backend": refused("leave it out", "torch"),
}
_THREADS = unneeded("libraries keep their own number of threads; the launcher sets OMP_NUM_THREADS")
_PROCESSES: dict[str, Row] = {
    "mp_start_method": noted("workers of loaders are started so"),
    "opencv_num_threads": _THREADS,
    "omp_num_threads": _THREADS,
    "mkl_num_threads": _THREADS,
}
_ENVIRONMENT: dict[str, Row] = {
    "cudnn_benchmark": noted("torch.backends.cudnn.benchmark"),
    "resource_limit": noted("files that this process may have open"),
    "mp_cfg": lambda sheet, key, value: sheet.walk(key, value, _PROCESSES),
    "dist_cfg": lambda sheet, key, value: sheet.walk(key, value, _DISTRIBUTED),
}


def read_environment(env_cfg: Mapping[str, Any], sheet: Sheet) -> str | None:
    """Put `env_cfg` into sections, and do at once what concerns this process; returns how workers are started."""
    sheet.walk("env_cfg", env_cfg, _ENVIRONMENT)
    torch.backends.cudnn.benchmark = bool(env_cfg.get("cudnn_benchmark", False))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(max(int(env_cfg.get("resource_limit", 4096)), soft), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    method = env_cfg.get("mp_cfg", {}).get("mp_start_method")
    return None if method is None else str(method)


@dataclass(frozen=True, slots=True)
class Randomness:
    """`randomness=dict(seed=…)`."""

    seed: int | None = None
    diff_rank_seed: bool = False
    """Whether ranks draw other numbers."""
    deterministic: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Randomness:
        """From the argument of a runner."""
        check_arguments("randomness", cls, given)
        return cls(**given)

    def start(self, rank: int) -> int:
        """Seed all generators; returns the seed of the run, which ranks agree on where none was chosen."""
        seed = sync_random_seed() if self.seed is None else int(self.seed)
        own = (seed + rank if self.diff_rank_seed else seed) % 2**32
        random.seed(own)
        np.random.seed(own)
        torch.manual_seed(own)
        if self.deterministic:
            make_deterministic()
        return seed
