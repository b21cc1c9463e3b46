"""The flags of `plait launch`, named as those of `deepspeed` and torchrun.

Flags come before the script, the script's own arguments after it. The error for a flag on the wrong side says so.
`-` and `_` inside a flag mean the same.
"""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from plait.config import choose_type, entry_points_of
from plait.errors import WorldError

LAUNCHERS = ("local", "ssh", "pdsh", "openmpi", "mpich", "mvapich", "impi", "slurm")
DEFAULT_HOSTFILE = "/job/hostfile"


class _Parser(argparse.ArgumentParser):
    """Raises `WorldError` instead of printing and exiting, so that all errors are reported in the same way."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `WorldError`."""
        raise WorldError(f"plait launch: {message}; `plait launch --help` lists the flags")


def flags() -> argparse.ArgumentParser:
    """Return a parser for the flags before the script. Flags that are not given are not in its result."""
    parser = _Parser(
        prog="plait launch",
        usage="plait launch [flags] script.py [arguments of the script]",
        description="Start a script on every slot of one or several hosts, and run it to its end.",
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
    if is_custom_launcher(text):
        return text
    if text.lower() in LAUNCHERS:
        return text.lower()
    raise argparse.ArgumentTypeError(f"unknown launcher {text!r}. {choose_type('launcher', text, LAUNCHERS)}")


def is_custom_launcher(name: str | None) -> bool:
    """Return whether a launcher is the user's: `package.module:name`, or a plug-in."""
    return name is not None and name.lower() not in LAUNCHERS and (":" in name or name in entry_points_of("launcher"))


def _switch(group: argparse._ArgumentGroup, *names: str, **more: Any) -> None:
    group.add_argument(*names, action="store_true", **more)


def _where(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hostfile", "-H", metavar="FILE", help=f"hosts, one `worker-0 slots=4` per line ({DEFAULT_HOSTFILE})"
    )
    group.add_argument("--include", "-i", metavar="HOSTS", help="only these slots: worker-0@worker-1:0,2")
    group.add_argument("--exclude", "-e", metavar="HOSTS", help="all slots except these; written like --include")
    group.add_argument("--num_nodes", type=int, metavar="N", help="the first N hosts of the hostfile")
    group.add_argument("--num_gpus", "--num_accelerators", type=int, metavar="N", help="GPUs 0 to N-1 of each host")
    group.add_argument("--nproc_per_node", metavar="N", help="ranks per host: a number, gpu, cpu or auto")
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
        type=_shell_words,
        metavar="WORDS",
        help="more arguments for ssh, pdsh, mpirun, srun, sbatch",
    )
    group.add_argument("--master_addr", metavar="HOST", help="address of rank 0; found automatically if absent")
    group.add_argument("--master_port", type=int, metavar="PORT", help="port of rank 0; a free one if absent")
    group.add_argument("--ssh_port", type=int, metavar="PORT", help="port of ssh on the hosts")
    _switch(group, "--force_multi", help="over ssh, even if the only host is this one")


def _script(group: argparse._ArgumentGroup) -> None:
    _switch(group, "--module", "-m", help="the script is a module, as in python -m")
    _switch(group, "--no_python", help="the script is a program of its own")
    _switch(group, "--pass_local_rank", help="give the script --local_rank=N, as deepspeed does")
    _switch(group, "--no_local_rank", "--use_env", help="the opposite, which is the default")
    group.add_argument(
        "--enable_each_rank_log", metavar="FOLDER", help="write the output of each rank into a file of its own"
    )
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
    _switch(group, "--elastic_training", help="restart when ranks or hosts fail, and when hosts come back")
    group.add_argument("--min_elastic_nodes", type=int, metavar="N", help="the fewest hosts (1)")
    group.add_argument("--max_elastic_nodes", type=int, metavar="N", help="the most hosts (all)")
    group.add_argument(
        "--max_restarts",
        type=int,
        metavar="N",
        help="the most restarts (100 with --elastic_training, else 0)",
    )
    _switch(group, "--standalone", help="a rendezvous of its own on this host")
    group.add_argument("--rdzv_backend", metavar="NAME", help="as of torchrun: c10d, etcd, static")
    group.add_argument("--rdzv_endpoint", metavar="HOST:PORT", help="as of torchrun")
    group.add_argument("--rdzv_id", metavar="ID", help="as of torchrun")
    group.add_argument("--rdzv_conf", metavar="KEY=VALUE,…", help="as of torchrun")


