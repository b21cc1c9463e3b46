"""All techniques on one page, in the order in which they must be applied.

build on meta → pipeline stages → tensor and sequence → context → experts → recompute → compile → shard or
replicate → give values → optimizer
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config.run import RunConfig
from plait.errors import ModelError
from plait.ops.attention import choose_attention
from plait.optim import (
    Adoption,
    OptimizerSource,
    OwnRates,
    Schedule,
    ViewGroup,
    build_optimizer,
    build_schedule,
    is_elementwise,
    is_one_pass,
    split_groups,
)
from plait.optim.one_pass import OnePassAdam
from plait.parallel import compiling, materialize, recompute
from plait.parallel.offload.activations import offload_activations
from plait.parallel.replicate import GradientBuckets
from plait.parallel.single import OwnGradients
from plait.parallel.tiles import tile_layers
from plait.parallel.units import Unit, find_units
from plait.precision import FP32_MODULES, Fp8Linear, LossScaler, Policy, make_policy, scale_by_earlier_steps
from plait.strategy.native.building import ModelSource, build_module, load_pretrained_into, warn_of_smaller_range
from plait.strategy.native.engine import Gradients, NativeEngine
from plait.strategy.native.forward import Say
from plait.strategy.native.fusing import use_fp8, use_kernels
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.offloaded import OffloadedUpdater, OffloadedViews
from plait.strategy.native.offloading import Offloading
from plait.strategy.native.recomputing import choose_ways, gradients_come_late
from plait.strategy.native.rounded import RoundedViews
from plait.strategy.native.spread import Several, joined, rebound, shard_part, split_stages, spread_axes, staged_steps
from plait.strategy.native.update import Updater
from plait.strategy.native.views import BucketViews, DirectViews, ShardViews, Views
from plait.world import World, is_sharded, make_deterministic, seed_everything

if TYPE_CHECKING:
    from plait.parallel.pipeline import Stage


@dataclass(frozen=True, slots=True)
class Length:
    """How long the run is, as far as it is known."""

    total_steps: int | None = None
    steps_per_epoch: int | None = None

    def schedule(self, config: RunConfig, base_lr: float | None = None) -> Schedule:
        """The run's schedule over this length; `base_lr` where that is not `optim.lr`."""
        return build_schedule(
            config.schedule,
            base_lr=config.optim.lr if base_lr is None else base_lr,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
        )


