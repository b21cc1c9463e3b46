"""What a run will use, told before it starts, and how it ended, kept when it is over."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.config import Layout, StrategyConfig
from plait.ops import write_whole
from plait.strategy import stage_of
from plait.world import World

if TYPE_CHECKING:
    from plait.runner.runner import Runner

_STAGES = {
    0: "replicated (DDP)",
    1: "ZeRO-1: optimizer sharded",
    2: "ZeRO-2: optimizer and gradients sharded",
    3: "ZeRO-3 / FSDP: everything sharded",
}


def describe_run(runner: Runner) -> dict[str, Any]:
    """The rows of the opening table, and the short name of this part of the run (`zero3 · 2 ranks`)."""
    config, world, batch = runner.config, runner.world, runner.batch
    model = runner.engine.model
    total, trained = runner.engine.parameter_count()
    stage = stage_of(config.strategy) if world.layout.replicas > 1 else None
    rows = [
        (
            "model",
            f"{_model_name(model)}, {_si(total)} parameters" + (f", {_si(trained)} trained" if trained < total else ""),
        ),
        ("device", _devices(world)),
        ("strategy", _strategy(runner, stage)),
        ("precision", _precision(runner)),
        (
            "batch",
            f"{batch.total} = {batch.micro} micro × {batch.accumulation} accumulation "
            f"× {world.layout.data_parallel} data-parallel",
        ),
        ("length", _length(runner)),
        (
            "optimizer",
            config.optim.type
            + (f", lr {config.optim.lr:g}" if config.optim.lr is not None else "")
            + (f", {config.schedule.type}" if config.schedule else ""),
        ),
        ("work dir", str(config.work_dir)),
        ("torch", f"{torch.__version__}, Python {platform.python_version()}, seed {config.seed}"),
    ]
    if runner.resumed_from is not None:
        rows.append(("resumed", f"{runner.resumed_from.name}, epoch {runner.epoch + 1}, step {runner.step}"))
    name = _segment(stage, world.layout)
    return {
        "title": f"plait · {_model_name(model)}",
        "rows": rows,
        "segment": f"{name} · {world.size} rank{'s' if world.size > 1 else ''}",
        "resumed": runner.resumed_from is not None,
        "max_steps": runner.total_steps,
    }


def write_report(path: Path, ended: dict[str, Any]) -> str | None:
    """Keep how a run ended beside its log. What went wrong is returned: the run's own end is of more weight."""
    try:
        write_whole(path, json.dumps(ended, indent=1) + "\n")
    except OSError as error:
        return f"{path.name} was not written: {error.strerror}"
    return None


def _segment(stage: int | None, layout: Layout) -> str:
    """`ddp`, `zero3`, `tp2`, `zero1 × pp2 × tp2`."""
    axes = [f"{axis}{size}" for axis, size in layout.sizes().items() if size > 1 and not axis.startswith("dp_")]
    word = [] if stage is None and axes else ["single" if stage is None else "ddp" if stage == 0 else f"zero{stage}"]
    return " × ".join([*word, *axes])


_AXES = {
    "pp": "pipeline of {} ({})",
    "ep": "experts over {}",
    "cp": "sequences over {} ({})",
    "tp": "layers over {}{}",
}


def _axes(strategy: StrategyConfig, layout: Layout) -> list[str]:
    details = {
        "pp": str(strategy.pipeline.schedule),
        "ep": "",
        "cp": strategy.context.kind,
        "tp": " (with the sequence)" if strategy.tensor.sequence_parallel else "",
    }
    sizes = layout.sizes()
    return [text.format(sizes[axis], details[axis]) for axis, text in _AXES.items() if sizes[axis] > 1]


def _strategy(runner: Runner, stage: int | None) -> str:
    strategy, layout = runner.config.strategy, runner.world.layout
    axes = _axes(strategy, layout)
    parts = [*axes, *([] if stage is None else [_STAGES[stage]])] or ["one process"]
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        parts.append(f"{layout.dp_replicate} replicas × {layout.dp_shard} shards (HSDP)")
    if strategy.engine != "native":
        name = strategy.engine_name
        parts.insert(0, name if strategy.plugin is None else f"{name} ({strategy.plugin})")
    if strategy.offload.on:
        places = {"optimizer": strategy.offload.optimizer, "weights": strategy.offload.params}
        words = {"cpu": "host memory", "nvme": "files"}
        parts += [f"{what} in {words[place]}" for what, place in places.items() if place != "none"]
    if strategy.recompute.mode != "none":
        parts.append(f"recompute {strategy.recompute.mode}")
    if strategy.compile.enabled:
        parts.append(f"compile ({strategy.compile.backend})")
    return ", ".join(parts)


def _precision(runner: Runner) -> str:
    precision = runner.config.precision
    if precision.compute in ("fp32", "tf32"):
        return precision.compute
    master = "fp32 weights" if precision.master else f"{precision.compute} weights"
    return f"{precision.compute} compute, {precision.reduce} reduction, {master}"


def _length(runner: Runner) -> str:
    train, per_epoch = runner.config.train, runner.steps_per_epoch
    epoch = "" if per_epoch is None else f", {_several(per_epoch, 'step')} an epoch"
    if train.max_steps is not None:
        return _several(train.max_steps, "step") + epoch
    return _several(train.max_epochs, "epoch") + epoch


def _several(count: int | None, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _model_name(model: nn.Module) -> str:
    # Sharding derives a class of its own, FSDP<Name>, from the model's.
    return type(model).__name__.removeprefix("FSDP")


def _devices(world: World) -> str:
    started = f", started by {world.ranks.launcher}" if world.ranks.launcher in ("slurm", "mpi") else ""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    elif world.device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"CPU, {threads} thread{'s' if threads > 1 else ''} each"
    else:
        name = world.device.type
    return f"{world.size} × {name}{started}"


def _si(number: float) -> str:
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}B"
