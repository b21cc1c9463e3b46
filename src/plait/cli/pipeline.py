"""`plait pipeline`: runs several phases one after another, each in its own processes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from plait.cli.files import import_from_here
from plait.cli.train import _count
from plait.config import SUFFIXES
from plait.errors import ConfigError, Problem
from plait.launch import run_on_host

if TYPE_CHECKING:
    from plait.posttrain import PhaseStep, Start

HELP = """usage: plait pipeline FILE… [key=value…] [options]
       plait pipeline --step 1 2 3 --actor-model FOLDER [options]

Run several phases one after another; each begins with the result of the one before. A complete step is not run again,
and an interrupted one resumes: to resume, give the same command again.

  FILE                  a file with `steps`, or a run description for each step, in order
  key=value             settings for every step, as dotted keys: optim.lr=3e-4

  --nproc N, -n N       processes on this machine: a number, or gpu for one per GPU
  --hostfile FILE       run every step on these hosts, as `plait launch --hostfile FILE` does
  --dry-run             check everything and show the steps; start nothing
  --trust-code          run code that stored files name (trust_code=true for every step)

  --step 1 2 3          which steps; without files 1 is sft, 2 is reward, 3 is ppo
  --deployment-type T   single_gpu, single_node (--nproc gpu) or multi_node (needs --hostfile)
  --actor-model DIR     the model that is tuned, in all steps but the reward model's
  --reward-model DIR    the model that judges; absent: it begins with the tuned one
  --actor-zero-stage N  strategy.zero of steps 1 and 3
  --reward-zero-stage N strategy.zero of step 2
  --output-dir DIR      folder above those of the steps

Flags of DeepSpeed-Chat's main.py (--data_path, --max_seq_len, …) are settings for every step."""

_ONE = ("nproc", "hostfile")
_NONE = ("dry_run",)
_WIDTH = 150
"""Width of tables. A narrow terminal wraps their rows, which is easier to read than truncated columns."""


@dataclass
class PipelineCommand:
    """The arguments of the command, sorted by kind."""

    files: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    """Values of `_ONE` and `_NONE` by name, without dashes."""
    step_flags: list[str] = field(default_factory=list)
    """Flags of DeepSpeed-Chat's `train.py`."""
    flags: list[str] = field(default_factory=list)
    """Flags of DeepSpeed-Chat's `main.py`."""


def pipeline(argv: Sequence[str]) -> None:
    """Check all steps, run those that are not complete, and show their results; exit with the code of a failed step."""
    if not argv or {"-h", "--help"} & set(argv):
        typer.echo(HELP)
        return
    arguments = sort_arguments(argv)
    import_from_here()
    ranks, local, start = _ranks_and_start(arguments)
    steps = _steps(arguments, ranks, local)
    if "dry_run" in arguments.options:
        _show(steps)
        return
    from plait.posttrain import run_steps

    code = run_steps(steps, start, typer.echo)
    _show(steps)
    if code != 0:
        typer.echo(f"to resume: plait pipeline {shlex.join(argv)}")
        sys.exit(code)


def sort_arguments(argv: Sequence[str]) -> PipelineCommand:
    """Return files, settings and flags among the arguments. A flag takes the values up to the next flag or setting."""
    from plait.config import nearest
    from plait.frontends.deepspeed import chat

    arguments = PipelineCommand()
    flag_list: list[str] = []
    last, values_left = "", 0  # the option of `_ONE` that still needs its value; how many values the flag may take
    for argument in argv:
        if argument.startswith("-") and not _is_number(argument):
            flag, equals, value = _long(argument).partition("=")
            name = flag[2:].replace("-", "_")
            if name == "trust_code":
                arguments.overrides.append("trust_code=true")
                continue
            if name in (*_ONE, *_NONE):
                arguments.options[name] = value
                last, values_left = name, int(name in _ONE and not equals)
                continue
            if name not in chat.TRAIN_FLAGS and name not in chat.FLAGS:
                meant = nearest(name, (*_ONE, *_NONE, "trust_code", *chat.TRAIN_FLAGS, *chat.FLAGS))
                remedy = f"Did you mean `--{meant}`? " if meant else ""
                raise ConfigError(Problem(flag, "unknown flag", f"{remedy}`plait pipeline --help` lists them."))
            flag_list = arguments.step_flags if name in chat.TRAIN_FLAGS else arguments.flags
            values_left = 0 if equals else 1 if name in chat.TRAIN_FLAGS and name != "step" else 1 << 30
            flag_list.append(argument)
            last = ""
        elif _is_setting(argument):
            arguments.overrides.append(argument)
            values_left = 0
        elif values_left:
            values_left -= 1
            if last:
                arguments.options[last] = argument
            else:
                flag_list.append(argument)
        elif Path(argument).suffix.lower() in SUFFIXES:
            arguments.files.append(argument)
        else:
            remedy = f"Files end in {', '.join(SUFFIXES)}; settings are `key=value`."
            raise ConfigError(Problem(argument, "is neither a file nor a setting", remedy))
    for name in _ONE:
        if arguments.options.get(name) == "":
            raise ConfigError(Problem(f"--{name}", "missing value", f"Write `--{name} VALUE`."))
    return arguments