def prepare_native(
    config: RunConfig,
    world: World,
    *,
    model: ModelSource = None,
    optimizer: OptimizerSource | None = None,
    loss_function: LossFunction | None = None,
    length: Length | None = None,
    accumulation: int = 1,
    example: Any = None,
    engine: type[NativeEngine] = NativeEngine,
    say: Say = print,
) -> NativeEngine:
    """Make a model ready to train as `config` says.

    `model` is a module, a function that makes one, or absent where `config.model` describes it. `optimizer` is a
    user's own, over the parameters of that module; absent: as `config.optim` says. `example` is one micro-batch's
    inputs; only `recompute: auto` looks at it.
    """
    strategy, policy, device = config.strategy, make_policy(config.precision), world.device
    shards = world.layout.dp_shard * world.layout.ep * world.layout.cp
    sharded = strategy.stage > 0 and (shards > 1 or strategy.offload.params != "none")
    length = length or Length()
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    choose_attention(strategy.attention, device)

    module, initializer = build_module(config, model)
    warn_of_smaller_range(config, module, say)
    if initializer is None and world.everyone is not None:
        materialize.copy_from_main(module, world.everyone, device)
    adopted = None if optimizer is None else _adopt(optimizer, module, say)
    elementwise = is_elementwise(config.optim) if adopted is None else adopted.is_elementwise
    # Of the whole model: a pattern may fit what other ranks hold.
    specs = split_groups(module, config.optim) if adopted is None else adopted.specs
    skeleton = copy.deepcopy(module) if world.layout.pp > 1 and initializer is not None else module
    stages = split_stages(module, config, world, example, sharded=sharded)
    parts = [stage.module for stage in stages] or [module]
    spread = [spread_axes(part, config, world, stage=bool(stages)) for part in parts]
    all_units = [find_units(part, strategy.wrap) for part in parts]
    eight: dict[str, Fp8Linear] = {}
    for part, units in zip(parts, all_units, strict=True):
        eight |= use_fp8(part, units, config, device, say)
        use_kernels(part, config, device, say)
    # Loops of other kinds may look at gradients, and sum as many of them as they like.
    leaves = engine is NativeEngine and adopted is None and accumulation == 1 and not stages
    late = leaves and not sharded and gradients_come_late(config, world, policy)
    ways = choose_ways(module, all_units[0], example, config=config, world=world, late=late, say=say)
    compiled = []
    for part, units in zip(parts, all_units, strict=True):
        tile_layers(part, strategy.tiles)
        recompute.apply_recompute(units, strategy.recompute, ways=ways)
        offload_activations(units, strategy.offload.activations, device)  # around recomputing, whose inputs travel
        compiled += _compile(part, units, config, device, sharded=sharded or bool(stages), say=say)

    collectors: list[Gradients] = []
    away = _offloading(config, world, policy, say, elementwise=elementwise)
    keep = None if away is None else away.keep
    for part, units, (_, experts) in zip(parts, all_units, spread, strict=True):
        if away is not None:
            away.set_aside(part)
        if not policy.master or (away is not None and away.rounds):
            _cast(part, policy.compute)
        if sharded:
            collectors.append(shard_part(part, units, experts, config, policy, world))
        if initializer is None:
            part.to(device)
        else:
            materialize.give_storage(part, device, then=None if away is None else away.take_params)
        if away is not None:
            away.take_aside(part)
            if len(parts) == 1:  # else parts may come to share parameters yet
                away.open(*_trainable(part), all_units)
        if initializer is not None:
            materialize.initialize(part, rebound(initializer, part), seed=config.seed, device=device, keep=keep)
    whole = parts[0] if len(parts) == 1 else joined(parts, sharded=sharded)
    if away is not None and len(parts) > 1:
        away.open(*_trainable(whole), all_units)
    if model is None:
        load_pretrained_into(skeleton, whole, config, keep=keep)
    if stages and hasattr(skeleton, "flops_per_token"):
        whole.flops_per_token = skeleton.flops_per_token  # of the model, not of a stage
    views: Views
    gradients: Gradients | None
    if away is not None:
        buckets = None if sharded else _summing_buckets(_trainable(whole)[1], policy, config, world)
        gradients, views = away.views(whole, *_trainable(whole), parts, all_units, collectors, buckets, compiled)
    elif sharded:
        views = ShardViews(*_trainable(whole), elementwise=elementwise)
        gradients = collectors[0] if len(collectors) == 1 else Several(collectors)
    else:
        gradients, views = _replicate(whole, policy, config, world, elementwise=elementwise, leaves=leaves)
    staged = staged_steps(stages, collectors, views, config, world) if stages else None
    _measure_norm(views, world, stages)

    by_name = dict(zip(views.names, views.tensors, strict=True))
    if adopted is not None:
        updating = adopted.onto(by_name)
    else:
        groups = [
            ViewGroup(names, [by_name[name] for name in names], spec.options)
            for spec in specs
            if (names := tuple(name for name in spec.names if name in by_name))
        ]
        updating = build_optimizer(config.optim, groups, in_place=away is None)
        if isinstance(updating, OnePassAdam):
            updating.publish_into(views.rooms())
    seed_everything(config.seed, world.rank // world.layout.tp)  # those along `tp` must drop the same elements
    if isinstance(views, OffloadedViews):
        views.store.attach(updating)
    updater = (Updater if away is None else OffloadedUpdater)(
        views,
        updating,
        _schedule(config, length, updating, adopted=adopted is not None),
        scaler=LossScaler(config.precision.scaler) if policy.compute == torch.float16 else None,
        config=config.train,
        device=device,
    )
    return engine(
        whole,
        world,
        policy=policy,
        gradients=gradients,
        views=views,
        updater=updater,
        loss_function=loss_function,
        accumulation=accumulation,
        compiled=compiled,
        cut=spread[0][0],
        staged=staged,
        scales=scale_by_earlier_steps(eight, config.precision.fp8, device),
        say=say,
    )


def _adopt(optimizer: OptimizerSource, module: nn.Module, say: Say) -> Adoption:
    adopted = Adoption(optimizer, module)
    left_out = frozenset(adopted.left_out(module))
    if left_out:
        say(f"{len(left_out)} trainable parameters are not in the optimizer and stay as they are: {min(left_out)}, …")
        for name, param in module.named_parameters():
            if name in left_out:
                param.requires_grad_(False)
    return adopted


def _schedule(config: RunConfig, length: Length, optimizer: Optimizer, *, adopted: bool) -> Schedule | OwnRates:
    if adopted and config.schedule is None:
        return OwnRates()
    return length.schedule(config, optimizer.param_groups[0]["initial_lr"] if adopted else None)


def _compile(
    module: nn.Module, units: list[Unit], config: RunConfig, device: torch.device, *, sharded: bool, say: Say
) -> list[nn.Module]:
    if not config.strategy.compile.enabled:
        return []
    reason = compiling.why_not(config.strategy.compile, device)
    if reason is not None:
        say(f"strategy.compile is on, but {reason}: training goes on without it")
        return []
    settings = config.strategy.compile
    if settings.scope == "auto" and units and config.precision.fp8.recipe != "none":
        # A whole model of written-out roundings takes minutes to compile; equal blocks are compiled once.
        settings = settings.model_copy(update={"scope": "block"})
    return compiling.compile_units(module, units, settings, sharded=sharded)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters, except those of modules that need fp32.

    A plain one stays the object that it is. A DTensor is replaced by another, everywhere where it is tied: what
    computes is its local tensor, and new `data` would change the format of the whole only.
    """
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with what had the number, so that it has it still
    for part in module.modules():
        for key, param in part._parameters.items():
            if param is None or isinstance(part, FP32_MODULES):
                continue
            if not is_sharded(param):
                param.data = param.data.to(dtype)
                continue
            if id(param) not in replaced:
                cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
                replaced[id(param)] = param, cast
            part._parameters[key] = replaced[id(param)][1]


def _round(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Cast parameters; returns, for each that has another format now, what it was before."""
    before = {name: param.data for name, param in module.named_parameters()}
    _cast(module, dtype)
    now = {param: before[name] for name, param in module.named_parameters()}
    return {param: whole for param, whole in now.items() if whole.dtype != param.dtype}


def _trainable(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    pairs = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not pairs:
        raise ModelError("no parameter of the model has requires_grad: there is nothing to train")
    return [name for name, _ in pairs], [param for _, param in pairs]


def _replicate(
    module: nn.Module, policy: Policy, config: RunConfig, world: World, *, elementwise: bool, leaves: bool
) -> tuple[Gradients | None, Views]:
    """`leaves`: gradients may stay what the backward pass makes them, where that is exact."""
    layout = world.layout
    rounds = policy.mixed and policy.master
    rounded = _round(module, policy.compute) if rounds else {}
    names, params = _trainable(module)
    if layout.replicas == 1 and not rounds:
        if any(is_sharded(param) for param in params):
            return None, ShardViews(names, params, elementwise=elementwise)
        return None, DirectViews(names, params)
    masters = [rounded.get(param) for param in params]
    # A checkpoint holds them as they were, on every layout alike.
    frozen = {param: data for param, data in rounded.items() if not param.requires_grad}
    alone = leaves and layout.size == 1 and config.train.clip_value is None
    if alone and is_one_pass(config.optim, [rounded.get(param, param) for param in params]):
        own = OwnGradients(params, policy.reduce)
        return own, RoundedViews(names, params, own, masters, frozen)
    buckets = _buckets(params, policy, config, world)
    return buckets, BucketViews(names, params, buckets, masters, frozen, elementwise=elementwise)


def _buckets(params: list[nn.Parameter], policy: Policy, config: RunConfig, world: World) -> GradientBuckets:
    # Both are made here, on every rank: a stage of a pipeline may have no experts, where another has some.
    dense = world.group("dp_replicate", "dp_shard", "ep", "cp")
    of_experts = world.group("dp_replicate", "dp_shard", "cp")
    return GradientBuckets(
        params,
        dtype_of=lambda param: policy.reduce if param.dtype == policy.compute else param.dtype,
        group_of=lambda param: of_experts if _is_expert(param) else dense,
        bucket_bytes=int(config.strategy.bucket_mb * 2**20),
    )


def _summing_buckets(
    params: list[nn.Parameter], policy: Policy, config: RunConfig, world: World
) -> GradientBuckets | None:
    """Buckets where gradients are summed over ranks, or over the stages that share a weight; None elsewhere."""
    if world.layout.replicas == 1 and world.layout.pp == 1:
        return None
    return _buckets(params, policy, config, world)


def _offloading(config: RunConfig, world: World, policy: Policy, say: Say, *, elementwise: bool) -> Offloading | None:
    if not config.strategy.offload.on:
        return None
    if not elementwise:
        raise ModelError("strategy.offload updates weights in parts, and this optimizer looks at whole parameters")
    return Offloading(config, world, policy, say)


def _is_expert(param: nn.Parameter) -> bool:
    """Whether a parameter is one of the experts that ranks share out among them."""
    return is_sharded(param) and any(name in ("ep", "ep_tp") for name in param.device_mesh.mesh_dim_names or ())


def _measure_norm(views: Views, world: World, stages: Sequence[Stage]) -> None:
    """Tell the views how the squares of all ranks' gradients add up."""
    layout = world.layout
    if layout.tp == layout.ep == layout.pp == 1:
        spread = any(is_sharded(param) for param in views.params)
        views.norm_group = world.group("dp_shard", "cp") if spread else None
        return
    views.norm_group = world.everyone
    here = {stage.index for stage in stages}
    elsewhere = {name for stage in stages for name, holders in stage.tied.items() if holders[0] not in here}
    views.norm_weights = [
        0.0 if name in elsewhere else _parts(param) * layout.pp / layout.size
        for name, param in zip(views.names, views.params, strict=True)
    ]


def _parts(param: nn.Parameter) -> int:
    """Into how many parts a parameter is cut."""
    if not is_sharded(param):
        return 1
    cut = zip(param.device_mesh.shape, param.placements, strict=True)
    return prod(size for size, placement in cut if not placement.is_replicate())
