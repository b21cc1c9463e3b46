"""`plait train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from plait.cli.running import train_with
from plait.config import (
    OWN_HOOK,
    AccuracyConfig,
    EarlyStopConfig,
    MetricPart,
    Parsed,
    check_complete,
    check_graphs,
    describe,
    listed,
    parse,
    resolve_batch,
    resolve_layout,
    show,
    whole_number,
)
from plait.errors import ConfigError, Problem
from plait.launch import Machines, gpu_count, launched_rank, launched_size, run_here, run_share
from plait.monitor import report_progress


def train(
    config: str,
    overrides: Sequence[str],
    *,
    nproc: str | None,
    dry_run: bool,
    accelerate_config: str | None = None,
) -> None:
    """Check everything that can be checked, then start the ranks, or be one of them.

    The settings of an `accelerate` YAML stand over the file, and below the overrides.
    """
    machines = None
    if accelerate_config is not None:
        settings, wanted, machines = _accelerated(accelerate_config, launched=launched_size() is not None)
        overrides = [*settings, *overrides]
        nproc = nproc or wanted
    parsed = parse(config, overrides)
    count = _count(nproc or "1")
    if machines is not None:
        _check_found_alike(parsed)
    if parsed.config.strategy.auto and launched_size() is None:
        overrides = [*overrides, *_found(config, overrides, count)]
        parsed = parse(config, overrides)
    if parsed.config.strategy.offload.ratio == "auto" and launched_size() is None:
        overrides = [*overrides, *_shared(config, overrides, count)]
        parsed = parse(config, overrides)
    _check(parsed, launched_size() or count * (1 if machines is None else machines.count))
    _check_metrics(parsed)
    if dry_run:
        _show(parsed)
    elif machines is not None:
        sys.exit(run_share(_command(config, overrides), count, machines))
    elif count > 1:
        sys.exit(run_here(_command(config, overrides), count))
    else:
        report_progress(parsed.config.log, launched_rank(), "loading PyTorch")
        _run(config, overrides)


def _command(config: str, overrides: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "plait", "train", config, *overrides]


def _check_found_alike(parsed: Parsed) -> None:
    """On several machines, each would look for itself, and find what is best there."""
    asked = {"strategy.auto": parsed.config.strategy.auto}
    asked["strategy.offload.ratio"] = parsed.config.strategy.offload.ratio == "auto"
    remedy = "Write what `plait plan --search` shows."
    if wrong := [key for key, value in asked.items() if value]:
        raise ConfigError([Problem(key, "auto is not offered for num_machines from 2", remedy) for key in wrong])


def _found(config: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """The settings of the fastest way to spread the run, for `strategy: auto`."""
    from plait.plan import best_settings, in_a_child

    asked = [*overrides, "strategy.auto=false"]
    wanted = parse(config, asked).config
    found = in_a_child(lambda: best_settings(wanted, ranks), seconds=600.0)
    if isinstance(found, str):
        raise ConfigError(Problem("strategy.auto", f"no way was found: {found}", "Write a strategy."))
    settings, words = found
    print(f"strategy: auto takes {' '.join(settings) or 'the run as it is written'} ({words})")
    return ["strategy.auto=false", *settings]


def _shared(config: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """A number for `strategy.offload.ratio: auto`."""
    from plait.plan import best_ratio, in_a_child

    wanted = parse(config, overrides).config
    found = in_a_child(lambda: best_ratio(wanted, ranks), seconds=600.0)
    if isinstance(found, str):
        raise ConfigError(Problem("strategy.offload.ratio", f"auto, but {found}", "Write a number from 0 to 1."))
    print(f"strategy.offload.ratio: auto takes {found[0].partition('=')[2]}")
    return found


def _accelerated(path: str, *, launched: bool) -> tuple[list[str], str | None, Machines | None]:
    """What an `accelerate` YAML stands for: settings, as overrides; processes on each machine; several machines.

    Who was `launched` already has its ranks from there.
    """
    from plait.config import read
    from plait.frontends.accelerate import as_overrides, machines, processes, translate

    found = translate(path)
    if not launched:
        print(f"{path}: {found.account.summary()}", *(f"  {line}" for line in found.account.lines()), sep="\n")
    found.account.raise_refusals()
    config = read(path)
    count = processes(config)
    where = None if launched else machines(config)
    return as_overrides(found.sections), None if count is None else str(count), where


def _count(nproc: str) -> int:
    if nproc == "gpu":
        if count := gpu_count():
            return count
        raise ConfigError(Problem("--nproc", "'gpu', but no GPU can be seen here", "Write a number from 1."))
    if ranks := whole_number(nproc):
        return ranks
    raise ConfigError(Problem("--nproc", f"{show(nproc)} is no number of processes", "Write a number from 1, or gpu."))


def _check(parsed: Parsed, ranks: int) -> None:
    check_complete(parsed, require_length=True)
    config = parsed.config
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    pipeline = config.strategy.pipeline
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=pipeline.micro_batches)
    check_graphs(config, ranks=ranks, accumulation=batch.accumulation)
    if layout.pp > 1:
        # Late: it brings torch, which the launcher otherwise does without.
        from plait.parallel import check_pipeline

        check_pipeline(pipeline, layout.pp, batch.accumulation)


def _check_metrics(parsed: Parsed) -> None:
    """What a description measures, where no part of somebody's own measures more."""
    config = parsed.config
    if config.phase is not None or any(
        isinstance(each, (*OWN_HOOK, MetricPart)) for each in (*config.hooks, *config.metrics)
    ):
        return
    measured = [
        "loss",
        *(f"{each.prefix}/top{each.top}" for each in config.metrics if isinstance(each, AccuracyConfig)),
    ]
    named = {
        f"hooks.{at}.metric": each.metric for at, each in enumerate(config.hooks) if isinstance(each, EarlyStopConfig)
    }
    if config.checkpoint.best is not None:
        named["checkpoint.best.metric"] = config.checkpoint.best.metric
    if wrong := [key for key, metric in named.items() if metric not in measured]:
        remedy = f"Write {listed(f'`{each}`' for each in measured)}; the section `metrics` says what is measured."
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
        row = (Text(word) for word in (path, _written(value), origin))  # as text: `[…]` is no markup
        table.add_row(*row, style="dim" if origin == "default" else None)
    console = Console()
    narrowest = max(len(path) for path, *_ in settings) + max(len(origin) for *_, origin in settings) + 40
    console.width = max(console.width, narrowest)  # on a narrower screen, and in a pipe, keys would be cut
    console.print(table, soft_wrap=True)


def _written(value: object) -> str:
    """A value as a file would say it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return show(value) if value is None or isinstance(value, bool) else str(value)


def _run(config: str, overrides: Sequence[str]) -> None:
    from plait.cli.here import import_from_here
    from plait.runner import Runner

    import_from_here()
    with Runner.from_config(config, overrides) as runner:
        train_with(runner, ["train", config, *overrides])
