"""Candidates of a search (settings that override the run description), and the space of which they are combinations.

Loads no torch, so that `plait tune` can answer a wrong option at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pydantic import BaseModel

from plait.config import GptConfig, LlamaConfig, RunConfig, check, parse, resolve_batch, resolve_layout, yaml_io

# One set of settings to try: dotted keys and values that override those of the run description.


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that override the user's own; without any, it is the unchanged run."""

    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A hash of the settings, by which a later search recognizes candidates that were tried."""
        text = json.dumps(dict(self.settings), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def overrides(self) -> list[str]:
        """The settings as arguments of `plait train run.yaml`."""
        return [f"{key}={written(value)}" for key, value in self.settings.items()]

    def changes(self, run: RunConfig) -> list[str]:
        """Return the overrides that change the run, without settings that it has already."""
        return [f"{key}={written(value)}" for key, value in self.settings.items() if not _says(run, key, value)]

    def applied_to(self, run: RunConfig) -> RunConfig:
        """Return the run with these settings; raise `ConfigError` if it is invalid.

        Only keys that the user set count as set, so a default that another setting makes ineffective is accepted.
        """
        changed = parse(run.model_dump(mode="json", exclude_unset=True), self.overrides).config
        check(changed, has_val=changed.val_data is not None, require_length=False)
        return changed


def _says(run: RunConfig, key: str, value: Any) -> bool:
    """Return whether a run has this value at a key; false for keys inside lists and free-form sections."""
    section: Any = run
    for name in key.split("."):
        if not isinstance(section, BaseModel) or name not in type(section).model_fields:
            return False
        section = getattr(section, name)
    return bool(section == value)


def written(value: Any) -> str:
    """Return a value as text for an override, which is parsed to the same value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        plain = value and value == value.strip() and value[0] not in "[{\"'" and yaml_io.scalar(value) == value
        return value if plain else json.dumps(value)
    return repr(value) if isinstance(value, int | float) else json.dumps(value)


# The candidates of a search: all combinations of its dimensions, with the run's own global batch.


Settings = dict[str, Any]

DIMENSIONS = ("zero", "layout", "recompute", "micro", "compile", "offload")
"""Names of what a search can vary by itself; each sets one or several keys."""


