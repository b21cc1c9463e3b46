"""`prepare_native`: applies every parallelism technique to a model, in the order that they require.

build on meta → pipeline stages → tensor and sequence → context → experts → recompute → compile → shard or
replicate → initialize → optimizer

`docs/architecture.md` has the reasons for this order; the numbers of the steps below are those of its list.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from plait.config import CUSTOM_MODELS, CustomOptim, can_capture, check_graphs
from plait.distributed import (
    Attributes,
    Gradients,
    Initializer,
    World,
    WrapUnit,
    apply_recompute,
    combine_collectors,
    compile,
    find_wrap_units,
    is_sharded,
    make_deterministic,
    materialize,
    offload_activations,
    param_attributes,
    restore_attributes,
    seed_everything,
    tile_sequence,
    train_without_caches,
)
from plait.engine.audit import Audit
from plait.engine.construction import (
    build_module,
    cast_parameters,
    load_pretrained_into,
    use_fp8,
    use_fp8_at_the_head,
    use_kernels,
    use_recipe,
    warn_of_smaller_range,
)
from plait.engine.forward import Select, select_inputs
from plait.engine.graphs import Recording
from plait.engine.master_weights import MasterWeights, ShardedParams, replicate, replicate_scalars, trainable
from plait.engine.native import NativeEngine
from plait.engine.offload import OffloadedParams, OffloadedUpdater, Offloading
from plait.engine.parallelize import (
    Cut,
    Stages,
    apply_axes,
    carry_attributes,
    join_stages,
    rebind_initializer,
    refuse_hooks,
    refuse_other_references,
    shard_module,
    split_stages,
    staged_steps,
)
from plait.engine.preparation import Preparation
from plait.engine.recompute_budget import (
    FullModelActivations,
    choose_recompute_levels,
    count_full_model,
    gradients_are_transient,
)
from plait.engine.update import Updater, set_norm_weights
from plait.errors import ConfigError, ModelError, Problem
from plait.kernels import choose_attention
from plait.optim import (
    GroupSpec,
    OnePassAdam,
    OptimizerGroup,
    OptimizerNeeds,
    OptimizerRates,
    ParamForm,
    Schedule,
    WrappedOptimizer,
    base_rate,
    build_optimizer,
    clone_factory,
    examine_optimizer,
    is_builtin,
    make_custom_optimizer,
    param_form_of,
    split_groups,
)
from plait.precision import Fp8Linear, LossScaler, enable_delayed_scaling


@dataclass(frozen=True, slots=True)
class StageModel:
    """The model, or one of this rank's pipeline stages, with what steps 3 and 4 found in it."""

    module: nn.Module
    units: list[WrapUnit] = field(default_factory=list)
    """The FSDP wrap units: submodules that are sharded, recomputed and compiled as one (step 4)."""
    experts: list[nn.Module] = field(default_factory=list)
    """The modules that hold experts (step 3)."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model in preparation. Each step of `prepare_native` takes one, and returns a changed copy."""

    given: Preparation
    whole_steps: bool
    """Whether the engine runs whole steps (`train_step`). Custom loops (false) call backward and step themselves: they
    may read gradients, and accumulate any number of micro-batches."""

    # ---- from step 1 on
    module: nn.Module
    """The full model. In a pipeline, step 2 reduces it to the rank's last stage, and step 8 joins the rank's stages."""
    initializer: Initializer | None
    """Initializes the model; None if it has values already."""
    attributes: Attributes
    """Python attributes that the model's code set on parameters; they are set on the replaced parameters too."""
    wrapped_optimizer: WrappedOptimizer | None
    """The optimizer object that the user created over the model's parameters; None: Plait creates it."""
    specs: Sequence[GroupSpec]
    """The optimizer's parameter groups: the names of their parameters, and their options."""
    skeleton: nn.Module
    """The full model, whose names and shapes a folder of pretrained weights must match."""
    counted: FullModelActivations | None
    """The activations of the full model, if `recompute: auto` needs them."""
    select: Select | None
    """Selects the fields of a micro-batch that the model receives; None: all."""

    # ---- from step 2, 3 and 4 on
    stages: Stages = ()
    stage_models: tuple[StageModel, ...] = ()
    cut: Cut | None = None
    """Returns this rank's shard of a micro-batch along `cp`; None without context parallelism."""
    fp8_layers: Mapping[str, Fp8Linear] = field(default_factory=dict)

    # ---- from step 6, 7 and 9 on
    compiled: Sequence[nn.Module] = ()
    offloading: Offloading | None = None
    collectors: Sequence[Gradients] = ()
    """The gradient collectors of the sharded modules."""
    gradients: Gradients | None = None

    @property
    def param_form(self) -> ParamForm:
        """Whether the optimizer gets shards, DTensors or full parameters."""
        return (
            param_form_of(self.given.config.optim)
            if self.wrapped_optimizer is None
            else self.wrapped_optimizer.param_form
        )

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer gets a shard of each parameter."""
        return self.param_form == "shards"

    @property
    def leaves(self) -> bool:
        """Whether the gradients of a step may be those of a single backward pass, without a buffer to sum them in."""
        return self.whole_steps and self.wrapped_optimizer is None and self.given.accumulation == 1 and not self.stages

    @property
    def units(self) -> list[list[WrapUnit]]:
        """The wrap units of each stage."""
        return [stage.units for stage in self.stage_models]


AnyEngine = TypeVar("AnyEngine", bound=NativeEngine)


@overload
def prepare_native(given: Preparation) -> NativeEngine: ...
@overload
def prepare_native(given: Preparation, engine: type[AnyEngine]) -> AnyEngine: ...
def prepare_native(given: Preparation, engine: type[NativeEngine] = NativeEngine) -> NativeEngine:
    """Prepare a model for training with plain PyTorch; return an engine of the class `engine`."""
    model = _build(given, whole_steps=engine is NativeEngine)  # 1
    model = _split_into_stages(model)  # 2
    model = _apply_axes(model)  # 3
    model = _find_wrap_units(model)  # 4
    model = _recompute(model)  # 5
    model = _compile(model)  # 6
    model = _shard_and_initialize(model)  # 7, 8
    model, master_weights = _make_master_weights(model)  # 9
    return _finish(model, master_weights, engine)  # 10


def _build(given: Preparation, *, whole_steps: bool) -> Assembly:
    """1. Build the model, on the meta device if possible."""
    config, world, policy = given.config, given.world, given.policy
    check_graphs(config, ranks=world.size, accumulation=given.accumulation, whole_steps=whole_steps)
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    choose_attention(config.strategy.attention, given.device)
    module, initializer = build_module(config, given.model, log=given.log)
    refuse_hooks(given, module, whole_steps=whole_steps)
    refuse_other_references(given, module)
    compares_ranks: Any = module
    if hasattr(module, "data_group"):
        compares_ranks.data_group = world.group("dp_replicate", "dp_shard", "ep")
    select = select_inputs(module, config.model_inputs, has_loss=given.loss_function is not None)
    if select is not None and given.example is not None:
        given = replace(given, example=select(given.example))
    attributes = param_attributes(module)
    warn_of_smaller_range(given, module)
    if initializer is None and world.everyone is not None:
        materialize.copy_from_main(module, world.everyone, given.device)
    wrapped_optimizer = _wrap_optimizer(given, module)
    # Done on the full model: a pattern may match parameters that only other pipeline ranks will hold.
    specs = split_groups(module, config.optim) if wrapped_optimizer is None else wrapped_optimizer.specs
    skeleton = copy.deepcopy(module) if world.layout.pp > 1 and initializer is not None else module
    use_fp8_at_the_head(module, config)  # in the full model: only one stage will have the head
    counted = count_full_model(given, module)
    return Assembly(
        given, whole_steps, module, initializer, attributes, wrapped_optimizer, specs, skeleton, counted, select
    )


def _split_into_stages(model: Assembly) -> Assembly:
    """2. In a pipeline, keep this rank's stages; the next steps are applied to each stage as if it were a model."""
    stages = split_stages(model.given, model.module)
    modules = [stage.module for stage in stages] or [model.module]
    return replace(model, stages=stages, stage_models=tuple(StageModel(module) for module in modules))


