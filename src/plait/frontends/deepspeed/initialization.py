"""`deepspeed.initialize`: create an engine from a script's model, optimizer, data and configuration."""

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
from plait.frontends.deepspeed.engine import DeepSpeedEngine, EngineComponents
from plait.frontends.deepspeed.lr_schedules import Scheduler
from plait.frontends.deepspeed.parameter_links import link_parameters
from plait.frontends.deepspeed.pipe import PipelineModule
from plait.monitor import encodable
from plait.optim import OptimizerGroup, OptimizerRates, OptimizerSource, build_optimizer, split_groups
from plait.precision import LossScaler

# The optimizer and the schedule of a DeepSpeed configuration, for this and other front ends.


Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class Recipe:
    """The sections `optimizer` and `scheduler` of a configuration, with values for `auto` that are given later."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sections = {name: config[name] for name in ("optimizer", "scheduler") if config.get(name) is not None}

    @property
    def has_optimizer(self) -> bool:
        """Whether there is a section `optimizer`."""
        return "optimizer" in self.sections

    @property
    def has_schedule(self) -> bool:
        """Whether there is a section `scheduler`."""
        return "scheduler" in self.sections

    def optimizer(self, model: nn.Module, params: Parameters, auto: Mapping[str, Any] | None = None) -> Optimizer:
        """Return the optimizer over parameters or groups of a model; `auto` has values for keys that are `"auto"`."""
        optim = self._run("optimizer", auto).optim
        groups = as_groups(params)
        if isinstance(optim, MuonConfig) and len(groups) == 1:  # Muon updates only matrices; AdamW updates the others
            by_name = dict(model.named_parameters())
            groups = [
                {"params": [by_name[name] for name in spec.names], **spec.options}
                for spec in split_groups(model, optim)
            ]
        return over_groups(model, groups, optim)

    def schedule(self, optimizer: Optimizer, auto: Mapping[str, Any] | None = None) -> Scheduler:
        """Return the learning-rate schedule of an optimizer, to be stepped after each update."""
        schedule = self._run("scheduler", auto).schedule
        assert schedule is not None
        return Scheduler(optimizer, [schedule] * len(optimizer.param_groups))

    def _run(self, name: str, auto: Mapping[str, Any] | None) -> RunConfig:
        translation = translate({name: self.sections[name]}, auto=auto)
        translation.report.raise_refusals()
        sections = {key: value for key, value in translation.sections.items() if key in ("optim", "schedule")}
        return parse_sections(**sections).config


def as_groups(params: Parameters) -> list[dict[str, Any]]:
    """Return parameters as optimizer groups: the given groups, or one group of all parameters."""
    given: list[Any] = list(params)
    return given if any(isinstance(item, Mapping) for item in given) else [{"params": given}]


def over_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], optim: OptimConfig) -> Optimizer:
    """Return the optimizer that `optim` describes, over groups of a model's parameters."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    optimizer_groups = []
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        params = [param for param in params if param.requires_grad]
        if unknown := [param for param in params if param not in names]:
            shape = tuple(unknown[0].shape)
            raise ModelError(f"model_parameters has a tensor of shape {shape} that is not a parameter of the model")
        options = {key: value for key, value in group.items() if key != "params"}
        if params:
            optimizer_groups.append(OptimizerGroup([names[param] for param in params], params, options))
    optimizer = build_optimizer(optim, optimizer_groups, in_place=False)
    if getattr(optim, "implementation", None) == "auto":
        for group in optimizer.param_groups:  # torch chooses again, when the engine has set the tensors to update
            group["fused"] = group["foreach"] = None
    optimizer.state.clear()  # the engine creates it for those tensors
    return optimizer


# DeepSpeed's dynamic loss scale.


class DeepSpeedScaler(LossScaler):
    """A loss scaler whose scale doubles one step later than with Plait's own, as in DeepSpeed.

    DeepSpeed doubles the scale in the step after `window` clean steps (steps without overflow). So the first clean step
    of a run, and the first after an overflow, are not counted.
    """

    def __init__(self, config: ScalerConfig) -> None:
        super().__init__(config)
        self._uncounted = True

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step; `overflow`: whether a gradient was not finite."""
        if overflow or not self._uncounted:
            self._uncounted = overflow
            super().update(overflow=overflow)
            return
        self._uncounted = False
        if self.config.consecutive_hysteresis:
            self.tolerance = self.config.hysteresis

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {**super().state(), "uncounted": self._uncounted}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the state of a checkpoint; Plait's own scaler saves no `uncounted`."""
        super().restore(state)
        self._uncounted = bool(state.get("uncounted", False))


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]

