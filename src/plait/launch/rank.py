"""Becomes one rank of a job that mpirun or srun started: says who it is in torchrun's words, then runs the script.

mpirun … python -m plait.launch.rank --job '{…}'
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from plait.errors import PlaitError, WorldError
from plait.launch.binding import available_cores
from plait.launch.job import Job
from plait.launch.network import interface_variables

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


def which_rank(environment: Mapping[str, str], size: int) -> int:
    """The number of this process among those that were started, which must be `size`."""
    for rank, count in _NAMES:
        if rank in environment:
            started = environment.get(count, str(size))
            if started != str(size):
                raise WorldError(f"{started} processes were started for a job of {size} ranks; check --launcher_args")
            return int(environment[rank])
    raise WorldError("neither MPI nor Slurm has started this process; plait.launch.rank is for their ranks only")


def main() -> None:
    """Read the job, and turn into the script."""
    options = argparse.ArgumentParser(prog="plait.launch.rank")
    options.add_argument("--job", required=True)
    try:
        become(Job.from_json(options.parse_args().job))
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        sys.exit(2)


def become(job: Job) -> NoReturn:
    """Replace this process by the script."""
    place = job.places()[which_rank(os.environ, job.size)]
    present = {**os.environ, **job.environment}
    if len(job.nodes) > 1:
        present |= interface_variables(job.address, present)
    cores = available_cores()
    bound = job.cores_for(place, cores)
    if bound:
        os.sched_setaffinity(0, bound)
        present["OMP_NUM_THREADS"] = str(len(bound))
    argv = job.argv(place)
    if (log := job.log_file(place)) is not None:
        os.makedirs(os.path.dirname(log), exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    try:
        os.execvpe(argv[0], argv, {**present, **job.variables(place, present)})
    except OSError as error:
        raise WorldError(f"rank {place.rank} of {job.size} could not be started: {argv[0]}: {error}") from error


if __name__ == "__main__":
    main()
