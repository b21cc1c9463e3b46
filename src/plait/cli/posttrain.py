"""`plait sft`, `plait reward`, `plait dpo`, `plait ppo` and `plait grpo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from plait.cli.running import train_with
from plait.cli.train import _count, _show
from plait.config import Parsed, check, missing_paths, missing_starts, origin_of, parse, resolve_batch, resolve_layout
from plait.errors import ConfigError, Problem
from plait.launch import launched_rank, launched_size, run_here
from plait.monitor import report_progress


def run_phase(phase: str, config: str, overrides: Sequence[str], *, nproc: str, dry_run: bool) -> None:
    """Check everything that can be checked, then start the ranks, or be one of them."""
    parsed = parse(config, [*overrides, f"phase={phase}"])
    count = _count(nproc)
    _check(parsed, launched_size() or count)
    if dry_run:
        _show(parsed)
        return
    _look_for_files(parsed)
    if count > 1:
        command = [sys.executable, "-m", "plait", phase, config, *overrides]
        sys.exit(run_here(command, count))
    else:
        report_progress(parsed.config.log, launched_rank(), "loading PyTorch")
        _run(parsed, [phase, config, *overrides])


def _check(parsed: Parsed, ranks: int) -> None:
    config = parsed.config
    check(config, has_val=True, require_length=True, origins=parsed.origins)
    if config.model is None:
        raise ConfigError(Problem("model", "there is none", "Add a section `model` with a `type`."))
    layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
    resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)


def _look_for_files(parsed: Parsed) -> None:
    """Not for a dry run: what other phases are to make need not be there yet."""
    if missing := [*missing_paths(parsed.config), *missing_starts(parsed.config)]:
        raise ConfigError([replace(each, origin=origin_of(each.path, parsed.origins)) for each in missing])


def _run(parsed: Parsed, words: Sequence[str]) -> None:
    from plait.cli.here import import_from_here
    from plait.posttrain import make_runner

    import_from_here()
    with make_runner(parsed) as runner:
        train_with(runner, words)
