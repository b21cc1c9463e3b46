"""`deepspeed.initialize`: from a script's objects to an engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from plait.config import MuonConfig, OptimConfig, RunConfig, ScalerConfig, check, parse_sections, resolve_batch
from plait.distributed import World, device_from_env, open_world, restore_rng_state, rng_state
from plait.engine import ManualEngine, Preparation, prepare_native
from plait.errors import ConfigError, ModelError, Problem
from plait.frontends import KeyOutcome, KeyReport, Translation
from plait.frontends.deepspeed.accelerator import DEVICE_VARIABLE
from plait.frontends.deepspeed.comm import init_distributed
from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.translate import translate
from plait.frontends.deepspeed.engine import DeepSpeedEngine, Parts
from plait.frontends.deepspeed.lr_schedules import Scheduler
from plait.frontends.deepspeed.parameter_links import link_parameters
from plait.frontends.deepspeed.pipe import PipelineModule
from plait.monitor import encodable
from plait.optim import OptimizerGroup, OptimizerRates, OptimizerSource, build_optimizer, split_groups
from plait.precision import LossScaler

# The optimizer and the schedule that a DeepSpeed configuration describes, for whichever loop takes them.


Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class Recipe:
    """The sections `optimizer` and `scheduler`, which may leave values open until a script has named them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sections = {name: config[name] for name in ("optimizer", "scheduler") if config.get(name) is not None}

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer is described."""
        return "optimizer" in self.sections

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule is described."""
        return "scheduler" in self.sections

    def optimizer(self, model: nn.Module, params: Parameters, auto: Mapping[str, Any] | None = None) -> Optimizer:
        """The optimizer over parameters or groups of a model; `auto` has values for what is left open."""
        optim = self._run("optimizer", auto).optim
        groups = as_groups(params)
        if isinstance(optim, MuonConfig) and len(groups) == 1:  # one of two rules for each parameter
            found = dict(model.named_parameters())
            groups = [
                {"params": [found[name] for name in spec.names], **spec.options} for spec in split_groups(model, optim)
            ]
        return over_groups(model, groups, optim)

    def schedule(self, optimizer: Optimizer, auto: Mapping[str, Any] | None = None) -> Scheduler:
        """The schedule of an optimizer's rates, to be stepped after each update."""
        found = self._run("scheduler", auto).schedule
        assert found is not None
        return Scheduler(optimizer, [found] * len(optimizer.param_groups))

    def _run(self, name: str, auto: Mapping[str, Any] | None) -> RunConfig:
        found = translate({name: self.sections[name]}, auto=auto)
        found.report.raise_refusals()
        wanted = {key: found.sections[key] for key in ("optim", "schedule") if key in found.sections}
        return parse_sections(**wanted).config


def as_groups(params: Parameters) -> list[dict[str, Any]]:
    """Parameters as groups of an optimizer: those that were given, or one of them all."""
    given: list[Any] = list(params)
    return given if any(isinstance(each, Mapping) for each in given) else [{"params": given}]


def over_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], optim: OptimConfig) -> Optimizer:
    """An optimizer over these groups of a model's parameters, as `optim` says."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    views = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        params = [param for param in params if param.requires_grad]
        if strangers := [param for param in params if param not in names]:
            shape = tuple(strangers[0].shape)
            raise ModelError(f"model_parameters has a tensor of shape {shape} that is no parameter of the model")
        options = {key: value for key, value in group.items() if key != "params"}
        if params:
            views.append(OptimizerGroup([names[param] for param in params], params, options))
    optimizer = build_optimizer(optim, views, in_place=False)
    if getattr(optim, "implementation", None) == "auto":
        for group in optimizer.param_groups:  # chosen when the tensors are known that it is to update
            group["fused"] = group["foreach"] = None
    optimizer.state.clear()  # so is the state
    return optimizer


# DeepSpeed's dynamic loss scale, step by step.


class DeepSpeedScaler(LossScaler):
    """Grows one step later than Plait's own.

    DeepSpeed counts the clean steps before the one under way: the scale doubles in the step after `window` of them.
    So the first clean step after an overflow, and the first of all, is not counted.
    """

    def __init__(self, config: ScalerConfig) -> None:
        super().__init__(config)
        self._uncounted = True

    def update(self, *, overflow: bool) -> None:
        """Learn whether the step just done overflowed."""
        if overflow or not self._uncounted:
            self._uncounted = overflow
            super().update(overflow=overflow)
            return
        self._uncounted = False
        if self.config.consecutive_hysteresis:
            self.tolerance = self.config.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint carries."""
        return {**super().state(), "uncounted": self._uncounted}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint; one of Plait's own counts every step."""
        super().restore(state)
        self._uncounted = bool(state.get("uncounted", False))


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]