def _apply_axes(model: Assembly) -> Assembly:
    """3. Apply tensor, context and expert parallelism."""
    results = [apply_axes(model.given, stage.module, stage=bool(model.stages)) for stage in model.stage_models]
    stage_models = [
        replace(stage, experts=experts) for stage, (_, experts) in zip(model.stage_models, results, strict=True)
    ]
    return replace(model, stage_models=tuple(stage_models), cut=results[0][0])


def _find_wrap_units(model: Assembly) -> Assembly:
    """4. Find the wrap units, and replace layers by faster ones."""
    given, fp8_layers = model.given, dict[str, Fp8Linear]()
    stage_models = [
        replace(stage, units=find_wrap_units(stage.module, given.config.strategy.wrap)) for stage in model.stage_models
    ]
    for stage in stage_models:
        fp8_layers |= use_fp8(given, stage.module, stage.units)
        use_recipe(given, stage.module, stage.units)
        use_kernels(given, stage.module)
    return replace(model, stage_models=tuple(stage_models), fp8_layers=fp8_layers)


def _recompute(model: Assembly) -> Assembly:
    """5. Sequence tiling, recompute, activation offload: each replaces the `forward` of layers or wrap units."""
    given, strategy = model.given, model.given.config.strategy
    late_gradients = model.leaves and not given.sharded and gradients_are_transient(given)
    modules = [stage.module for stage in model.stage_models]
    levels = choose_recompute_levels(
        given, modules, model.units, late_gradients=late_gradients, full_model=model.counted
    )
    for stage, chosen in zip(model.stage_models, levels, strict=True):
        tile_sequence(stage.module, strategy.tiles)
        if apply_recompute(stage.units, strategy.recompute, levels=chosen):
            train_without_caches(stage.module)
        # After recompute, so that it wraps recomputed units: these save only their inputs, which are then offloaded.
        offload_activations(stage.units, strategy.offload.activations, given.device)
    return model


