"""Ranks that an mpirun starts: OpenMPI's, and those of the MPICH family."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plait.launch.command import Command
from plait.launch.job import Job
from plait.launch.rank import rank_words

FAMILIES = ("openmpi", "mpich", "mvapich", "impi")


def mpi_command(family: str, job: Job, arguments: Sequence[str]) -> Command:
    """The mpirun of a job. Its hosts and slots are the chosen ones, in a file that this run has for itself."""
    hosts = str(Path(tempfile.gettempdir(), f"plait-{job.id}.hosts"))
    rank = rank_words(job)
    if family == "openmpi":
        lines = [f"{node.host} slots={len(node.slots)}" for node in job.nodes]
        # Each rank gets its cores from us or none: mpirun's own binding would put a rank's threads on one core.
        start = ["mpirun", "-n", str(job.size), "--hostfile", hosts, "--map-by", "slot", "--bind-to", "none"]
        exports = [word for name in job.environment for word in ("-x", name)]
    else:
        lines = [f"{node.host}:{len(node.slots)}" for node in job.nodes]
        start = ["mpirun" if family == "impi" else "mpiexec.hydra", "-n", str(job.size), "-f", hosts]
        exports = ["-genvlist", ",".join(job.environment)] if job.environment else []
        if family == "impi":
            exports += ["-genv", "I_MPI_PIN", "0"]
        if family == "mvapich":
            exports += ["-genv", "MV2_SMP_USE_CMA", "0", "-genv", "MV2_ENABLE_AFFINITY", "0"]
    argv = (*start, *exports, *arguments, *rank)
    return Command(argv, environment=job.environment, files={hosts: "\n".join(lines) + "\n"})


openmpi_command = partial(mpi_command, "openmpi")
mpich_command = partial(mpi_command, "mpich")
mvapich_command = partial(mpi_command, "mvapich")
impi_command = partial(mpi_command, "impi")
