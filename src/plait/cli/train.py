"""`plait train`, the phases after pretraining, and `plait profile`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from plait.cli.files import import_from_here
from plait.config import (
    CUSTOM_HOOKS,
    AccuracyConfig,
    CustomMetric,
    EarlyStopConfig,
    Parsed,
    ProfileConfig,
    check,
    check_complete,
    check_graphs,
    describe,
    listed,
    missing_paths,
    missing_start_paths,
    origin_of,
    parse,
    resolve_batch,
    resolve_layout,
    show,
    whole_number,
)
from plait.errors import ConfigError, Problem, TrainingError
from plait.launch import (
    LEAK_REMEDY,
    Machines,
    Phase,
    gpu_count,
    growth_text,
    launched_rank,
    launched_size,
    restart_with_smaller_batches,
    run_on_host,
    run_on_machine,
    run_ranks,
)
from plait.monitor import report_progress

if TYPE_CHECKING:
    from rich.console import Console

    from plait.profile import Report
    from plait.trainer import Runner

# Common to all commands that train: the restart with smaller micro-batches if memory runs out, and exit codes.


def train_with(runner: Runner, argv: Sequence[str]) -> None:
    """Train. `argv` is the command line of this process without the program's name, to restart it.

    If a signal stopped the run, print how to resume it, and exit with 128 plus the signal's number, so that a script
    does not take it for a finished run.
    """
    with _smaller_if_full(runner, argv):
        runner.train()
    leave_if_stopped(runner)


def leave_if_stopped(runner: Runner) -> None:
    """Exit if a signal has stopped the run. Every rank must call it."""
    from plait.trainer import STOPPED

    # Ranks wait for each other here, as some launchers end the others when one exits with such a code.
    if not runner.stopping() or (code := STOPPED.get(str(runner.stop_reason))) is None:
        return
    if runner.config.checkpoint.last and runner.world.is_main:
        typer.echo("to resume: the same command with `checkpoint.resume=auto`")
    runner.enter(Phase.LEFT)
    sys.exit(code)


@contextmanager
def _smaller_if_full(runner: Runner, argv: Sequence[str]) -> Iterator[None]:
    """If a run of one process runs out of memory in a step, restart it with smaller micro-batches.

    For runs of several ranks, the launcher does this.
    """
    from torch import OutOfMemoryError

    try:
        yield
        return
    except OutOfMemoryError as error:
        phase = runner.world.heartbeat.phase
        # Without a launcher, the phases within a step are not reported: the phase is then `idle` in all of them.
        if launched_size() is not None or not (phase.has_batches or phase is Phase.IDLE):
            raise
        if (steps := runner.step_memory.growth) is not None:
            error.add_note(f"plait: {growth_text(steps)}. {LEAK_REMEDY}.")
            raise
        ranks, reason = runner.world.ranks, str(error).partition(".")[0]
    runner.close()
    command = [sys.executable, "-m", "plait", *argv]
    restart_with_smaller_batches(command, attempt=ranks.attempt, split=ranks.split, why=reason)


def train(
    config: str,
    overrides: Sequence[str],
    *,
    nproc: str | None,
    dry_run: bool,
    accelerate_config: str | None = None,
) -> None:
    """Check everything that can be checked, then start the ranks, or run as one of them.

    The settings of an `accelerate` YAML override the file, and are overridden by `overrides`.
    """
    machines = None
    if accelerate_config is not None:
        settings, wanted, machines = _accelerated(accelerate_config, launched=launched_size() is not None)
        overrides = [*settings, *overrides]
        nproc = nproc or wanted
    parsed = parse(config, overrides)
    count = _count(nproc or "1")
    if machines is not None:
        _refuse_search_on_machines(parsed)
    if parsed.config.strategy.auto and launched_size() is None:
        overrides = [*overrides, *_search_strategy(config, overrides, count)]
        parsed = parse(config, overrides)
    if parsed.config.strategy.offload.ratio == "auto" and launched_size() is None:
        overrides = [*overrides, *_search_offload_ratio(config, overrides, count)]
        parsed = parse(config, overrides)
    _check(parsed, launched_size() or count * (1 if machines is None else machines.count))
    _check_metrics(parsed)
    if dry_run:
        _show(parsed)
    elif machines is not None:
        sys.exit(run_on_machine(_command(config, overrides), count, machines))
    elif count > 1:
        sys.exit(run_on_host(_command(config, overrides), count))
    else:
        report_progress(parsed.config.log, launched_rank(), "loading PyTorch")
        _run(config, overrides)


def _command(config: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "plait", "train", config, *overrides]


def _refuse_search_on_machines(parsed: Parsed) -> None:
    """Raise an error for a search on several machines: each would search separately, with its own result."""
    asked = {"strategy.auto": parsed.config.strategy.auto}
    asked["strategy.offload.ratio"] = parsed.config.strategy.offload.ratio == "auto"
    remedy = "Write what `plait plan --search` shows."
    if wrong := [key for key, value in asked.items() if value]:
        raise ConfigError([Problem(key, "auto does not support several machines", remedy) for key in wrong])


def _search_strategy(config: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """Return the settings of the fastest strategy, for `strategy: auto`."""
    from plait.plan import best_settings, run_forked

    asked = [*overrides, "strategy.auto=false"]
    wanted = parse(config, asked).config
    best = run_forked(lambda: best_settings(wanted, ranks), seconds=600.0)
    if isinstance(best, str):
        raise ConfigError(Problem("strategy.auto", f"no strategy was found: {best}", "Write a strategy."))
    settings, summary = best
    print(f"strategy: auto takes {' '.join(settings) or 'the run as written'} ({summary})")
    return ["strategy.auto=false", *settings]


def _search_offload_ratio(config: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """Return the setting for `strategy.offload.ratio: auto`."""
    from plait.plan import best_ratio, run_forked

    wanted = parse(config, overrides).config
    best = run_forked(lambda: best_ratio(wanted, ranks), seconds=600.0)
    if isinstance(best, str):
        message = f"auto: could not choose a value automatically: {best}"
        raise ConfigError(Problem("strategy.offload.ratio", message, "Write a number from 0 to 1."))
    print(f"strategy.offload.ratio: auto takes {best[0].partition('=')[2]}")
    return best


def _accelerated(path: str, *, launched: bool) -> tuple[list[str], str | None, Machines | None]:
    """Return the meaning of an `accelerate` YAML: overrides, processes per machine, and the machines if several.

    With `launched`, this process is a rank: its launcher has already decided the processes and machines.
    """
    from plait.config import read
    from plait.frontends.accelerate import as_overrides, machines, processes, translate

    translation = translate(path)
    if not launched:
        print(
            f"{path}: {translation.report.summary()}", *(f"  {line}" for line in translation.report.lines()), sep="\n"
        )
    translation.report.raise_refusals()
    config = read(path)
    count = processes(config)
    where = None if launched else machines(config)
    return as_overrides(translation.sections), None if count is None else str(count), where


def _count(nproc: str) -> int:
    if nproc == "gpu":
        if count := gpu_count():
            return count
        raise ConfigError(Problem("--nproc", "'gpu', but no GPU is visible", "Write a number from 1."))
    if ranks := whole_number(nproc):
        return ranks
    raise ConfigError(
        Problem("--nproc", f"{show(nproc)} is not a number of processes", "Write a number from 1, or gpu.")
    )


def _check(parsed: Parsed, ranks: int) -> None:
    check_complete(parsed, require_length=True)
    config = parsed.config
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    pipeline = config.strategy.pipeline
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)
    check_graphs(config, ranks=ranks, accumulation=batch.accumulation)
    if layout.pp > 1:
        # Imported here, as it loads torch, which the launcher otherwise does not need.
        from plait.distributed import check_pipeline

        check_pipeline(pipeline, layout.pp, batch.accumulation)


def _check_metrics(parsed: Parsed) -> None:
    """Check the names of metrics, unless a custom hook or metric may add others."""
    config = parsed.config
    if config.phase is not None or any(
        isinstance(section, (*CUSTOM_HOOKS, CustomMetric)) for section in (*config.hooks, *config.metrics)
    ):
        return
    measured = [
        "loss",
        *(f"{section.prefix}/top{section.top}" for section in config.metrics if isinstance(section, AccuracyConfig)),
    ]
    named = {
        f"hooks.{at}.metric": section.metric
        for at, section in enumerate(config.hooks)
        if isinstance(section, EarlyStopConfig)
    }
    if config.checkpoint.best is not None:
        named["checkpoint.best.metric"] = config.checkpoint.best.metric
    if wrong := [key for key, metric in named.items() if metric not in measured]:
        remedy = f"Write {listed(f'`{name}`' for name in measured)}; the section `metrics` says what is measured."
        origins = parsed.origins
        raise ConfigError(
            [Problem(key, f"{named[key]!r} is not measured", remedy, origins.get(key, "")) for key in wrong]
        )


def _show(parsed: Parsed) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", no_wrap=True)
    settings = describe(parsed)
    for path, value, origin in settings:
        row = (Text(cell) for cell in (path, _written(value), origin))  # as Text, so that `[…]` is not read as markup
        table.add_row(*row, style="dim" if origin == "default" else None)
    console = Console()
    narrowest = max(len(path) for path, *_ in settings) + max(len(origin) for *_, origin in settings) + 40
    console.width = max(console.width, narrowest)  # on a narrower screen, and in a pipe, keys would be truncated
    console.print(table, soft_wrap=True)


def _written(value: object) -> str:
    """Return the text of a value as in a configuration file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return show(value) if value is None or isinstance(value, bool) else str(value)