def _long(argument: str) -> str:
    """Return the long form of `-n`: `--nproc`, with the value if it has one (`-n2`, `-n=2`). Keep other arguments."""
    if not argument.startswith("-n") or argument.startswith("--"):
        return argument
    value = argument[2:].removeprefix("=")
    return f"--nproc={value}" if value else "--nproc"


def _is_setting(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return bool(equals) and all(name.isidentifier() or name.isdecimal() for name in key.split("."))


def _is_number(argument: str) -> bool:
    return argument[1:2].isdecimal()


def _ranks_and_start(arguments: PipelineCommand) -> tuple[int, int, Start]:
    """Return the number of ranks, the number per host, and the function that starts them."""
    from plait.frontends.deepspeed import chat

    steps = chat.read_steps(arguments.step_flags)
    nproc, hostfile = arguments.options.get("nproc"), arguments.options.get("hostfile")
    has_deployment = any(
        argument.startswith(("--deployment-type", "--deployment_type")) for argument in arguments.step_flags
    )
    if nproc is not None and hostfile is not None:
        raise ConfigError(Problem("--nproc", "the hostfile sets the number of processes", "Give one of them."))
    if has_deployment and steps.nproc is None and hostfile is None:
        raise ConfigError(Problem("--deployment-type", "multi_node needs hosts", "Add `--hostfile FILE`."))
    if has_deployment and steps.nproc is not None and (hostfile is not None or nproc not in (None, steps.nproc)):
        other = f"--hostfile {hostfile}" if hostfile is not None else f"--nproc {nproc}"
        message = f"{steps.deployment} and {other} disagree"
        raise ConfigError(Problem("--deployment-type", message, "Give one of them."))
    if hostfile is None:
        count = _count(nproc or (steps.nproc if has_deployment else None) or "1")
        return count, count, lambda command: run_on_host([sys.executable, "-m", "plait", *command], count)
    from plait.launch import read_hostfile

    slots = [len(host_slots) for host_slots in read_hostfile(Path(hostfile)).values()]
    return sum(slots), max(slots), lambda command: _on_hosts(hostfile, command)


def _on_hosts(hostfile: str, command: list[str]) -> int:
    from plait.cli.launch import launch

    try:
        launch(["--hostfile", hostfile, "--module", "plait", *command])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _steps(arguments: PipelineCommand, ranks: int, local: int) -> list[PhaseStep]:
    from dataclasses import replace

    from plait.frontends.deepspeed import chat
    from plait.posttrain import as_overrides, from_files, make_steps

    flags = chat.read_steps(arguments.step_flags)
    given = [
        argument[2:].partition("=")[0].replace("-", "_")
        for argument in arguments.step_flags
        if argument.startswith("--")
    ]
    settings, remarks = chat.translate(arguments.flags)
    for remark in remarks:
        typer.echo(remark, err=True)
    pipeline_steps = from_files(arguments.files) if arguments.files else chat.steps_of_flags(flags)
    pipeline_steps = chat.with_train_flags(pipeline_steps, flags, given)
    common = (*as_overrides(settings), *arguments.overrides)
    steps = tuple(replace(step, settings=(*step.settings, *common)) for step in pipeline_steps.steps)
    return make_steps(replace(pipeline_steps, steps=steps), ranks=ranks, local_ranks=local)


def _show(steps: Sequence[PhaseStep]) -> None:
    """Print a row for each step: its state, figures and result folder."""
    from rich.console import Console
    from rich.table import Table

    from plait.posttrain import next_commands, outcome_of

    table = Table("step", "phase", "state", "time", "figures", "begins with", "result", box=None, pad_edge=False)
    for step in steps:
        outcome = outcome_of(step)
        before = ", ".join(earlier.phase for earlier in step.after) or "its model"
        state = outcome.state.value if step.chosen else f"{outcome.state.value}, not asked for"
        table.add_row(str(step.number), step.phase, state, outcome.time, outcome.figures, before, str(step.folder))
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for command in next_commands(steps):
        typer.echo(command)
