"""Slurm: `srun` inside an allocation; outside of one, a batch file that gets one and starts again inside it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch.command import Command
from plait.launch.hostfile import Pool
from plait.launch.job import Job
from plait.launch.options import Options, without
from plait.launch.rank import rank_words


def in_allocation() -> bool:
    """Whether Slurm has given us hosts already."""
    return "SLURM_JOB_ID" in os.environ


def allocation(slots: int | None) -> Pool:
    """The hosts of our allocation. Slots of each: as many as were asked for, else its tasks, else its GPUs, else 1."""
    found = os.environ.get("SLURM_JOB_NODELIST", "")
    listed = subprocess.run(["scontrol", "show", "hostnames", found], capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout.split():
        raise WorldError(f"scontrol cannot read the node list {found!r} of this allocation: {listed.stderr.strip()}")
    count = slots or _first_number("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE") or 1
    return {host: tuple(range(count)) for host in listed.stdout.split()}


def job_port() -> int:
    """A port that only this job is likely to take: rank 0 may be on another host, where nobody can look."""
    digits = re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", ""))
    return 20000 + int(digits or "0") % 10000


def srun_command(job: Job, arguments: Sequence[str]) -> Command:
    """The srun of a job inside its allocation. Slurm sees to devices and cores; the environment goes along whole."""
    counts = [len(node.slots) for node in job.nodes]
    if len(set(counts)) > 1:
        raise _uneven(job)
    hosts = ",".join(node.host for node in job.nodes)
    ranks = (f"--nodes={len(counts)}", f"--ntasks={job.size}", f"--ntasks-per-node={counts[0]}")
    start = ("srun", *ranks, f"--nodelist={hosts}")
    # One rank's end is everybody's, and the worst exit code is srun's own.
    return Command(
        (*start, "--kill-on-bad-exit=1", "--export=ALL", *arguments, *rank_words(job)), environment=job.environment
    )


def _uneven(job: Job) -> WorldError:
    return WorldError(
        "srun gives equally many ranks to each host, but the filter leaves "
        + ", ".join(f"{node.host} with {len(node.slots)}" for node in job.nodes)
        + "; choose as many slots on each, or use --launcher ssh inside the allocation"
    )


def batch_file(options: Options, words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The text of a batch file that asks for hosts and runs the same `plait launch` on the first of them."""
    per_node = options.num_gpus or _plain(options.nproc_per_node) or 1
    nodes = options.num_nodes or _plain(options.nnodes) or 1
    name = Path(options.script).stem or "plait"
    asked = {"job-name": name, "nodes": nodes, "ntasks-per-node": per_node, "output": f"{name}-%j.out"}
    if options.num_gpus is not None:
        asked["gpus-per-node"] = options.num_gpus
    if options.include:
        asked["nodelist"] = _hosts(options.include, "--include")
    if options.exclude:
        asked["exclude"] = _hosts(options.exclude, "--exclude")
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in asked.items())]
    if options.launcher_args:
        lines.append(f"#SBATCH {shlex.join(options.launcher_args)}")
    lines += ["", f"cd {shlex.quote(str(Path.cwd()))} || exit 1"]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
    again = without(words, "launcher_args", "dry_run")  # the first are sbatch's, not srun's
    lines += [f"exec {shlex.join([sys.executable, '-m', 'plait', 'launch', *again])}"]
    return "\n".join(lines) + "\n"


def sbatch_command(options: Options, words: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Writes the batch file into the current folder and submits it."""
    path = f"{Path(options.script).stem or 'plait'}.sbatch"
    return Command(("sbatch", path), files={path: batch_file(options, words, environment)}, keep_files=True)


def _hosts(text: str, flag: str) -> str:
    if ":" in text:
        raise WorldError(
            f"{flag} {text!r}: Slurm gives out whole hosts before it is known which slots they have; name hosts"
        )
    return ",".join(text.split("@"))


def _plain(text: str | None) -> int | None:
    return None if text is None else whole_number(text)


def _first_number(*names: str) -> int | None:
    for name in names:
        if (found := re.search(r"\d+", os.environ.get(name, ""))) and int(found.group()):
            return int(found.group())
    return None