def _run(config: str, overrides: Sequence[str]) -> None:
    from plait.trainer import Runner

    import_from_here()
    with Runner.from_config(config, overrides) as runner:
        train_with(runner, ["train", config, *overrides])


# `plait sft`, `plait reward`, `plait dpo`, `plait ppo` and `plait grpo`.


def run_phase(phase: str, config: str, overrides: Sequence[str], *, nproc: str, dry_run: bool) -> None:
    """Check everything that can be checked, then start the ranks, or run as one of them."""
    parsed = parse(config, [*overrides, f"phase={phase}"])
    count = _count(nproc)
    _check_phase(parsed, launched_size() or count)
    if dry_run:
        _show(parsed)
        return
    _look_for_files(parsed)
    if count > 1:
        command = [sys.executable, "-m", "plait", phase, config, *overrides]
        sys.exit(run_on_host(command, count))
    else:
        report_progress(parsed.config.log, launched_rank(), "loading PyTorch")
        _run_phase(parsed, [phase, config, *overrides])


def _check_phase(parsed: Parsed, ranks: int) -> None:
    config = parsed.config
    check(config, has_val=True, require_length=True, origins=parsed.origins)
    if config.model is None:
        raise ConfigError(Problem("model", "it is missing", "Add a section `model` with a `type`."))
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)


