"""How a model is taken apart over the axes of a layout. Each technique is called from here, and knows no other.

[Note: techniques are imported where they are used]
Most of them bring DTensor, which a run that does not spread its model never needs: [Note: DTensor is loaded late].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from plait.config import PipelineSchedulePart, RunConfig
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import class_of
from plait.parallel import (
    Attributes,
    Gradients,
    Initializer,
    InTurn,
    Replay,
    Unit,
    gradient_hooks,
    held_elsewhere,
    memory_in_common,
)
from plait.strategy.native.views import Views
from plait.strategy.preparation import Preparation
from plait.world import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from plait.parallel import Stage
    from plait.strategy.native.staged import StagedSteps

Stages = Sequence["Stage"]
"""The pipeline stages of this rank; none where there is no pipeline."""

_MOSTLY_WHOLE = 0.5
"""Above this share of whole parameters tensor parallelism is not what somebody expects who asks for it."""
_ONE_MESSAGE = 25 << 20
"""Bytes: as much as DistributedDataParallel sends at once."""


def refuse_hooks(given: Preparation, module: nn.Module, *, whole_steps: bool = True) -> None:
    """Refuse gradient hooks where they would not see the gradient of a step.

    [Note: what a gradient hook may see] A hook gets what one backward pass gives on one rank. Only where that is the
    step's gradient, divided by the step's number of targets, does the hook do the same as in a plain loop.
    Without `whole_steps`, a loop of the user's own sums as many micro-batches as it likes.
    """
    config, world = given.config, given.world
    accumulation = given.accumulation if whole_steps else 1
    if world.size > 1:
        reason = f"{world.size} ranks sum their gradients"
    elif accumulation > 1:
        reason = f"{accumulation} micro-batches are summed (batch.accumulation)"
    elif config.strategy.offload.on:
        reason = "strategy.offload moves the parameter"
    elif config.strategy.graphs is True:
        reason = "strategy.graphs replays the backward pass without Python"
    else:
        return
    for name, hook in gradient_hooks(module).items():
        raise ModelError(
            f"the parameter {name!r} has a gradient hook ({hook}), which would not see the step's whole gradient: "
            f"{reason}. Write what it does into the forward pass (`weight * mask + (weight * (1 - mask)).detach()` for "
            "a mask), or train on one process with one micro-batch per step, without offload and graphs"
        )


def refuse_exchange(given: Preparation, module: nn.Module) -> None:
    """Refuse a model that would keep the parameters from before they are exchanged for others."""
    world, strategy = given.world, given.config.strategy
    layout = world.layout
    sharded = strategy.stage > 0 and world.size > 1
    exchanged = sharded or layout.tp * layout.ep * layout.pp > 1 or strategy.offload.on
    if exchanged:
        _refuse_references(module)
    if exchanged or given.policy.mixed or any(param.device != world.device for param in module.parameters()):
        shared = memory_in_common(module, buffers=False)
        if shared is not None:
            raise ModelError(
                f"{shared[0]!r} and {shared[1]!r} share their memory without being one tensor, and would become two: "
                "register one of them, and take the other from it in the forward pass"
            )


def _refuse_references(module: nn.Module) -> None:
    name_of = {id(param): name for name, param in module.named_parameters()}
    for place, tensor in held_elsewhere(module):
        if id(tensor) in name_of:
            raise ModelError(
                f"{place} holds the parameter {name_of[id(tensor)]!r} outside of the module that registers it, and "
                "would keep the tensor from before it is sharded: get it from its module in the forward pass, or "
                "train without strategy.zero, offload and tensor, expert and pipeline ranks"
            )
    for name, param in module.named_parameters():
        if class_of(param) is not nn.Parameter and not is_sharded(param):
            raise ModelError(
                f"the parameter {name!r} is a {type(param).__name__}, a class of its own, which a shard of it would "
                "not be: use nn.Parameter, or train without strategy.zero, offload and tensor, expert and pipeline "
                "ranks"
            )


def split_stages(given: Preparation, module: nn.Module) -> Stages:
    """This rank's stages of a pipeline; none where there is no pipeline. The module is reduced to the last of them.

    Where each of them will be sharded, a weight that two of them hold is a tensor of each.
    """
    config, world, sharded = given.config, given.world, given.sharded
    group = world.group("pp")
    if group is None:
        return []
    from plait.parallel import agree, make_stages, measure_layers, plan_stages

    if world.layout.ep > 1:
        from plait.parallel import check_experts

        check_experts(module, world.layout.ep)  # while it is whole: a stage may have none
    options = config.strategy.pipeline
    costs = None
    if options.split == "time":
        if given.example is None:
            message = "'time' needs one micro-batch to measure, and there is none"
            remedy = "Pass example=… to plait.prepare, or write `split: parameters`."
            raise ConfigError(Problem("strategy.pipeline.split", message, remedy))
        costs = agree(measure_layers(module, given.example, device=world.device), world.device, group)
    plan = plan_stages(
        module,
        ranks=world.layout.pp,
        schedule=options.schedule,
        virtual=options.stages_per_rank,
        split=options.split,
        costs=costs,
    )
    twice = plan.twice_on_a_rank() if sharded else []
    if twice and config.strategy.offload.on:  # said by every rank, or those without it would wait for the others
        message = f"{options.schedule} puts two stages on one rank that both hold {twice[0]}, which offload knows once"
        remedy = "Leave strategy.offload out, or use another schedule, such as interleaved_1f1b."
        raise ConfigError(Problem("strategy.pipeline.schedule", message, remedy))
    return make_stages(plan, world.coordinate("pp"), one_copy=not sharded)


def joined(parts: Sequence[nn.Module], *, sharded: bool) -> nn.Module:
    """Several stages of this rank as one module. What two of them hold is one tensor, unless they are sharded."""
    from plait.parallel import tie_stages
    from plait.strategy.native.staged import StageSet

    if not sharded:
        tie_stages(parts)
    return StageSet(parts)


def staged_steps(given: Preparation, stages: Stages, collectors: Sequence[Gradients], views: Views) -> StagedSteps:
    """What runs the stages; every rank must make it."""
    from plait.parallel import Pipeline, make_table
    from plait.strategy.native.staged import StagedSteps

    config, world = given.config, given.world
    options, group = config.strategy.pipeline, world.group("pp")
    assert group is not None
    count = options.micro_batches or config.batch.accumulation
    if count is not None and isinstance(options.schedule, PipelineSchedulePart):
        make_table(options.schedule, world.layout.pp, count)  # looks through it, before the first step
    # Recomputation runs a block again in its backward pass; in halves it would run twice.
    splits = config.strategy.recompute.mode == "none"
    pipeline = Pipeline(stages, schedule=options.schedule, group=group, device=world.device, splits_backward=splits)
    # Only sharded stages have collectors of their own; buckets listen to the parameters, whichever stage they are in.
    of_stage = {stage.index: collector for stage, collector in zip(stages, collectors, strict=bool(collectors))}
    find = (lambda _stage, name: views.gradient_of(name)) if views.in_buckets else None
    return StagedSteps(pipeline, of_stage, find)


def shard_part(given: Preparation, part: nn.Module, units: list[Unit], experts: list[nn.Module]) -> Gradients:
    """Shard a model, or a stage of one, as the ZeRO stage says."""
    from plait.parallel import zero

    config, world = given.config, given.world
    strategy = config.strategy
    options = zero.ShardingOptions(
        strategy.stage, strategy.reshard_after_forward, strategy.forward_prefetch, strategy.backward_prefetch
    )
    shared = None
    if world.layout.ep * world.layout.tp > 1:
        from plait.parallel import expert_placement

        # Made on every rank: a stage of a pipeline may have no experts, where another has some.
        peers = world.sharding_mesh("dp_shard", "cp")
        shared = zero.Experts(experts, peers, expert_placement(peers.shape[-1]))
    mesh = world.sharding_mesh("dp_shard", "ep", "cp")
    return zero.shard(
        part,
        units,
        mesh=mesh,
        placement=_cut_once_more(mesh) if world.layout.tp > 1 else None,
        policy=given.policy,
        options=options,
        experts=shared,
        at_once=_is_one_message(part, config),
    )


def carry_attributes(part: nn.Module, attributes: Attributes) -> None:
    """Let the whole parameters that a sharded model gathers have the attributes of those that they stand for."""
    if attributes:
        from plait.parallel import zero

        zero.carry_attributes(part, frozenset(key for own in attributes.values() for key in own))


def _cut_once_more(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Along which dimension to shard a parameter over a mesh, where tensor parallelism may have cut it already."""
    from torch.distributed.tensor import Shard

    from plait.parallel import sharding_dim

    shards = mesh.shape[-1]
    return lambda param: Shard(sharding_dim(param, shards))