def _compile(model: Assembly) -> Assembly:
    """6. Apply `torch.compile`, in place."""
    given, settings = model.given, model.given.config.strategy.compile
    if not settings.enabled:
        return model
    compiled: list[nn.Module] = []
    for stage in model.stage_models:
        reason = compile.reason_not_to_compile(settings, given.device)
        if reason is not None:
            given.log(f"strategy.compile is on, but {reason}: training continues without it")
            continue
        stage_settings = settings
        if stage_settings.scope == "auto" and stage.units and given.config.precision.fp8.recipe != "none":
            # A full model with explicit fp8 casts takes minutes to compile; equal blocks are compiled once.
            stage_settings = stage_settings.model_copy(update={"scope": "block"})
        sharded = given.sharded or bool(model.stages)
        compiled += compile.compile_wrapped_modules(stage.module, stage.units, stage_settings, sharded=sharded)
    return replace(model, compiled=compiled)


def _shard_and_initialize(model: Assembly) -> Assembly:
    """7. Cast and shard; 8. allocate and initialize. Stage by stage: at most one stage is unsharded in memory."""
    given, initializer, attributes = model.given, model.initializer, model.attributes
    config, policy, device = given.config, given.policy, given.device
    collectors: list[Gradients] = []
    offloading = _offloading(model)
    keep = None if offloading is None else offloading.keep
    for stage in model.stage_models:
        module = stage.module
        if offloading is not None and initializer is None:
            offloading.keep_initial_values(module)
        if not policy.master or (offloading is not None and offloading.rounds):
            cast_parameters(module, policy.compute)
        if given.sharded:
            collectors.append(shard_module(given, module, stage.units, stage.experts))
            carry_attributes(module, attributes)
        if initializer is None:
            module.to(device)
        else:
            materialize.give_storage(module, device, then=None if offloading is None else offloading.take_params)
        restore_attributes(module, attributes)
        if offloading is not None:
            offloading.store_initial_values(module)
            if len(model.stage_models) == 1:  # else stages may still share parameters
                offloading.open(module, model.units)
        if initializer is not None:
            materialize.initialize(
                module, rebind_initializer(initializer, module), seed=config.seed, device=device, keep=keep
            )
    modules = [stage.module for stage in model.stage_models]
    whole = modules[0] if len(modules) == 1 else join_stages(modules, sharded=given.sharded)
    if offloading is not None and len(modules) > 1:
        offloading.open(whole, model.units)
    if given.model is None:
        load_pretrained_into(given, model.skeleton, whole, keep=keep)
    if model.stages and hasattr(model.skeleton, "flops_per_token"):
        whole.flops_per_token = model.skeleton.flops_per_token  # that of the full model, not of one stage
    return replace(model, module=whole, offloading=offloading, collectors=collectors)


