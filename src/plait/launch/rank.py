"""Stands beside one rank of a job that mpirun or srun started: tells it in torchrun's words who it is, runs the script
as its child, and tells the launcher how that does.

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
    """The command that mpirun or srun starts for each rank. They carry the environment along themselves."""
    return [sys.executable, "-m", "plait.launch.rank", "--job", replace(job, environment={}).to_json()]


def host_words(job: Job, node: int) -> list[str]:
    """The command that starts all ranks of one host of a job, where a launcher starts one command for each."""
    return [sys.executable, "-m", "plait.launch.agent", "--job", job.to_json(), "--node", str(node)]


def launched_rank() -> int:
    """The rank as which a launcher, whichever, started this process; 0 where nobody did."""
    values = (os.environ.get(name, "") for name in ("RANK", *(rank for rank, _ in _NAMES)))
    return next((number for text in values if (number := whole_number(text)) is not None), 0)


def which_rank(environment: Mapping[str, str], size: int) -> int:
    """The number of this process among those that were started, which must be `size`."""
    for rank, count in _NAMES:
        if rank in environment:
            started = environment.get(count, str(size))
            if started != str(size):
                raise WorldError(f"{started} processes were started for a job of {size} ranks; check --launcher_args")
            return int(environment[rank])
    raise WorldError("neither MPI nor Slurm has started this process; plait.launch.rank is for their ranks only")


def main() -> int:
    """Read the job, and see the script through to its end."""
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
