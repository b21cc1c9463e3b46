"""Whether a set of settings makes a run, found out without starting one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from plait.config import Parsed, check, check_complete, parse, resolve_batch, resolve_layout


def check_run(source: str, overrides: Sequence[str]) -> Parsed:
    """The run to be tuned; a `ConfigError` where it cannot be one."""
    parsed = parse(source, overrides)
    check_complete(parsed, require_length=True)
    return parsed


def effective(source: str, overrides: Sequence[str], ranks: int) -> str:
    """What the settings come to on `ranks` ranks, as text that is equal where two runs would be.

    With one copy of the model, every ZeRO stage is the same. Raises `ConfigError` where they make no run.
    """
    config = parse(source, overrides).config
    check(config, has_val=config.val_data is not None, require_length=True)
    strategy = config.strategy
    layout = resolve_layout(strategy, size=ranks, local_size=ranks)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)
    if layout.pp > 1:
        from plait.parallel import check_pipeline

        check_pipeline(strategy.pipeline, layout.pp, batch.accumulation)
    data = config.model_dump(mode="json")
    alone = layout.replicas == 1 and strategy.engine == "native"
    data["strategy"] |= {"zero": 0 if alone else strategy.stage, "sharding": None, "layout": layout.sizes()}
    data["batch"] = [batch.total, batch.micro, batch.accumulation]
    return json.dumps(data, sort_keys=True)