def _make_master_weights(model: Assembly) -> tuple[Assembly, MasterWeights]:
    """9. Create the master weights, and the collector that reduces gradients."""
    given, offloading, collectors, scalars = model.given, model.offloading, model.collectors, None
    modules = [stage.module for stage in model.stage_models]
    if given.sharded:
        rounds = given.policy.mixed and given.policy.master and offloading is None  # offload has cast them already
        collectors, scalars = replicate_scalars(given, modules, collectors, rounds=rounds)
    master_weights: MasterWeights
    gradients: Gradients | None
    if offloading is not None:
        gradients, master_weights = offloading.master_weights(
            model.module, modules, model.units, collectors, model.compiled, scalars
        )
    elif given.sharded:
        gradients, master_weights = (
            combine_collectors(collectors),
            ShardedParams(*trainable(model.module), elementwise=model.elementwise, scalars=scalars),
        )
    else:
        gradients, master_weights = replicate(given, model.module, elementwise=model.elementwise, leaves=model.leaves)
    if model.param_form == "full":
        master_weights.use_owned_params()
    return replace(model, collectors=collectors, gradients=gradients), master_weights


def _finish(model: Assembly, master_weights: MasterWeights, engine: type[NativeEngine]) -> NativeEngine:
    """10. Create the optimizer over the master weights, the schedule, the loss scaler, and the engine."""
    given, config, world = model.given, model.given.config, model.given.world
    staged = staged_steps(given, model.stages, model.collectors, master_weights) if model.stages else None
    set_norm_weights(master_weights, world, model.stages)
    with master_weights.gathered():
        optimizer = _optimizer(model, master_weights)
    _check_optimizer(model, optimizer, master_weights)
    seed_everything(config.seed, world.rank // world.layout.tp)  # tensor-parallel ranks share their dropout masks
    if isinstance(master_weights, OffloadedParams):
        master_weights.store.attach(optimizer)
    updater = (Updater if model.offloading is None else OffloadedUpdater)(
        master_weights,
        optimizer,
        _schedule(model, optimizer),
        scaler=LossScaler(config.precision.scaler) if given.policy.compute == torch.float16 else None,
        config=config.train,
        device=given.device,
        planned=world.fake,
    )
    return engine(
        model.module,
        world,
        config,
        policy=given.policy,
        gradients=model.gradients,
        master_weights=master_weights,
        updater=updater,
        loss_function=given.loss_function,
        accumulation=given.accumulation,
        compiled=model.compiled,
        cut=model.cut,
        staged=staged,
        scales=enable_delayed_scaling(model.fp8_layers, config.precision.fp8, given.device),
        recording=_recording(model),
        select=model.select,
        audit=_audit(model, master_weights, optimizer),
        log=given.log,
    )


def _audit(model: Assembly, master_weights: MasterWeights, optimizer: Optimizer) -> Audit | None:
    """Return what checks the first step; None if `train.audit` is off, and in a plan, which has no values."""
    given = model.given
    mode = given.config.train.audit
    if mode == "off" or given.world.fake:
        return None
    described = given.model is None and not isinstance(given.config.model, CUSTOM_MODELS)
    narrow = given.policy.compute.itemsize < 4 or given.policy.tf32
    return Audit(
        model.module,
        master_weights,
        optimizer,
        given.world,
        mode=mode,
        described=described,
        rounding=0.05 if narrow else 1e-3,
        log=given.log,
    )


def _optimizer_object(config: CustomOptim, world: World) -> Optimizer:
    """Return the optimizer object that `optim` holds; raise `ConfigError` if other keys conflict, or in a plan."""
    for key in ("lr", "weight_decay", "no_decay", *config.arguments):
        if key in config.model_fields_set or key in config.arguments:
            message = f"a {type(config.given).__name__} that is made already takes no arguments"
            raise ConfigError(Problem(f"optim.{key}", message, "Give them where it is made."))
    if world.fake:
        message = f"a {type(config.given).__name__} that is made already is over real parameters, and a plan has none"
        raise ConfigError(Problem("optim", message, "Give its class, or a function that makes it from parameters."))
    made: Optimizer = config.given
    return made


def _wrap_optimizer(given: Preparation, module: nn.Module) -> WrappedOptimizer | None:
    source = given.optimizer
    if (
        source is None
        and isinstance(given.config.optim, CustomOptim)
        and isinstance(given.config.optim.given, Optimizer)
    ):
        source = _optimizer_object(given.config.optim, given.world)
    if source is None:
        return None
    wrapped_optimizer = WrappedOptimizer(source, module)
    missing = frozenset(wrapped_optimizer.missing(module))
    if missing:
        names = f"{min(missing)}, …"
        given.log(f"{len(missing)} trainable parameters are not in the optimizer and stay as they are: {names}")
        for name, param in module.named_parameters():
            if name in missing:
                param.requires_grad_(False)
    return wrapped_optimizer


def _optimizer(model: Assembly, master_weights: MasterWeights) -> Optimizer:
    """Return the optimizer over the master weights: the user's object if given, else the one of `config.optim`."""
    config = model.given.config
    by_name = {
        name: tensor
        for name, tensor in zip(master_weights.names, master_weights.updated, strict=True)
        if tensor is not None
    }
    if model.wrapped_optimizer is not None:
        return model.wrapped_optimizer.replace_params(by_name)
    groups = [
        OptimizerGroup(names, [by_name[name] for name in names], spec.options)
        for spec in model.specs
        if (names := tuple(name for name in spec.names if name in by_name)) or isinstance(config.optim, CustomOptim)
    ]
    optimizer = build_optimizer(model.given.config.optim, groups, in_place=model.offloading is None)
    if isinstance(optimizer, OnePassAdam):
        optimizer.round_into(master_weights.rounded_params())
    return optimizer


def _schedule(model: Assembly, optimizer: Optimizer) -> Schedule | OptimizerRates:
    given, config, wrapped_optimizer = model.given, model.given.config, model.wrapped_optimizer is not None
    if config.schedule is None and (wrapped_optimizer or isinstance(config.optim, CustomOptim)):
        return OptimizerRates()
    rate = optimizer.param_groups[0]["initial_lr"] if wrapped_optimizer else base_rate(config.optim, optimizer)
    return given.length.schedule(config, rate, optimizer)


def _check_optimizer(model: Assembly, optimizer: Optimizer, master_weights: MasterWeights) -> None:
    """Raise `ConfigError` if a user-provided optimizer is not correct in this layout. Skipped in a plan: no values."""
    config, world, wrapped_optimizer = model.given.config, model.given.world, model.wrapped_optimizer is not None
    if is_builtin(optimizer) or world.fake:
        return
    spread = world.layout.pp > 1 or master_weights.owned is not None
    save = config.checkpoint
    asked = OptimizerNeeds(
        one_by_one=spread,
        by_element=model.elementwise and any(is_sharded(param) for param in master_weights.params),
        alike=world.layout.replicas > 1 or world.size > 1,
        saved=not wrapped_optimizer and (save.last or save.every is not None or save.best is not None),
    )
    make = clone_factory(optimizer)
    if not wrapped_optimizer:
        assert isinstance(config.optim, CustomOptim)
        make = partial(make_custom_optimizer, config.optim)
    examine_optimizer(optimizer, make, asked)


def _recording(model: Assembly) -> Recording | None:
    """Return when forward and backward pass are captured as a CUDA graph; None: never, as on a CPU and in a plan."""
    given, config = model.given, model.given.config
    described = given.model is None and given.loss_function is None
    by_itself = model.whole_steps and can_capture(
        config, ranks=given.world.size, accumulation=given.accumulation, described=described
    )
    if not (config.strategy.graphs is True or by_itself) or given.world.fake:
        return None
    if given.device.type == "cuda":
        return "where it pays" if by_itself else "always"
    if not by_itself:
        given.log("strategy.graphs is on without a CUDA device: training continues without it")
    return None


def _offloading(model: Assembly) -> Offloading | None:
    if not model.given.config.strategy.offload.on:
        return None
    if not model.elementwise:
        raise ModelError("strategy.offload updates shards of parameters, and this optimizer needs whole parameters")
    return Offloading(model.given)