def _is_one_message(model: nn.Module, config: RunConfig) -> bool:
    """Whether a model is so small that gathering it at once costs less than unit by unit.

    Below stage 3 all of it is whole during a step anyway, so units only decide how many messages there are.
    """
    strategy = config.strategy
    as_asked = "wrap" in strategy.model_fields_set or strategy.forward_prefetch or strategy.backward_prefetch
    if strategy.stage == 3 or as_asked or strategy.offload.on or strategy.layout.pp > 1:
        return False
    return sum(param.numel() * param.itemsize for param in model.parameters()) <= _ONE_MESSAGE


def rebound(initializer: Initializer, part: nn.Module) -> Initializer:
    """An initializer of a model, as that of a part or a copy of it."""
    if isinstance(initializer, InTurn):
        return InTurn(rebound(initializer.first, part), rebound(initializer.second, part))
    if isinstance(initializer, Replay):
        return initializer.onto(part)
    owner = getattr(initializer, "__self__", None)
    # Sharding gives a module a class of its own, derived from the one it had.
    alike = isinstance(part, type(owner)) or isinstance(owner, type(part))
    if isinstance(owner, nn.Module) and owner is not part and alike:
        return getattr(part, initializer.__name__)  # type: ignore[no-any-return]
    return initializer


Cut = Callable[[Any], Any]