_LOOP_KEYS = ("steps_per_print", "wall_clock_breakdown", "dataloader_drop_last", "output_path", "job_name")
"""Keys that the engine honours itself, so that their translation into a run description does not matter."""
_SHOWN = 8
"""The largest number of mapped keys that are printed one by one."""


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
    """Prepare a model for training as a DeepSpeed configuration says; return (engine, optimizer, loader, scheduler).

    `optimizer` and `lr_scheduler` are objects, or functions that return them; a given optimizer stays the same object.
    `model` may be a function that returns one: if its layers can be initialised one by one, no rank ever holds the
    whole model. Rank 0 prints a summary of the outcomes of the configuration's keys.
    """
    if model is None:
        raise ModelError("deepspeed.initialize needs a model")
    _refuse_mesh(mpu, mesh_param)
    source = _config_of(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    raw = read_config(source)
    given = {"optimizer": optimizer, "scheduler": lr_scheduler}
    overruled = [name for name, value in given.items() if value is not None and raw.get(name) is not None]
    raw = {name: value for name, value in raw.items() if name not in overruled}
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    translation = translate(raw, world_size=torch.distributed.get_world_size() // stages)
    translation.report.raise_refusals()
    run = _run_config(translation, model)
    world = open_world(run)
    # Plait initializes weights with the script's own seed, that of rank 0.
    run = run.model_copy(update={"seed": world.broadcast(torch.initial_seed() % 2**31)})
    batch = resolve_batch(run.batch, world.layout.data_parallel)
    chosen = _optimizer_for(model, optimizer, model_parameters, run, lr_scheduler)
    native = _native(run, world, model, chosen, batch.accumulation)
    has_optimizer = optimizer is not None or "optim" in translation.sections
    updating = native.optimizer if has_optimizer else None
    scheduler = _scheduler_for(lr_scheduler, updating, run)
    components = EngineComponents(native, run, raw, batch, updating, scheduler, collate_fn)
    engine = _engine(components, model)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    if world.is_main:
        _print_summary(source, translation.report, run, world, batch.total)
        for name in overruled:
            _print(f"plait:   {name} → the script's is used, not that of the configuration")
    return engine, updating, engine.training_dataloader, scheduler


def _native(
    run: RunConfig, world: World, model: Any, optimizer: OptimizerSource | None, accumulation: int
) -> ManualEngine:
    """Return Plait's own engine, with DeepSpeed's loss scaler, and learning rates that DeepSpeed's schedulers set."""
    random_state = rng_state(world.device)
    preparation = Preparation(
        run.model_copy(update={"schedule": None}),
        world,
        model=model,
        optimizer=optimizer,
        loss_function=model.loss_of if isinstance(model, PipelineModule) else None,
        accumulation=accumulation,
        log=_print if world.is_main else _ignore,
    )
    native = prepare_native(preparation, ManualEngine)
    restore_rng_state(random_state, world.device)  # the script's random numbers continue
    native.updater.schedule = OptimizerRates()  # schedulers set the rates, and do not step if an update is skipped
    if native.scaler is not None:
        native.updater.scaler = DeepSpeedScaler(run.precision.scaler)
    if world.heartbeat.is_read:
        enter = world.heartbeat.enter
        native.on_phase = lambda phase: enter(phase, native.steps)
    if run.strategy.stage < 3 and run.strategy.layout.pp == 1:  # with a pipeline, no rank has the whole model
        native.keep_unsharded()
    elif not run.strategy.compile.enabled:  # compiled code calls no hooks
        native.allow_submodule_calls()
    link_parameters(native, stage=run.strategy.stage)
    return native


def _engine(components: EngineComponents, model: Any) -> DeepSpeedEngine:
    if not isinstance(model, PipelineModule):
        return DeepSpeedEngine(components)
    from plait.frontends.deepspeed.pipeline_engine import PipelineEngine

    return PipelineEngine(components)


def _print(text: str) -> None:
    print(encodable(text, sys.stdout), flush=True)


def _ignore(text: str) -> None:
    pass


# ---- the configuration


def _config_of(args: Any, config: ConfigSource | None) -> ConfigSource:
    """Return the configuration: the argument, or the attribute of `args` (the command line) with one of its names."""
    named = {
        name: value
        for name in ("deepspeed_config", "deepscale_config", "deepspeed")
        if isinstance(value := getattr(args, name, None), (str, os.PathLike, Mapping))
    }
    sources: list[tuple[str, ConfigSource]] = [(f"args.{name}", value) for name, value in named.items()]
    if config is not None:
        sources.append(("config", config))
    if not sources:
        remedy = "Pass `config=`, or give the script --deepspeed_config ds_config.json."
        raise ConfigError(Problem("config", "is absent: no DeepSpeed configuration is given", remedy))
    first = sources[0][1]
    if any(value != first for _, value in sources[1:]):
        message = f"given {len(sources)} times, as {' and '.join(name for name, _ in sources)}, with different values"
        raise ConfigError(Problem("config", message, "Give it once."))
    return first


def _run_config(translation: Translation, model: Any) -> RunConfig:
    sections = dict(translation.sections)
    if isinstance(model, PipelineModule):
        sections["strategy"] = model.strategy(sections.get("strategy") or {})
    config = parse_sections(**sections, device=device_from_env(DEVICE_VARIABLE)).config
    check(config, has_val=False, require_length=False)
    return config


def _refuse_mesh(mpu: Any, mesh_param: Any) -> None:
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        message = f"shards layers over {mpu.get_model_parallel_world_size()} ranks itself"
        remedy = "Give the whole model, and write `tensor_parallel: {autotp_size: n}` in the configuration."
        raise ConfigError(Problem("mpu", message, remedy))
    if mesh_param is not None:
        message = f"{mesh_param!r}: sequences are not sharded in a loop of the script"
        raise ConfigError(Problem("mesh_param", message, "Use `strategy.layout.cp` with `plait train`."))


# ---- optimizer and scheduler


def _optimizer_for(
    model: Any, optimizer: Any, parameters: Parameters | None, run: RunConfig, scheduler: Any
) -> OptimizerSource | None:
    """Return the script's optimizer, or the configured one over `parameters`; None: the engine builds it over all."""
    if isinstance(optimizer, Optimizer):
        # As in DeepSpeed, empty groups are removed, unless a scheduler exists already: it has a rate for each of them.
        if scheduler is None or callable(scheduler):
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer
    given: list[Any] | None = None if parameters is None else list(parameters)
    if callable(optimizer):
        return optimizer if given is None else optimizer(given)  # type: ignore[no-any-return]
    if given is None or not isinstance(model, nn.Module):
        return None
    trained = [param for param in model.parameters() if param.requires_grad]
    is_flat = not any(isinstance(item, Mapping) for item in given)
    if is_flat and {id(param) for param in given if param.requires_grad} == {id(param) for param in trained}:
        return None
    return over_groups(model, as_groups(given), run.optim)


def _scheduler_for(given: Any, optimizer: Optimizer | None, run: RunConfig) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) else given
    if run.schedule is None or optimizer is None:
        return None
    return Scheduler(optimizer, [run.schedule] * len(optimizer.param_groups))


# ---- the summary


def _print_summary(source: ConfigSource, report: KeyReport, run: RunConfig, world: World, total: int) -> None:
    is_file = isinstance(source, (str, os.PathLike)) and len(str(source)) < 200  # base64 is longer
    name = os.path.basename(str(source)) if is_file else "the configuration"
    layout = [f"{axis} {size}" for axis, size in world.layout.sizes().items() if size > 1]
    where = f"{world.size} rank{'s' if world.size > 1 else ''} on {world.device.type}"
    _print(
        f"plait: {name} on the native engine: ZeRO stage {run.strategy.stage}, {run.precision.compute}, {where}"
        f"{' (' + ', '.join(layout) + ')' if layout else ''}, {total} samples per step"
    )
    mapped = [entry for entry in report.of(KeyOutcome.MAPPED) if not _is_loop_key(entry.key)]
    for entry in mapped[:_SHOWN]:
        _print(f"plait:   {entry.key} → {entry.text}")
    if len(mapped) > _SHOWN:
        _print(f"plait:   and {len(mapped) - _SHOWN} more that have other names here")
    unneeded = [entry.key for entry in report.of(KeyOutcome.UNNEEDED) if not _is_loop_key(entry.key)]
    if unneeded:
        why = f" (`plait convert {name} --to yaml` says why)" if is_file else ""
        _print(f"plait:   without meaning here: {', '.join(unneeded)}{why}")


def _is_loop_key(key: str) -> bool:
    return key.rpartition(".")[2] in _LOOP_KEYS


# ---- the command line


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a parser: `--deepspeed`, `--deepspeed_config`, and their old names.

    `--deepspeed` is a switch, and may have the configuration as its value, as in scripts of transformers.
    """
    group = parser.add_argument_group("DeepSpeed", "how training is distributed")
    text = "train as a DeepSpeed configuration says; the configuration may follow"
    group.add_argument("--deepspeed", nargs="?", const=True, default=False, type=_path, metavar="FILE", help=text)
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the DeepSpeed configuration")
    group.add_argument("--deepscale", action="store_true", help="the old name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, metavar="FILE", help="the old name of --deepspeed_config")
    return parser


def _path(text: str) -> str:
    if not text.lower().endswith((".json", ".jsonc", ".json5", ".yaml", ".yml")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a configuration; where it is an argument of the script, write it before --deepspeed"
        )
    return text
