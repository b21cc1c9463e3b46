"""`plait profile`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.cli.running import leave_if_stopped
from plait.cli.train import _check, _count
from plait.config import ProfileConfig, parse
from plait.errors import TrainingError
from plait.launch import launched_size, run_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from plait.runner import Report


_WIDTH = 132
"""Of the tables where no terminal says how wide it is."""


def profile(config: str, overrides: Sequence[str], *, steps: int | None, nproc: str, out: str | None) -> None:
    """Run a few steps, record them, and show where their time and memory went; nothing is saved."""
    # torch's tracer otherwise writes lines of its own between the tables. It reads this when it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    given = parse(config, overrides).config
    folder = out or (given.profile or ProfileConfig()).folder or f"{given.work_dir.rstrip('/')}-profile"
    words = [*overrides, f"work_dir={folder}", f"profile.folder={folder}", *_without_saving(given)]
    if steps is not None:
        words.append(f"profile.steps={steps}")
    wanted = parse(config, words).config.profile
    assert wanted is not None
    last = wanted.start + wanted.steps - 1
    if given.train.max_steps is not None and given.train.max_steps < last:
        words.append(f"train.max_steps={last}")
    count = _count(nproc)
    _check(parse(config, words), launched_size() or count)
    if count > 1:
        command = [sys.executable, "-m", "plait", "profile", config, *overrides]
        command += ["--out", folder, *([] if steps is None else ["--steps", str(steps)])]
        sys.exit(run_ranks(command, count))
    _run(config, words, wanted)


def _without_saving(given: Any) -> list[str]:
    words = ["checkpoint.last=false"]
    if given.checkpoint.every is not None:
        words.append("checkpoint.every=null")
    return words


def _run(config: str, words: Sequence[str], wanted: ProfileConfig) -> None:
    from plait.cli.here import import_from_here
    from plait.runner import Profile, Runner

    import_from_here()
    hook = Profile(wanted, then_stop=True)
    with Runner.from_config(config, [*words, "profile=null"], hooks=[hook]) as runner:
        runner.train()
        leave_if_stopped(runner)
        if runner.world.is_main:
            if hook.report is None:
                raise TrainingError(hook.too_short(runner.step))
            _show(hook.report, str(wanted.folder))


def _show(report: Report, folder: str) -> None:
    from rich.console import Console

    from plait.runner import grids, headline

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    axes = ", ".join(f"{axis} {size}" for axis, size in report.layout.items()) or "one process"
    console.print(f"\n[bold]{report.title}[/] on {len(report.ranks)} × {report.device_name}: {axes}")
    for what, value, note in headline(report):
        console.print(f"  {what:<13}{value}{f'  ({note})' if note else ''}", markup=False)
    for grid in grids(report):
        _print(console, grid)
    console.print(f"\n{folder}: profile.html, step.svg, profile.json, {', '.join(report.traces)}", markup=False)


def _print(console: Console, grid: Any) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, head in enumerate(grid.heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=True)
    for number, row in enumerate(grid.rows):
        table.add_row(*row, style="bold" if grid.last_is_sum and number == len(grid.rows) - 1 else None)
    console.print(f"\n[bold]{grid.title}[/]")
    console.print(table)
    if grid.note:
        console.print(grid.note, style="dim", markup=False)
