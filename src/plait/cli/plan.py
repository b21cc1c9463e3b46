"""`plait plan`: what a run will do, known before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from plait.config import parse, resolve_batch, resolve_layout
from plait.errors import ConfigError, Problem


def draw_pipeline(config: str, overrides: Sequence[str], out: str | None, *, nproc: int | None) -> None:
    """Draw the pipeline of a run as a picture: who works on which micro-batch, when, and who waits."""
    found = parse(config, overrides).config
    strategy = found.strategy
    if strategy.layout.pp == 1:
        message = "1: the run has no pipeline, so there is no schedule to draw"
        raise ConfigError(Problem("strategy.layout.pp", message, "Write `strategy.layout.pp: 2`, or more."))
    layout = strategy.layout
    least = layout.pp * layout.ep * layout.cp * layout.tp * (layout.dp_replicate or 1) * (layout.dp_shard or 1)
    ranks = nproc or least
    data_parallel = resolve_layout(strategy, size=ranks, local_size=ranks).data_parallel
    pipeline = strategy.pipeline
    batch = resolve_batch(found.batch, data_parallel, micro_batches=pipeline.micro_batches)

    from plait.parallel.pipeline import draw_schedule, theoretical_bubble

    picture = draw_schedule(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    path = Path(out or "schedule.svg")
    path.write_text(picture)
    idle = theoretical_bubble(pipeline.schedule, layout.pp, batch.accumulation, pipeline.stages_per_rank)
    micro = f"{batch.accumulation} micro-batch{'' if batch.accumulation == 1 else 'es'}"
    typer.echo(f"{path}: {pipeline.schedule} over {layout.pp} ranks, {micro}, {idle:.1%} idle")
