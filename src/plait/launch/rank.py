"""Wraps one rank of a job that mpirun or srun started: sets torchrun's variables, runs the script as its child, and
reports its state to the launcher.

mpirun … python -m plait.launch.rank --job '{…}'
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from plait.config import whole_number
from plait.errors import PlaitError, WorldError
from plait.launch.agent import supervise_here
from plait.launch.job import Job

# rank, size
_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def rank_words(job: Job) -> list[str]:
    """Return the command that mpirun or srun starts for each rank, without variables: they forward the environment."""
    return [sys.executable, "-m", "plait.launch.rank", "--job", replace(job, environment={}).to_json()]


def host_words(job: Job, node: int) -> list[str]:
    """Return the command that starts all ranks of one host of a job, for launchers that start one command per host."""
    return [sys.executable, "-m", "plait.launch.agent", "--job", job.to_json(), "--node", str(node)]


def launched_rank() -> int:
    """Return the rank of this process, whichever launcher started it; 0 if none did."""
    values = (os.environ.get(name, "") for name in ("RANK", *(rank for rank, _ in _NAMES)))
    return next((number for text in values if (number := whole_number(text)) is not None), 0)


def which_rank(environment: Mapping[str, str], size: int) -> int:
    """Return the rank that MPI or Slurm gave this process. Raise an error if they started other than `size` ranks."""
    for rank, count in _NAMES:
        if rank in environment:
            started = environment.get(count, str(size))
            if started != str(size):
                raise WorldError(f"{started} processes were started for a job of {size} ranks; check --launcher_args")
            return int(environment[rank])
    raise WorldError("neither MPI nor Slurm has started this process; plait.launch.rank is for their ranks only")


def main() -> int:
    """Read the job, and run the script to its end; return its exit code."""
    options = argparse.ArgumentParser(prog="plait.launch.rank")
    options.add_argument("--job", required=True)
    try:
        job = Job.from_json(options.parse_args().job)
        placement = job.placements()[which_rank(os.environ, job.size)]
        return supervise_here(job, placement.node, [placement])
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