_HERE = ("steps_per_print", "wall_clock_breakdown", "dataloader_drop_last", "output_path", "job_name")
"""Keys that the engine itself honours, whatever a described run would make of them."""
_SHOWN = 8
"""Keys that are told one by one."""


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make a model ready to train as a DeepSpeed configuration says: (engine, optimizer, loader, scheduler).

    `optimizer` and `lr_scheduler` are objects, or functions that make them; a user's own optimizer stays the same
    object. `model` may be a function too: where its layers can be initialised one by one, no rank ever holds all of
    it. What became of the keys of the configuration is printed on rank 0, in brief.
    """
    if model is None:
        raise ModelError("deepspeed.initialize needs a model")
    _refuse(mpu, mesh_param)
    source = _config_of(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    raw = read_config(source)
    own = [name for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)) if given is not None]
    overruled = [name for name in own if raw.get(name) is not None]
    raw = {name: value for name, value in raw.items() if name not in overruled}
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    translation = translate(raw, world_size=torch.distributed.get_world_size() // stages)
    translation.report.raise_refusals()
    run = _run_config(translation, model)
    world = open_world(run)
    # What is drawn here follows the script's own seed, rank 0's.
    run = run.model_copy(update={"seed": world.broadcast(torch.initial_seed() % 2**31)})
    batch = resolve_batch(run.batch, world.layout.data_parallel)
    chosen = _optimizer_for(model, optimizer, model_parameters, run, lr_scheduler)
    native = _native(run, world, model, chosen, batch.accumulation)
    has_optimizer = optimizer is not None or "optim" in translation.sections
    updating = native.optimizer if has_optimizer else None
    scheduler = _scheduler_for(lr_scheduler, updating, run)
    parts = Parts(native, run, raw, batch, updating, scheduler, collate_fn)
    engine = _engine(parts, model)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    if world.is_main:
        _tell(source, translation.report, run, world, batch.total)
        for name in overruled:
            _say(f"plait:   {name} → the script's own is used, and not that of the configuration")
    return engine, updating, engine.training_dataloader, scheduler


def _native(
    run: RunConfig, world: World, model: Any, optimizer: OptimizerSource | None, accumulation: int
) -> ManualEngine:
    """Plait's own engine, with the few things in it that DeepSpeed does in its own way."""
    before = rng_state(world.device)
    given = Preparation(
        run.model_copy(update={"schedule": None}),
        world,
        model=model,
        optimizer=optimizer,
        loss_function=model.loss_of if isinstance(model, PipelineModule) else None,
        accumulation=accumulation,
        log=_say if world.is_main else _unheard,
    )
    native = prepare_native(given, ManualEngine)
    restore_rng_state(before, world.device)  # the script's own seeds go on counting
    native.updater.schedule = OptimizerRates()  # schedulers set the rates, and wait while steps are skipped
    if native.scaler is not None:
        native.updater.scaler = DeepSpeedScaler(run.precision.scaler)
    if world.heartbeat.is_read:
        enter = world.heartbeat.enter
        native.on_phase = lambda phase: enter(phase, native.steps)
    if run.strategy.stage < 3 and run.strategy.layout.pp == 1:  # of a pipeline, no rank has the whole anyway
        native.keep_unsharded()
    elif not run.strategy.compile.enabled:  # whose code has no hooks in it
        native.allow_submodule_calls()
    link_parameters(native, stage=run.strategy.stage)
    return native


def _engine(parts: Parts, model: Any) -> DeepSpeedEngine:
    if not isinstance(model, PipelineModule):
        return DeepSpeedEngine(parts)
    from plait.frontends.deepspeed.pipeline import PipelineEngine

    return PipelineEngine(parts)


def _say(text: str) -> None:
    print(encodable(text, sys.stdout), flush=True)


def _unheard(text: str) -> None:
    pass


# ---- the configuration


def _config_of(args: Any, config: ConfigSource | None) -> ConfigSource:
    """The one configuration that was given: as an argument, or on the command line under one of its names."""
    named = {
        name: value
        for name in ("deepspeed_config", "deepscale_config", "deepspeed")
        if isinstance(value := getattr(args, name, None), (str, os.PathLike, Mapping))
    }
    found: list[tuple[str, ConfigSource]] = [(f"args.{name}", value) for name, value in named.items()]
    if config is not None:
        found.append(("config", config))
    if not found:
        remedy = "Pass `config=`, or give the script --deepspeed_config ds_config.json."
        raise ConfigError(Problem("config", "there is no DeepSpeed configuration", remedy))
    first = found[0][1]
    if any(value != first for _, value in found[1:]):
        message = f"given {len(found)} times, as {' and '.join(name for name, _ in found)}, and not the same"
        raise ConfigError(Problem("config", message, "Give it once."))
    return first