@dataclass(frozen=True, slots=True)
class Space:
    """The dimensions and values of a search."""

    ranks: int
    dimensions: tuple[str, ...] = DIMENSIONS
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key → values to try, from the user; a dimension that would set one of these keys is not varied."""
    micro_min: int = 1
    micro_max: int = 1024
    micro_count: int = 5
    """The most micro-batch sizes to try."""


def useful_dimensions(device_type: str, dimensions: tuple[str, ...] = DIMENSIONS) -> tuple[str, ...]:
    """Return the dimensions that can make a run faster on this device: on a CPU, all but offload."""
    return tuple(dimension for dimension in dimensions if dimension != "offload" or device_type == "cuda")


def candidates(run: RunConfig, space: Space) -> list[Candidate]:
    """Return the unchanged run, then every combination of the values to try. Some may be invalid."""
    dims: list[list[Settings]] = [
        _zero(run, space),
        _layouts(run, space),
        _choices("recompute", "strategy.recompute.mode", ("none", "selective", "full"), space),
        _choices("compile", "strategy.compile.enabled", (False, True), space),
        _offload(run, space),
        *([{key: value} for value in values] for key, values in space.values.items()),
    ]
    combined = [{key: value for choice in choices for key, value in choice.items()} for choices in product(*dims)]
    proposals = [Candidate(settings | batch) for settings in combined for batch in _batches(run, settings, space)]
    return list({candidate.key: candidate for candidate in [Candidate({}), *proposals]}.values())


def _wanted(dimension: str, space: Space, *keys: str) -> bool:
    """Return whether a dimension is varied: it is in `space.dimensions`, and none of its keys in `space.values`."""
    return dimension in space.dimensions and not any(
        given == key or given.startswith(f"{key}.") or key.startswith(f"{given}.")
        for given in space.values
        for key in keys
    )


def _choices(dimension: str, key: str, values: tuple[Any, ...], space: Space) -> list[Settings]:
    return [{key: value} for value in values] if _wanted(dimension, space, key) else [{}]


def _zero(run: RunConfig, space: Space) -> list[Settings]:
    if space.ranks == 1 or not _wanted("zero", space, "strategy.zero", "strategy.sharding"):
        return [{}]
    clear: Settings = {} if run.strategy.sharding is None else {"strategy.sharding": None}
    return [{**clear, "strategy.zero": stage} for stage in range(4)]


def _offload(run: RunConfig, space: Space) -> list[Settings]:
    """Return settings for no offload, the optimizer in host memory or in files, and the weights in host memory too.

    If the run sets other keys of offload than the targets and the path, offload is not varied.
    """
    offload = run.strategy.offload
    said = offload.model_fields_set - {"optimizer", "params", "activations", "path"}
    if said or not _wanted("offload", space, "strategy.offload"):
        return [{}]
    if not run.optim.elementwise:  # its update needs whole parameters, or it is not known
        return [{}]
    home, weights, share, folder = (f"strategy.offload.{key}" for key in ("optimizer", "params", "ratio", "path"))
    stays: Settings = {weights: "none"} if offload.params != "none" else {}
    no_files: Settings = {folder: None} if offload.path is not None else {}
    nothing: Settings = {home: "none", **stays, **no_files} if offload.on else {}
    clear: Settings = {} if run.strategy.sharding is None else {"strategy.sharding": None}
    return [
        nothing,
        {home: "cpu", share: "auto", **stays, **no_files},
        {home: "nvme", share: "auto", **stays},
        {home: "cpu", **clear, "strategy.zero": 3, weights: "cpu", **no_files},
    ]


def _layouts(run: RunConfig, space: Space) -> list[Settings]:
    """Return sizes of tensor and pipeline parallelism, for models that support them; other ranks are data-parallel."""
    model, layout = run.model, run.strategy.layout
    if (
        space.ranks == 1
        or not isinstance(model, GptConfig | LlamaConfig)
        or not _wanted("layout", space, "strategy.layout")
    ):
        return [{}]
    heads = (getattr(model, "kv_heads", None) or model.heads, model.heads)
    sizes = range(1, space.ranks + 1)
    pairs = [
        (tp, pp)
        for tp, pp in product(sizes, sizes)
        if space.ranks % (tp * pp * layout.cp * layout.ep) == 0
        and all(n % tp == 0 for n in heads)
        and pp <= model.layers
    ]
    # Sizes that the user fixed for the original layout would contradict another one.
    free = {
        f"strategy.layout.{axis}": None for axis in ("dp_replicate", "dp_shard") if getattr(layout, axis) is not None
    }
    ordered = sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair))
    return [{**free, "strategy.layout.tp": tp, "strategy.layout.pp": pp} for tp, pp in ordered]


def _batches(run: RunConfig, settings: Settings, space: Space) -> Iterator[Settings]:
    """Yield micro-batch settings for the global batch, which is the same in every layout."""
    if any(key == "batch" for key in space.values):
        yield {}
        return
    fixed = _fixed_batch(run, settings, space)
    if not _wanted("micro", space, "batch.micro", "batch.accumulation", "batch.total"):
        keep = run.batch.micro if "batch.accumulation" not in settings else None
        yield {"batch.micro": keep, **fixed, **{key: settings[key] for key in settings if key.startswith("batch.")}}
        return
    share, left = divmod(fixed["batch.total"], _data_parallel(settings, run, space))
    for micro in [None] if left else _sizes(share, space):  # None is rejected later, with a reason
        yield {**fixed, "batch.micro": micro}


def _fixed_batch(run: RunConfig, settings: Settings, space: Space) -> Settings:
    layout = resolve_layout(run.strategy, size=space.ranks, local_size=space.ranks)
    micro_batches = run.strategy.pipeline.micro_batches
    total = resolve_batch(run.batch, layout.data_parallel, micro_batches=micro_batches).total
    fixed: Settings = {"batch.total": total, "batch.accumulation": None}
    if micro_batches is not None and "strategy.pipeline.micro_batches" not in settings:
        fixed["strategy.pipeline.micro_batches"] = None
    return fixed


def _data_parallel(settings: Settings, run: RunConfig, space: Space) -> int:
    """Return how many ranks have different samples, by the settings; the whole run is checked later."""
    sizes = {
        axis: settings.get(f"strategy.layout.{axis}", getattr(run.strategy.layout, axis)) for axis in ("tp", "pp", "cp")
    }
    others = [size for size in sizes.values() if isinstance(size, int) and size > 0]
    ranks = space.ranks
    for size in others:
        ranks //= size
    return max(ranks, 1)


def _sizes(share: int, space: Space) -> list[int]:
    """Return divisors of `share`, the samples of a rank, largest first; evenly spaced ones if there are too many."""
    divisors = [n for n in range(min(share, space.micro_max), space.micro_min - 1, -1) if share % n == 0]
    count = min(space.micro_count, len(divisors))
    if count < 2:
        return divisors[:count]
    return [divisors[round(i * (len(divisors) - 1) / (count - 1))] for i in range(count)]