def _shell_words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The values of the flags. None: not given."""

    script: str = ""
    """Empty only with `preflight`, which needs none."""
    arguments: tuple[str, ...] = ()
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    nproc_per_node: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    master_port_by: str = "--master_port"
    """The flag or variable that set the port."""
    launcher: str | None = None
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    no_ssh_check: bool = False
    force_multi: bool = False
    module: bool = False
    no_python: bool = False
    pass_local_rank: bool = False
    save_pid: bool = False
    enable_each_rank_log: str | None = None
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    autotuning: str | None = None
    elastic_training: bool = False
    min_elastic_nodes: int | None = None
    max_elastic_nodes: int | None = None
    max_restarts: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    standalone: bool = False
    stop_grace: float = 30.0
    dry_run: bool = False
    preflight: bool = False


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Return the options on the command line. The script and what follows it are kept unchanged."""
    parser = flags()
    before, after = _split(argv, parser)
    given = vars(parser.parse_args(before))
    if not after and "preflight" not in given:
        raise WorldError("no script to launch; write `plait launch [flags] script.py [its arguments]`")
    if given.pop("no_local_rank", False) and "pass_local_rank" in given:
        raise WorldError("--no_local_rank and --pass_local_rank contradict each other; --no_local_rank is the default")
    options = LaunchOptions(after[0] if after else "", tuple(after[1:]), **given)
    _check(options)
    return options


def without(argv: Sequence[str], *names: str) -> list[str]:
    """Return the command line without some flags of the launcher."""
    before, after = _split(argv, flags())
    return [flag for flag in before if flag[2:].partition("=")[0] not in names] + ["--", *after]


def _split(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return (the launcher's flags, each as one word with its value; the script and everything after it)."""
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    before: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "--":
            break
        name, equals, value = _name(flag, known)
        if name not in known:
            _explain(name, rest, known)
        if known[name].nargs != 0 and not equals and rest:
            equals, value = "=", rest.pop(0)
        before.append(f"{name}{equals}{value}")
    return before, rest


def _name(flag: str, known: Mapping[str, object]) -> tuple[str, str, str]:
    """Return the parts of a flag: `--num-gpus=2` → `--num_gpus`, `=`, `2`; and `-Hfile` → `-H`, `=`, `file`."""
    name, equals, value = flag.partition("=")
    if not flag.startswith("--"):
        return (name, equals, value) if name in known or len(name) == 2 else (flag[:2], "=", flag[2:])
    return "--" + name[2:].replace("-", "_"), equals, value


def _explain(name: str, rest: Sequence[str], known: Iterable[str]) -> NoReturn:
    """Raise the error for an unknown flag before the script: it is misspelt, or one of the script's."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if close:
        raise WorldError(f"plait launch has no flag {name}; did you mean {close[0]}?")
    script = next((argument for argument in rest if argument.endswith(".py")), "script.py")
    raise WorldError(
        f"{name} is not a flag of plait launch. If it is the script's, write it after the script: "
        f"plait launch … {script} {name} …; `plait launch --help` lists the launcher's own"
    )


def _check(options: LaunchOptions) -> None:
    if options.module and options.no_python:
        raise WorldError("--module and --no_python contradict each other: a module is run by Python; give one of them")
    several = [name for name in ("num_gpus", "nproc_per_node") if getattr(options, name) is not None]
    if len(several) == 2 and str(options.num_gpus) != options.nproc_per_node:
        raise WorldError(
            f"--num_gpus {options.num_gpus} and --nproc_per_node {options.nproc_per_node} disagree; give one of them"
        )
    filters = options.include or options.exclude
    counts = [name for name in ("num_nodes", "num_gpus") if getattr(options, name) is not None]
    if filters and counts:
        raise WorldError(
            f"--{counts[0]} cannot be combined with --{'include' if options.include else 'exclude'} {filters!r}: "
            "both say which slots to use; give one of them"
        )
    if options.master_port is not None and not 0 < options.master_port < 1 << 16:
        raise WorldError(
            f"--master_port {options.master_port} is not a port that others can join: write one from 1 to 65535, or "
            "leave it out and a free one is taken"
        )
    for name in ("num_nodes", "num_gpus"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise WorldError(f"--{name} {value}: at least 1")
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise WorldError("--bind_core_list has no effect without --bind_cores_to_rank; add it")


def misplaced_flag(options: LaunchOptions) -> str | None:
    """Return a note about a launcher's flag among the script's arguments, or None. It may be the script's own."""
    ours = {flag for action in flags()._actions for flag in action.option_strings if flag.startswith("--")} - _COMMON
    names = (argument.partition("=")[0] for argument in options.arguments if argument.startswith("--"))
    name = next((name for name in names if "--" + name[2:].replace("-", "_") in ours), None)
    if name is None:
        return None
    return (
        f"{name} stands after {options.script}, so the script gets it; if it is meant for the launcher, "
        f"write it before: plait launch {name} … {options.script}"
    )


_COMMON = {"--help", "--module", "--include", "--exclude"}
"""Flags that are not noted, because many scripts have flags of these names."""
