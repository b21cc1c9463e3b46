"""A table of the settings that a search tries (its candidates): a column for each setting in which they differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from plait.config import RunConfig, resolve_batch, resolve_layout
from plait.errors import ConfigError
from plait.plan import Candidate

_PREFIXES = ("strategy.layout.", "strategy.offload.", "strategy.", "batch.")
_SUFFIXES = (".mode", ".enabled")
_WIDTH = 160
"""The width for a file or a pipe: long rows are better than truncated columns."""


def wide_console(**options: Any) -> Console:
    """Return a console for tables: as wide as the terminal, or `_WIDTH` if there is none."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH, highlight=False, **options)


def as_columns(run: RunConfig, candidates: Sequence[Candidate], ranks: int) -> dict[str, list[str]]:
    """Return title → cells, one per candidate, for every key that some of them set and in which they differ.

    Cells show the values after defaults and `auto` are resolved, also for keys that a candidate does not change.
    """
    values = [_resolved_values(run, candidate_values, ranks) for candidate_values in candidates]
    keys = dict.fromkeys(
        key for candidate_values in candidates for key, value in candidate_values.settings.items() if value is not None
    )
    columns = {_title(key): [_shown(_at(candidate_values, key)) for candidate_values in values] for key in keys}
    return {title: cells for title, cells in columns.items() if len(set(cells)) > 1}


def _resolved_values(run: RunConfig, candidate: Candidate, ranks: int) -> dict[str, Any]:
    """Return all resolved values of the run with a candidate's settings; only the settings where the run is invalid."""
    try:
        config = candidate.applied_to(run)
        layout = resolve_layout(config.strategy, size=ranks, local_size=ranks)
        micro_batches = config.strategy.pipeline.micro_batches
        batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=micro_batches)
    except ConfigError:
        return dict(candidate.settings)
    data = config.model_dump(mode="json")
    data["strategy"]["zero"] = config.strategy.stage
    data["batch"] |= {"total": batch.total, "micro": batch.micro}
    if not config.strategy.offload.on:
        data["strategy"]["offload"]["ratio"] = None  # nothing is offloaded
    return data


def _at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key; None if there is none."""
    if key in data:
        return data[key]
    value: Any = data
    for name in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _title(key: str) -> str:
    """Return the short title of a key: `recompute` for `strategy.recompute.mode`, `tp` for `strategy.layout.tp`."""
    if key == "strategy.offload.optimizer":
        return "offload"
    before = next((affix for affix in _PREFIXES if key.startswith(affix)), "")
    after = next((affix for affix in _SUFFIXES if key.endswith(affix)), "")
    return key.removeprefix(before).removesuffix(after)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
