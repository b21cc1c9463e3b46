"""The flags of `plait launch`: those of `deepspeed` and of torchrun, by their own names.

Flags stand before the script, its own arguments after it; a flag on the wrong side is recognised and explained.
`-` and `_` inside a flag mean the same.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from plait.errors import WorldError
from plait.launch.flags import flags


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for. None: nothing was said."""

    script: str = ""
    """Empty only where none is needed: with `preflight`."""
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
    """Which flag or variable named the port."""
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


def parse_options(words: Sequence[str]) -> Options:
    """Read the command line. What comes from the script on is kept as it is."""
    parser = flags()
    before, after = _split(words, parser)
    given = vars(parser.parse_args(before))
    if not after and "preflight" not in given:
        raise WorldError("no script to launch; write `plait launch [flags] script.py [its arguments]`")
    if given.pop("no_local_rank", False) and "pass_local_rank" in given:
        raise WorldError("--no_local_rank and --pass_local_rank contradict each other; --no_local_rank is the default")
    options = Options(after[0] if after else "", tuple(after[1:]), **given)
    _check(options)
    return options


def without(words: Sequence[str], *names: str) -> list[str]:
    """The same command line, less some flags of the launcher."""
    before, after = _split(words, flags())
    return [word for word in before if word[2:].partition("=")[0] not in names] + ["--", *after]


def _split(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The launcher's flags, each as one word with its value, and the rest from the script on."""
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    before: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = _name(word, known)
        if name not in known:
            _explain(name, rest, known)
        if known[name].nargs != 0 and not equals and rest:
            equals, value = "=", rest.pop(0)
        before.append(f"{name}{equals}{value}")
    return before, rest


def _name(word: str, known: Mapping[str, object]) -> tuple[str, str, str]:
    """`--num-gpus=2` → `--num_gpus`, `=`, `2`; and `-Hfile` → `-H`, `=`, `file`."""
    name, equals, value = word.partition("=")
    if not word.startswith("--"):
        return (name, equals, value) if name in known or len(name) == 2 else (word[:2], "=", word[2:])
    return "--" + name[2:].replace("-", "_"), equals, value


def _explain(name: str, words: Sequence[str], known: Iterable[str]) -> NoReturn:
    """A flag before the script that is none of ours: misspelt, or the script's."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if close:
        raise WorldError(f"plait launch has no flag {name}; did you mean {close[0]}?")
    script = next((word for word in words if word.endswith(".py")), "script.py")
    raise WorldError(
        f"{name} is no flag of plait launch. If it is the script's, write it after the script: "
        f"plait launch … {script} {name} …; `plait launch --help` lists the launcher's own"
    )


def _check(options: Options) -> None:
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


def misplaced(options: Options) -> str | None:
    """Flags of the launcher among the script's arguments. They may be its own, so this is a note and no error."""
    ours = {flag for action in flags()._actions for flag in action.option_strings if flag.startswith("--")} - _COMMON
    names = (word.partition("=")[0] for word in options.arguments if word.startswith("--"))
    name = next((name for name in names if "--" + name[2:].replace("-", "_") in ours), None)
    if name is None:
        return None
    return (
        f"{name} stands after {options.script}, so the script gets it; if it is meant for the launcher, "
        f"write it before: plait launch {name} … {options.script}"
    )


_COMMON = {"--help", "--module", "--include", "--exclude"}
"""Words that scripts often have for themselves."""