def _look_for_files(parsed: Parsed) -> None:
    """Raise an error for missing files. Not called in a dry run: earlier phases may not have written them yet."""
    if missing := [*missing_paths(parsed.config), *missing_start_paths(parsed.config)]:
        raise ConfigError([replace(problem, origin=origin_of(problem.path, parsed.origins)) for problem in missing])


def _run_phase(parsed: Parsed, argv: Sequence[str]) -> None:
    from plait.posttrain import make_runner

    import_from_here()
    with make_runner(parsed) as runner:
        train_with(runner, argv)


# `plait profile`.


_WIDTH = 132
"""The width of tables in a pipe."""


def profile(config: str, overrides: Sequence[str], *, steps: int | None, nproc: str, out: str | None) -> None:
    """Run a few steps, record them, and show where their time and memory went; nothing is saved."""
    # Otherwise torch's tracer prints log lines between the tables. It reads the variable when it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    given = parse(config, overrides).config
    folder = out or (given.profile or ProfileConfig()).folder or f"{given.work_dir.rstrip('/')}-profile"
    settings = [*overrides, f"work_dir={folder}", f"profile.folder={folder}", *_without_saving(given)]
    if steps is not None:
        settings.append(f"profile.steps={steps}")
    wanted = parse(config, settings).config.profile
    assert wanted is not None
    last = wanted.start + wanted.steps - 1
    if given.train.max_steps is not None and given.train.max_steps < last:
        settings.append(f"train.max_steps={last}")
    count = _count(nproc)
    _check(parse(config, settings), launched_size() or count)
    if count > 1:
        command = [sys.executable, "-m", "plait", "profile", config, *overrides]
        command += ["--out", folder, *([] if steps is None else ["--steps", str(steps)])]
        sys.exit(run_ranks(command, count))
    _run_profile(config, settings, wanted)


def _without_saving(given: Any) -> list[str]:
    settings = ["checkpoint.last=false"]
    if given.checkpoint.every is not None:
        settings.append("checkpoint.every=null")
    return settings


def _run_profile(config: str, settings: Sequence[str], wanted: ProfileConfig) -> None:
    from plait.profile import Profile
    from plait.trainer import Runner

    import_from_here()
    hook = Profile(wanted, then_stop=True)
    with Runner.from_config(config, [*settings, "profile=null"], hooks=[hook]) as runner:
        runner.train()
        leave_if_stopped(runner)
        if runner.world.is_main:
            if hook.report is None:
                raise TrainingError(hook.too_short(runner.step))
            _show_profile(hook.report, str(wanted.folder))


def _show_profile(report: Report, folder: str) -> None:
    from rich.console import Console

    from plait.profile import grids, headline

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    axes = ", ".join(f"{axis} {size}" for axis, size in report.layout.items()) or "one process"
    console.print(f"\n[bold]{report.title}[/] on {len(report.ranks)} × {report.device_name}: {axes}")
    for what, value, remark in headline(report):
        console.print(f"  {what:<13}{value}{f'  ({remark})' if remark else ''}", markup=False)
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
    if grid.remark:
        console.print(grid.remark, style="dim", markup=False)
