"""All techniques on one page, in the order in which they must be applied.

build on meta → pipeline stages → tensor and sequence → context → experts → recompute → compile → shard or
replicate → give values → optimizer

`docs/architecture.md` says why in this order; the numbers below are those of its list.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait.config import RunConfig, check_graphs, may_record
from plait.errors import ModelError
from plait.ops import choose_attention
from plait.optim import (
    Adoption,
    GroupSpec,
    OnePassAdam,
    OptimizerSource,
    OwnRates,
    Schedule,
    ViewGroup,
    build_optimizer,
    build_schedule,
    is_elementwise,
    split_groups,
)
from plait.parallel import (
    Gradients,
    Unit,
    apply_recompute,
    as_one,
    attributes_of,
    compiling,
    find_units,
    give_attributes,
    materialize,
    offload_activations,
    tile_layers,
    train_without_caches,
)
from plait.precision import Fp8Linear, LossScaler, Policy, make_policy, scale_by_earlier_steps
from plait.strategy.native.building import ModelSource, build_module, load_pretrained_into, warn_of_smaller_range
from plait.strategy.native.casting import cast_parameters
from plait.strategy.native.engine import NativeEngine
from plait.strategy.native.forward import Say
from plait.strategy.native.fusing import use_fp8, use_fp8_at_the_head, use_kernels
from plait.strategy.native.loss import LossFunction
from plait.strategy.native.norms import weigh_norms
from plait.strategy.native.offloaded import OffloadedUpdater, OffloadedViews
from plait.strategy.native.offloading import Offloading
from plait.strategy.native.recomputing import choose_ways, count_whole, gradients_come_late
from plait.strategy.native.recorded import Recording
from plait.strategy.native.replicated import replicate
from plait.strategy.native.spread import (
    carry_attributes,
    joined,
    rebound,
    refuse_exchange,
    refuse_hooks,
    shard_part,
    split_stages,
    spread_axes,
    staged_steps,
)
from plait.strategy.native.update import Updater
from plait.strategy.native.views import ShardViews, Views, trainable
from plait.torch_internals import has_values
from plait.world import World, make_deterministic, seed_everything


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
    inputs; only `recompute: auto` and `pipeline.split: time` look at it.
    """
    strategy, policy, device = config.strategy, make_policy(config.precision), world.device
    shards = world.layout.dp_shard * world.layout.ep * world.layout.cp
    sharded = strategy.stage > 0 and (shards > 1 or strategy.offload.params != "none")
    whole_steps = engine is NativeEngine
    check_graphs(config, ranks=world.size, accumulation=accumulation, whole_steps=whole_steps)
    described = model is None and loss_function is None
    by_itself = whole_steps and may_record(config, ranks=world.size, accumulation=accumulation, described=described)
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    choose_attention(strategy.attention, device)

    # ---- 1. build
    module, initializer = build_module(config, model, say=say)
    refuse_hooks(config, world, module, accumulation=accumulation if whole_steps else 1)
    refuse_exchange(config, world, module)
    attributes = attributes_of(module)
    warn_of_smaller_range(config, module, say)
    if initializer is None and world.everyone is not None:
        materialize.copy_from_main(module, world.everyone, device)
    adopted = None if optimizer is None else _adopt(optimizer, module, say)
    elementwise = is_elementwise(config.optim) if adopted is None else adopted.is_elementwise
    # Of the whole model: a pattern may fit what only other ranks will hold.
    specs = split_groups(module, config.optim) if adopted is None else adopted.specs
    skeleton = copy.deepcopy(module) if world.layout.pp > 1 and initializer is not None else module
    use_fp8_at_the_head(module, config)  # of the whole model: one stage of several has it
    counted = count_whole(module, example, config=config, world=world)

    # ---- 2. pipeline stages; 3. tensor, context and expert ranks
    stages = split_stages(module, config, world, example, sharded=sharded)
    parts = [stage.module for stage in stages] or [module]
    spread = [spread_axes(part, config, world, stage=bool(stages), say=say) for part in parts]

    # ---- 4. units and faster layers; 5. tiles, recompute, offload of activations; 6. compile
    all_units = [find_units(part, strategy.wrap) for part in parts]
    eight: dict[str, Fp8Linear] = {}
    for part, units in zip(parts, all_units, strict=True):
        eight |= use_fp8(part, units, config, device, say)
        use_kernels(part, config, device, say)
    # Loops of other kinds may look at gradients, and sum as many of them as they like.
    leaves = whole_steps and adopted is None and accumulation == 1 and not stages
    late = leaves and not sharded and gradients_come_late(config, world, policy)
    ways = choose_ways(
        parts,
        all_units,
        example,
        config=config,
        world=world,
        late=late,
        whole=counted,
        accumulation=accumulation,
        say=say,
    )
    compiled = []
    for part, units, chosen in zip(parts, all_units, ways, strict=True):
        tile_layers(part, strategy.tiles)
        if apply_recompute(units, strategy.recompute, ways=chosen):
            train_without_caches(part)
        offload_activations(units, strategy.offload.activations, device)  # around recomputing, whose inputs travel
        compiled += _compile(part, units, config, device, sharded=sharded or bool(stages), say=say)

    # ---- 7. cast and shard; 8. give storage and values
    collectors: list[Gradients] = []
    away = _offloading(config, world, policy, say, elementwise=elementwise)
    keep = None if away is None else away.keep
    for part, units, (_, experts) in zip(parts, all_units, spread, strict=True):
        if away is not None and initializer is None:
            away.set_aside(part)
        if not policy.master or (away is not None and away.rounds):
            cast_parameters(part, policy.compute)
        if sharded:
            collectors.append(shard_part(part, units, experts, config, policy, world))
            carry_attributes(part, attributes)
        if initializer is None:
            part.to(device)
        else:
            materialize.give_storage(part, device, then=None if away is None else away.take_params)
        give_attributes(part, attributes)
        if away is not None:
            away.take_aside(part)
            if len(parts) == 1:  # else parts may come to share parameters yet
                away.open(part, all_units)
        if initializer is not None:
            materialize.initialize(part, rebound(initializer, part), seed=config.seed, device=device, keep=keep)
    whole = parts[0] if len(parts) == 1 else joined(parts, sharded=sharded)
    if away is not None and len(parts) > 1:
        away.open(whole, all_units)
    if model is None:
        load_pretrained_into(skeleton, whole, config, keep=keep, say=say)
    if stages and hasattr(skeleton, "flops_per_token"):
        whole.flops_per_token = skeleton.flops_per_token  # of the model, not of a stage

    # ---- 9. views: what the optimizer sees
    views: Views
    gradients: Gradients | None
    if away is not None:
        gradients, views = away.views(whole, parts, all_units, collectors, compiled)
    elif sharded:
        gradients, views = as_one(collectors), ShardViews(*trainable(whole), elementwise=elementwise)
    else:
        gradients, views = replicate(whole, policy, config, world, elementwise=elementwise, leaves=leaves)
    staged = staged_steps(stages, collectors, views, config, world) if stages else None
    weigh_norms(views, world, stages)

    # ---- 10. optimizer, schedule, scaler
    updating = _optimizer(config, views, specs, adopted, in_place=away is None)
    seed_everything(config.seed, world.rank // world.layout.tp)  # those along `tp` must drop the same elements
    if isinstance(views, OffloadedViews):
        views.store.attach(updating)
    updater = (Updater if away is None else OffloadedUpdater)(
        views,
        updating,
        _schedule(config, length or Length(), updating, adopted=adopted is not None),
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
        recording=_recording(config, world, views, say, by_itself=by_itself),
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


def _optimizer(
    config: RunConfig, views: Views, specs: Sequence[GroupSpec], adopted: Adoption | None, *, in_place: bool
) -> Optimizer:
    """The optimizer over the views: the user's own where one was given, else as `config.optim` says."""
    by_name = dict(zip(views.names, views.tensors, strict=True))
    if adopted is not None:
        return adopted.onto(by_name)
    groups = [
        ViewGroup(names, [by_name[name] for name in names], spec.options)
        for spec in specs
        if (names := tuple(name for name in spec.names if name in by_name))
    ]
    optimizer = build_optimizer(config.optim, groups, in_place=in_place)
    if isinstance(optimizer, OnePassAdam):
        optimizer.publish_into(views.rooms())
    return optimizer


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


def _recording(config: RunConfig, world: World, views: Views, say: Say, *, by_itself: bool) -> Recording | None:
    """Whether both passes of a step are recorded: not on other devices, and not by a plan."""
    if not (config.strategy.graphs is True or by_itself) or any(not has_values(param) for param in views.params):
        return None
    if world.device.type == "cuda":
        return "where it pays" if by_itself else "always"
    if not by_itself:
        say("strategy.graphs is on, but there is no CUDA device: training goes on without it")
    return None


def _offloading(config: RunConfig, world: World, policy: Policy, say: Say, *, elementwise: bool) -> Offloading | None:
    if not config.strategy.offload.on:
        return None
    if not elementwise:
        raise ModelError("strategy.offload updates weights in parts, and this optimizer looks at whole parameters")
    return Offloading(config, world, policy, say)
