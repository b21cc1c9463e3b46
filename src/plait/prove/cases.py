"""From one run description to the two that are compared. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.config import (
    LAYER_KEYS,
    HFConfig,
    Layout,
    ResolvedBatch,
    RunConfig,
    StrategyConfig,
    depth_of,
    least_ranks,
    parse_sections,
    resolve_batch,
    resolve_layout,
    to_dict,
    with_depth,
)
from plait.errors import ConfigError, Problem
from plait.launch import gpu_count

_TIME_KEYS = ("by_epoch", "max_epochs", "max_steps", "clip_norm", "clip_value", "guard")
"""What of `train` decides a step. The rest is about validating and stopping."""


@dataclass(frozen=True, slots=True)
class Cases:
    """Two run descriptions that must do the same."""

    reference: RunConfig
    """One process, nothing recomputed, compiled or offloaded."""
    candidate: RunConfig
    layout: Layout
    batch: ResolvedBatch
    """The candidate's; both have the same `total` and `micro`."""
    notes: tuple[str, ...]
    """What is not as in the user's own run."""


def make_cases(config: RunConfig, *, ranks: int | None = None, layers: int | None = None) -> Cases:
    """The two runs. `ranks` absent: as many as the layout fixes, and two where it fixes none."""
    notes: list[str] = []
    size = ranks or default_ranks(config)
    layout = resolve_layout(config.strategy, size=size, local_size=size)
    _refuse_what_is_one_process(config, layout)
    batch = resolve_batch(config.batch, layout.data_parallel, micro_batches=config.strategy.pipeline.micro_batches)
    base = _common(config, notes)
    if layers is not None:
        base["model"] = shrink(config, layers, notes)
    if config.device in ("auto", "cuda") and gpu_count() < size:
        base |= {"device": "cpu", "backend": "auto" if config.backend == "nccl" else config.backend}
        if gpu_count() or config.device == "cuda":
            notes.append(f"Both runs were on the CPU: {size} ranks need as many GPUs, and here are {gpu_count()}.")
    base["batch"] = {"total": batch.total, "micro": batch.micro}
    if config.strategy.stage > 0 and layout.dp_shard * layout.ep * layout.cp == 1:
        notes.append(f"Nothing was sharded: the layout leaves one rank for it. `--ranks {2 * size}` would show it.")
    single = {**base, "strategy": {"meta_init": config.strategy.meta_init}}
    return Cases(_parsed(single), _parsed(base), layout, batch, tuple(notes))


def default_ranks(config: RunConfig) -> int:
    """The product of the axes that the layout fixes; two where that is one and an axis is free."""
    layout, fixed = config.strategy.layout, least_ranks(config.strategy)
    free = layout.dp_replicate is None or layout.dp_shard is None
    return 2 if fixed == 1 and free else fixed


def shrink(config: RunConfig, layers: int, notes: list[str]) -> dict[str, Any]:
    """The `model` section with so many layers."""
    model = config.model
    depth = depth_of(model)
    if model is None or depth is None:
        message = f"{layers}: a {getattr(model, 'type', 'model')} has no number of layers to shrink"
        raise ConfigError(Problem("--layers", message, f"Leave it out, or set one of {', '.join(LAYER_KEYS)}."))
    if layers > depth:
        raise ConfigError(Problem("--layers", f"{layers}, and the model has {depth}", "Write fewer, or leave it out."))
    notes.append(f"The model was shrunk from {depth} to {layers} layers.")
    if isinstance(model, HFConfig) and model.path is not None and model.pretrained:
        notes.append("The shrunk model started from random weights, not from the pretrained ones.")
    shrunk = with_depth(model, layers)
    section: dict[str, Any] = dict(to_dict(config.model_copy(update={"model": shrunk}))["model"])
    return {key: value for key, value in section.items() if value is not None}


def _common(config: RunConfig, notes: list[str]) -> dict[str, Any]:
    """The sections that decide a step, without those that write, measure or resume."""
    base = to_dict(config)
    dropped = ("val_data", "test_data", "hooks", "checkpoint", "log", "batch")
    base = {key: value for key, value in base.items() if key not in dropped and value is not None}
    train = {key: value for key, value in base["train"].items() if key in _TIME_KEYS and value is not None}
    base["train"] = train
    base["log"] = {"console": "none", "sinks": []}
    if config.hooks:
        notes.append(f"Hooks were left out: {', '.join(hook.type for hook in config.hooks)}.")
    if config.checkpoint.resume is not None:
        notes.append("Both runs began with fresh weights, not with `checkpoint.resume`.")
    return base


def _parsed(sections: Mapping[str, Any]) -> RunConfig:
    return parse_sections(**sections).config


def besides(strategy: StrategyConfig) -> list[str]:
    """What a strategy does besides spreading the run over ranks, each in a word or two."""
    offload = strategy.offload
    said = {
        f"engine {strategy.engine_name}": strategy.engine != "native",
        f"recompute {strategy.recompute.mode}": strategy.recompute.mode != "none",
        "compile": strategy.compile.enabled,
        f"offload {offload.optimizer}": offload.on,
        f"weights in {'host memory' if offload.params == 'cpu' else 'files'}": offload.params != "none",
        "offloaded activations": offload.activations != "none",
        "tiles": bool(strategy.tiles.names),
    }
    return [words for words, is_so in said.items() if is_so]


def _refuse_what_is_one_process(config: RunConfig, layout: Layout) -> None:
    if layout.size == 1 and not besides(config.strategy):
        message = "one rank, nothing recomputed, compiled or offloaded: that is the reference itself"
        raise ConfigError(Problem("strategy", message, "Give `--ranks 2`, or a strategy that spreads something."))
