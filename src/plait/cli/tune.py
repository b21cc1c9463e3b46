"""`plait tune`: find the fastest settings of a run by short runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from plait.cli.columns import as_columns, wide_console
from plait.cli.files import import_from_here
from plait.config import RunConfig, counted, parse, read, show, split_override
from plait.errors import ConfigError, Problem
from plait.plan import Candidate
from plait.tune import RankCandidates, Tuned, make_tune_config, rank_by_rule, tune

_ROWS = 20
"""The number of trials that the table shows; the files have all."""


def search(
    config: str,
    overrides: Sequence[str],
    *,
    options: Mapping[str, Any],
    space: Sequence[str] = (),
    settings: str | None = None,
    out: str | None = None,
    fresh: bool = False,
    then_train: bool = False,
    rank: RankCandidates | None = None,
) -> None:
    """Search, and print the result. The settings of the file `settings` are overridden by `options` and `space`.

    Options that are None are not set. With `then_train`, train with the best settings afterwards.
    """
    given = dict(read(settings)) if settings is not None else {}
    typed = {key: value for key, value in options.items() if value is not None}
    given |= typed
    if space:
        given["space"] = {**given.get("space", {}), **dict(_values(text) for text in space)}
    try:
        wanted = make_tune_config(given, origin=Path(settings).name if settings else "")
    except ConfigError as error:
        raise ConfigError(
            [_as_typed(problem) if problem.path in typed else problem for problem in error.problems]
        ) from None
    folder = out or f"{parse(config, overrides).config.work_dir.rstrip('/')}-tune"
    console = wide_console()
    import_from_here()
    try:
        tuned = tune(
            config,
            overrides,
            wanted,
            out=folder,
            rank=rank or _by_plan(wanted.nproc),
            fresh=fresh,
            log=_printer(console),
        )
    except KeyboardInterrupt:
        console.print(f"\nstopped; the same command resumes from {folder}", markup=False)
        sys.exit(130)
    _show(tuned, parse(config, overrides).config, wanted.nproc, console)
    if then_train:
        from plait.cli.train import train

        train(str(tuned.best_path), [], nproc=str(wanted.nproc), dry_run=False)


def _printer(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False)


def _as_typed(problem: Problem) -> Problem:
    """Return the problem with the option's name in place of the setting's: the setting was given as an option."""
    return replace(problem, path=f"--{problem.path.replace('_', '-')}", origin="")


def _values(text: str) -> tuple[str, list[Any]]:
    """Return the key and the values to try in a text such as `strategy.zero=[0, 3]`."""
    keys, values = split_override(text)
    if not isinstance(values, list):
        remedy = f"Write `--space '{'.'.join(keys)}=[{show(values)}, …]'`."
        raise ConfigError(Problem("--space", f"{text!r} has one value, expected a list", remedy))
    return ".".join(keys), values


def _show(tuned: Tuned, run: RunConfig, ranks: int, console: Console) -> None:
    tried = [trial for trial in tuned.records if trial.was_run]
    ordered = sorted(tried, key=lambda trial: (trial.value is None, -(trial.value or 0.0)))
    shown = ordered[:_ROWS]
    columns = as_columns(run, [Candidate(trial.settings) for trial in shown], ranks)
    table = Table(*(Column(title, no_wrap=True) for title in columns), box=None, pad_edge=False, header_style="bold")
    for title in ("tokens/s", "samples/s", "s/step", "MiB"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for index, record in enumerate(shown):
        outcome = record.outcome
        figures = (outcome.tokens_per_s, outcome.samples_per_s, outcome.step_time, outcome.memory_mib)
        cells = ["" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in figures]
        remarks = ["best"] if record is tuned.best else []
        remarks += [f"{outcome.status}: {outcome.reason}"] if outcome.reason else []
        remarks += [] if record.settings else ["as written"]
        table.add_row(*(column[index] for column in columns.values()), *cells, ", ".join(remarks))
    console.print(table)
    refused = len(tuned.records) - len(tried)
    counts = f"{counted(len(tried), 'trial')}, {counted(refused, 'setting')} refused before the start"
    console.print(f"{counts}; ended: {tuned.why}", markup=False)
    console.print(f"{tuned.best_path} has the best settings; results.csv beside it has all of them", markup=False)


def _by_plan(ranks: int) -> RankCandidates:
    """Return a function that orders trials by the plan's estimates, or by a rule of thumb if there are none."""

    def rank(run: RunConfig, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        from plait.plan import hardware_here, order_by_estimate, run_forked

        def order() -> list[Candidate]:
            return order_by_estimate(run, candidates, hardware_here(run.device), ranks)

        ordered = run_forked(order, seconds=300.0)
        if isinstance(ordered, str):
            print(f"plait: no plan orders the trials, a rule of thumb does: {ordered}", file=sys.stderr, flush=True)
            return rank_by_rule(run, candidates)
        return ordered

    return rank
