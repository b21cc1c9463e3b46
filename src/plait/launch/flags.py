"""The list of flags, with their meaning in a line each."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from plait.config import choose_type, entry_points_of
from plait.errors import WorldError

LAUNCHERS = ("local", "ssh", "pdsh", "openmpi", "mpich", "mvapich", "impi", "slurm")
DEFAULT_HOSTFILE = "/job/hostfile"


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and leaving, so that every mistake is told in the same way."""

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong."""
        raise WorldError(f"plait launch: {message}; `plait launch --help` lists the flags")


def flags() -> argparse.ArgumentParser:
    """A parser for what stands before the script. What is not given is left out of its result."""
    parser = _Parser(
        prog="plait launch",
        usage="plait launch [flags] script.py [arguments of the script]",
        description="Start a script on every slot of one or several hosts, and see it through to its end.",
        epilog="Flags stand before the script; - and _ in them mean the same. What follows it is the script's own.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _where(parser.add_argument_group("where it runs"))
    _reach(parser.add_argument_group("how hosts are reached"))
    _script(parser.add_argument_group("how the script is started"))
    _before(parser.add_argument_group("before the start"))
    _elastic(parser.add_argument_group("elastic training; with torchrun's own flags, by torch's agent"))
    return parser


def _launcher(text: str) -> str:
    if is_own_launcher(text):
        return text
    if text.lower() in LAUNCHERS:
        return text.lower()
    raise argparse.ArgumentTypeError(f"unknown launcher {text!r}. {choose_type('launcher', text, LAUNCHERS)}")


def is_own_launcher(name: str | None) -> bool:
    """Whether a launcher is the user's: named by its code, or brought by a plug-in."""
    return name is not None and name.lower() not in LAUNCHERS and (":" in name or name in entry_points_of("launcher"))


def _switch(group: argparse._ArgumentGroup, *names: str, **more: Any) -> None:
    group.add_argument(*names, action="store_true", **more)


def _where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hostfile", "-H", metavar="FILE", help=f"hosts, `worker-0 slots=4` a line ({DEFAULT_HOSTFILE})"
    )
    group.add_argument("--include", "-i", metavar="HOSTS", help="only these slots: worker-0@worker-1:0,2")
    group.add_argument("--exclude", "-e", metavar="HOSTS", help="all slots but these; written like --include")
    group.add_argument("--num_nodes", type=int, metavar="N", help="the first N hosts of the hostfile")
    group.add_argument("--num_gpus", "--num_accelerators", type=int, metavar="N", help="GPUs 0 to N-1 of each host")
    group.add_argument("--nproc_per_node", metavar="N", help="ranks a host: a number, gpu, cpu or auto")
    group.add_argument("--nnodes", metavar="N|MIN:MAX", help="hosts; without a hostfile, run the same command on each")
    group.add_argument("--node_rank", type=int, metavar="N", help="which of --nnodes this one is")


def _reach(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher",
        type=_launcher,
        metavar="NAME",
        help=f"{', '.join(LAUNCHERS)}, or package.module:name; ssh where there are several hosts, else local",
    )
    group.add_argument(
        "--launcher_args",
        type=_words,
        metavar="WORDS",
        help="more arguments for ssh, pdsh, mpirun, srun, sbatch",
    )
    group.add_argument("--master_addr", metavar="HOST", help="address of rank 0; found by itself")
    group.add_argument("--master_port", type=int, metavar="PORT", help="port of rank 0; a free one")
    group.add_argument("--ssh_port", type=int, metavar="PORT", help="port of ssh on the hosts")
    _switch(group, "--force_multi", help="over ssh, even if the only host is this one")


def _script(group: argparse._ArgumentGroup) -> None:
    _switch(group, "--module", "-m", help="the script is a module, as in python -m")
    _switch(group, "--no_python", help="the script is a program of its own")
    _switch(group, "--pass_local_rank", help="give the script --local_rank=N, as deepspeed does")
    _switch(group, "--no_local_rank", "--use_env", help="do not: the default, in other launchers' words")
    group.add_argument("--enable_each_rank_log", metavar="FOLDER", help="output of each rank into a file of its own")
    _switch(group, "--save_pid", help="leave the launcher's pid in /tmp/<pid>.ds while it runs")
    _switch(group, "--bind_cores_to_rank", help="give each rank cores of its own")
    group.add_argument("--bind_core_list", metavar="CORES", help="from these: 1,3-5,7")
    group.add_argument(
        "--stop_grace", type=float, metavar="SECONDS", help="time to leave after Ctrl-C before being ended (30)"
    )


def _before(group: argparse._ArgumentGroup) -> None:
    _switch(group, "--dry_run", help="print what would run, and run nothing")
    _switch(group, "--preflight", help="check all hosts, show the table, start nothing")
    _switch(group, "--no_ssh_check", help="start several hosts without checking them")
    group.add_argument("--autotuning", choices=("tune", "run"), help="look for the fastest settings first")


def _elastic(group: argparse._ArgumentGroup) -> None:
    _switch(group, "--elastic_training", help="go on when ranks or hosts fail, and when hosts come back")
    group.add_argument("--min_elastic_nodes", type=int, metavar="N", help="at least so many hosts (1)")
    group.add_argument("--max_elastic_nodes", type=int, metavar="N", help="at most so many (all)")
    group.add_argument(
        "--max_restarts",
        type=int,
        metavar="N",
        help="so many new beginnings (100 with --elastic_training, else 0)",
    )
    _switch(group, "--standalone", help="a rendezvous of its own on this host")
    group.add_argument("--rdzv_backend", metavar="NAME", help="as of torchrun: c10d, etcd, static")
    group.add_argument("--rdzv_endpoint", metavar="HOST:PORT", help="as of torchrun")
    group.add_argument("--rdzv_id", metavar="ID", help="as of torchrun")
    group.add_argument("--rdzv_conf", metavar="KEY=VALUE,…", help="as of torchrun")


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))