def _run_config(translation: Translation, model: Any) -> RunConfig:
    sections = dict(translation.sections)
    if isinstance(model, PipelineModule):
        sections["strategy"] = model.strategy(sections.get("strategy") or {})
    config = parse_sections(**sections, device=device_from_env(DEVICE_VARIABLE)).config
    check(config, has_val=False, require_length=False)
    return config


def _refuse(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        message = f"spreads layers over {mpu.get_model_parallel_world_size()} ranks itself"
        remedy = "Give the whole model, and write `tensor_parallel: {autotp_size: n}` in the configuration."
        raise ConfigError(Problem("mpu", message, remedy))
    if mesh_param is not None:
        message = f"{mesh_param!r}: sequences are not spread in a loop of the script's own"
        raise ConfigError(Problem("mesh_param", message, "Use `strategy.layout.cp` with `plait train`."))


# ---- optimizer and scheduler


def _optimizer_for(
    model: Any, optimizer: Any, parameters: Parameters | None, run: RunConfig, scheduler: Any
) -> OptimizerSource | None:
    """The script's own optimizer, or one of the configuration over groups of the script's; None: over everything."""
    if isinstance(optimizer, Optimizer):
        # DeepSpeed lets go of groups without parameters, too. A schedule that exists has a rate for each of them.
        if scheduler is None or callable(scheduler):
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer
    given: list[Any] | None = None if parameters is None else list(parameters)
    if callable(optimizer):
        return optimizer if given is None else optimizer(given)  # type: ignore[no-any-return]
    if given is None or not isinstance(model, nn.Module):
        return None
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = not any(isinstance(each, Mapping) for each in given)
    if plain and {id(each) for each in given if each.requires_grad} == {id(param) for param in trained}:
        return None
    return over_groups(model, as_groups(given), run.optim)


def _scheduler_for(given: Any, optimizer: Optimizer | None, run: RunConfig) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) else given
    if run.schedule is None or optimizer is None:
        return None
    return Scheduler(optimizer, [run.schedule] * len(optimizer.param_groups))


# ---- what is said


def _tell(source: ConfigSource, account: KeyReport, run: RunConfig, world: World, total: int) -> None:
    is_file = isinstance(source, (str, os.PathLike)) and len(str(source)) < 200  # base64 is longer
    name = os.path.basename(str(source)) if is_file else "the configuration"
    layout = [f"{axis} {size}" for axis, size in world.layout.sizes().items() if size > 1]
    where = f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}"
    _say(
        f"plait: {name} on the native engine: ZeRO stage {run.strategy.stage}, {run.precision.compute}, {where}"
        f"{' (' + ', '.join(layout) + ')' if layout else ''}, {total} samples a step"
    )
    mapped = [entry for entry in account.of(KeyOutcome.MAPPED) if not _is_here(entry.key)]
    for entry in mapped[:_SHOWN]:
        _say(f"plait:   {entry.key} → {entry.text}")
    if len(mapped) > _SHOWN:
        _say(f"plait:   and {len(mapped) - _SHOWN} more that are said in other words here")
    left = [entry.key for entry in account.of(KeyOutcome.UNNEEDED) if not _is_here(entry.key)]
    if left:
        why = f" (`plait convert {name} --to yaml` says why)" if is_file else ""
        _say(f"plait:   without meaning here: {', '.join(left)}{why}")


def _is_here(key: str) -> bool:
    return key.rpartition(".")[2] in _HERE


# ---- the command line


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a parser DeepSpeed's arguments: `--deepspeed`, `--deepspeed_config`, and their old names.

    `--deepspeed` is a switch, and may carry the configuration itself, as scripts of transformers have it.
    """
    group = parser.add_argument_group("DeepSpeed", "how training is spread")
    words = "train as a DeepSpeed configuration says; the configuration may follow"
    group.add_argument("--deepspeed", nargs="?", const=True, default=False, type=_path, metavar="FILE", help=words)
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the DeepSpeed configuration")
    group.add_argument("--deepscale", action="store_true", help="the old name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, metavar="FILE", help="the old name of --deepspeed_config")
    return parser


def _path(text: str) -> str:
    if not text.lower().endswith((".json", ".jsonc", ".json5", ".yaml", ".yml")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no configuration; where it is an argument of the script, write it before --deepspeed"
        )
    return text