def spread_axes(given: Preparation, module: nn.Module, *, stage: bool) -> tuple[Cut | None, list[nn.Module]]:
    """Spread layers, sequences and experts over ranks; returns what cuts a micro-batch, and what holds experts."""
    strategy, world = given.config.strategy, given.world
    tensor, context = world.submesh("tp"), world.submesh("cp")
    cut: Cut | None = None
    experts: list[nn.Module] = []
    alike = None
    if tensor is not None:
        from plait.parallel import apply_tensor_parallel, plan_of, stays_whole

        options = strategy.tensor
        plan = plan_of(options.plan, module)
        alike = stays_whole(module, plan, sequence=options.sequence_parallel, stage=stage)
        apply_tensor_parallel(
            module,
            tensor,
            plan=plan,
            sequence=options.sequence_parallel,
            async_tp=options.async_tp,
            stage=stage,
        )
    if context is not None:
        from plait.parallel import apply_context_parallel, share_rows, split_batch

        kind = strategy.context.kind
        apply_context_parallel(module, context, kind=kind)
        share_rows(module, context)
        accepted = inspect.signature(module.forward).parameters
        named = "positions" if "positions" in accepted else "position_ids"
        real = "real" if "real" in accepted else None
        rank, size = world.coordinate("cp"), world.layout.cp
        cut = partial(split_batch, rank=rank, size=size, kind=kind, positions_as=named, real_as=real)
    shared = world.mesh_of("ep", "tp")
    if shared is not None:
        from plait.parallel import apply_expert_parallel

        experts = list(apply_expert_parallel(module, shared, alike=alike, stage=stage).values())
    if tensor is not None:
        _say_what_stays_whole(module, tensor.size(), given.say)
    return cut, experts


def _say_what_stays_whole(module: nn.Module, ranks: int, say: Callable[[str], None]) -> None:
    """Say where tensor parallelism leaves each rank with most of the model."""
    params = list(module.parameters())
    whole = [param for param in params if not is_sharded(param) or all(p.is_replicate() for p in param.placements)]
    share = sum(param.numel() for param in whole) / max(sum(param.numel() for param in params), 1)
    if share > _MOSTLY_WHOLE:
        name = type(module).__name__.removeprefix("FSDP")
        say(
            f"strategy.layout.tp: {ranks} splits little of this {name}: {share:.0%} of its parameters "
            "stay whole on each rank, since its plan names no more layers; write strategy.tensor.plan, or use "
            "strategy.zero instead"
        )
