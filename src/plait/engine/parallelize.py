"""How a model is taken apart over the axes of a layout. Each technique is called from here, and knows no other.

[Note: techniques are imported where they are used]
Most of them bring DTensor, which a run that does not spread its model never needs: [Note: DTensor is loaded late].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from plait.config import CustomPipelineSchedule, RunConfig
from plait.distributed import (
    Attributes,
    Gradients,
    Initializer,
    InitializerChain,
    Pipeline,
    Replay,
    Stage,
    TensorOf,
    WrapUnit,
    find_shared_storage,
    gradient_hooks,
    is_legal,
    is_sharded,
    unregistered_tensors,
)
from plait.engine.loss import LossNormalizer, WeightedLoss
from plait.engine.master_weights import MasterWeights
from plait.engine.preparation import Preparation
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import class_of
from plait.torch_internals import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from plait.distributed import Stage

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
        shared = find_shared_storage(module, buffers=False)
        if shared is not None:
            raise ModelError(
                f"{shared[0]!r} and {shared[1]!r} share their memory without being one tensor, and would become two: "
                "register one of them, and take the other from it in the forward pass"
            )


def _refuse_references(module: nn.Module) -> None:
    name_of = {id(param): name for name, param in module.named_parameters()}
    for location, tensor in unregistered_tensors(module):
        if id(tensor) in name_of:
            raise ModelError(
                f"{location} holds the parameter {name_of[id(tensor)]!r} outside of the module that registers it, and "
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
    from plait.distributed import broadcast_costs, make_stages, measure_layers, plan_stages

    if world.layout.ep > 1:
        from plait.distributed import check_experts

        check_experts(module, world.layout.ep)  # while it is whole: a stage may have none
    options = config.strategy.pipeline
    costs = None
    if options.split == "time":
        if given.example is None:
            message = "'time' needs one micro-batch to measure, and there is none"
            remedy = "Pass example=… to plait.prepare, or write `split: parameters`."
            raise ConfigError(Problem("strategy.pipeline.split", message, remedy))
        costs = broadcast_costs(measure_layers(module, given.example, device=world.device), world.device, group)
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


def join_stages(stage_modules: Sequence[nn.Module], *, sharded: bool) -> nn.Module:
    """Several stages of this rank as one module. What two of them hold is one tensor, unless they are sharded."""
    from plait.distributed import tie_stages

    if not sharded:
        tie_stages(stage_modules)
    return StageSet(stage_modules)


def staged_steps(
    given: Preparation, stages: Stages, collectors: Sequence[Gradients], master_weights: MasterWeights
) -> StagedSteps:
    """What runs the stages; every rank must make it."""
    from plait.distributed import Pipeline, make_table

    config, world = given.config, given.world
    options, group = config.strategy.pipeline, world.group("pp")
    assert group is not None
    count = options.micro_batches or config.batch.accumulation
    if count is not None and isinstance(options.schedule, CustomPipelineSchedule):
        make_table(options.schedule, world.layout.pp, count)  # looks through it, before the first step
    # Recomputation runs a block again in its backward pass; in halves it would run twice.
    splits = config.strategy.recompute.mode == "none"
    pipeline = Pipeline(stages, schedule=options.schedule, group=group, device=world.device, splits_backward=splits)
    # Only sharded stages have collectors of their own; buckets listen to the parameters, whichever stage they are in.
    of_stage = {stage.index: collector for stage, collector in zip(stages, collectors, strict=bool(collectors))}
    find = (lambda _stage, name: master_weights.gradient_of(name)) if master_weights.in_buckets else None
    return StagedSteps(pipeline, of_stage, find)


def shard_module(given: Preparation, module: nn.Module, units: list[WrapUnit], experts: list[nn.Module]) -> Gradients:
    """Shard a model, or a stage of one, as the ZeRO stage says."""
    from plait.distributed import fsdp

    config, world = given.config, given.world
    strategy = config.strategy
    options = fsdp.ShardingOptions(
        strategy.stage, strategy.reshard_after_forward, strategy.forward_prefetch, strategy.backward_prefetch
    )
    shared = None
    if world.layout.ep * world.layout.tp > 1:
        from plait.distributed import expert_placement

        # Made on every rank: a stage of a pipeline may have no experts, where another has some.
        peers = world.sharding_mesh("dp_shard", "cp")
        shared = fsdp.ExpertModules(experts, peers, expert_placement(peers.shape[-1]))
    mesh = world.sharding_mesh("dp_shard", "ep", "cp")
    return fsdp.apply_fsdp(
        module,
        units,
        mesh=mesh,
        placement=_shard_placement(mesh) if world.layout.tp > 1 else None,
        policy=given.policy,
        options=options,
        experts=shared,
        as_one_unit=_is_one_message(module, config),
    )


def carry_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Let the whole parameters that a sharded model gathers have the attributes of those that they stand for."""
    if attributes:
        from plait.distributed import fsdp

        fsdp.carry_attributes(module, frozenset(key for by_name in attributes.values() for key in by_name))


def _shard_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Along which dimension to shard a parameter over a mesh, where tensor parallelism may have cut it already."""
    from torch.distributed.tensor import Shard

    from plait.distributed import sharding_dim

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


def rebind_initializer(initializer: Initializer, module: nn.Module) -> Initializer:
    """An initializer of a model, as that of a part or a copy of it."""
    if isinstance(initializer, InitializerChain):
        return InitializerChain(
            rebind_initializer(initializer.first, module), rebind_initializer(initializer.second, module)
        )
    if isinstance(initializer, Replay):
        return initializer.onto(module)
    owner = getattr(initializer, "__self__", None)
    # Sharding gives a module a class of its own, derived from the one it had.
    alike = isinstance(module, type(owner)) or isinstance(owner, type(module))
    if isinstance(owner, nn.Module) and owner is not module and alike:
        return getattr(module, initializer.__name__)  # type: ignore[no-any-return]
    return initializer


Cut = Callable[[Any], Any]


def apply_axes(given: Preparation, module: nn.Module, *, stage: bool) -> tuple[Cut | None, list[nn.Module]]:
    """Spread layers, sequences and experts over ranks; returns what cuts a micro-batch, and what holds experts."""
    strategy, world = given.config.strategy, given.world
    tensor, context = world.submesh("tp"), world.submesh("cp")
    cut: Cut | None = None
    experts: list[nn.Module] = []
    alike = None
    if tensor is not None:
        from plait.distributed import apply_tensor_parallel, experts_are_replicated, load_tensor_plan

        options = strategy.tensor
        plan = load_tensor_plan(options.plan, module)
        alike = experts_are_replicated(module, plan, sequence=options.sequence_parallel, stage=stage)
        apply_tensor_parallel(
            module,
            tensor,
            plan=plan,
            sequence=options.sequence_parallel,
            async_tp=options.async_tp,
            stage=stage,
        )
    if context is not None:
        from plait.distributed import apply_context_parallel, share_router_sums, split_batch

        attention = strategy.context.kind
        apply_context_parallel(module, context, kind=attention)
        share_router_sums(module, context)
        accepted = inspect.signature(module.forward).parameters
        named = "positions" if "positions" in accepted else "position_ids"
        real = "real" if "real" in accepted else None
        rank, size = world.coordinate("cp"), world.layout.cp
        cut = partial(split_batch, rank=rank, size=size, kind=attention, positions_as=named, real_as=real)
    shared = world.mesh_of("ep", "tp")
    if shared is not None:
        from plait.distributed import apply_expert_parallel

        experts = list(apply_expert_parallel(module, shared, alike=alike, stage=stage).values())
    if tensor is not None:
        _log_replicated_share(module, tensor.size(), given.log)
    return cut, experts


def _log_replicated_share(module: nn.Module, ranks: int, log: Callable[[str], None]) -> None:
    """Log a warning if tensor parallelism leaves most parameters replicated."""
    params = list(module.parameters())
    whole = [param for param in params if not is_sharded(param) or all(p.is_replicate() for p in param.placements)]
    share = sum(param.numel() for param in whole) / max(sum(param.numel() for param in params), 1)
    if share > _MOSTLY_WHOLE:
        name = type(module).__name__.removeprefix("FSDP")
        log(
            f"strategy.layout.tp: {ranks} splits little of this {name}: {share:.0%} of its parameters "
            "stay whole on each rank, since its plan names no more layers; write strategy.tensor.plan, or use "
            "strategy.zero instead"
        )


# Steps of a model whose layers follow each other over ranks.


ReadLoss = Callable[[Any, int], WeightedLoss]
"""(the model's answer, the number of the micro-batch) → its loss."""


class StageSet(nn.Module):
    """Several stages of one model on one rank, under the names that their tensors have in the whole model."""

    def __init__(self, stage_modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stage_modules)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages; those that hold layers of several stages come once for each."""
        for stage_module in self.parts:
            yield from stage_module.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """A module of the first stage that has it."""
        *others, last = self.parts
        for stage_module in others:
            with suppress(AttributeError):
                return stage_module.get_submodule(target)
        return last.get_submodule(target)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all stages; one that two of them hold comes once, as the first has it."""
        seen = set[str]()
        for stage_module in self.parts:
            for name, param in stage_module.named_parameters(*args, **kwargs):
                if name not in seen:
                    yield name, param
                seen.add(name)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers of all stages."""
        for stage_module in self.parts:
            yield from stage_module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors of all stages."""
        backwards = list(self.parts)[::-1]  # what two of them hold is the first one's
        return {
            name: value
            for stage_module in backwards
            for name, value in stage_module.state_dict(*args, **kwargs).items()
        }


class StagedSteps:
    """Runs micro-batches through a pipeline, and sees to their losses."""

    def __init__(self, pipeline: Pipeline, collectors: Mapping[int, Gradients], find_gradient: TensorOf | None) -> None:
        """`collectors`: by stage, what collects its gradients, where that wants to be told of each pass.

        `find_gradient` finds a gradient that is not in its parameter's `.grad`.
        """
        self.pipeline = pipeline
        self._collectors = collectors
        self._find_gradient = find_gradient

    def at_least(self, count: int) -> int:
        """As many micro-batches, or the next larger number that the schedule can work with."""
        while not is_legal(self.pipeline.schedule, self.pipeline.ranks, count):
            count += 1
        return count

    def train(
        self,
        ready: Sequence[Any],
        inputs: Sequence[Any],
        read_loss: ReadLoss,
        normalizer: LossNormalizer,
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        """Forward and backward over all micro-batches of a step; `inputs` is what of each the model gets."""
        count = len(ready)
        normalizer.expect(_targets(ready[0]) * count)

        def loss_of(outputs: Any, _inputs: Any, index: int) -> Tensor:
            loss = read_loss(outputs, index)
            normalizer.add(loss, micro_batches=count)
            return scale(normalizer.scaled(loss))

        def before_backward(stage: Stage, last: bool) -> None:
            self._collectors[stage.index].before_backward(last=last)

        self.pipeline.tied.refresh()
        self.pipeline.step(inputs, loss_of, before_backward if self._collectors else None)
        if not self.pipeline.has_last:
            normalizer.add_nothing()

    def finish(self) -> None:
        """Add up the gradients of weights that several stages hold."""
        self.pipeline.tied.sum(self._find_gradient)

    def answer(self, ready: Any) -> Any:
        """What the model says to one micro-batch, where the last stage is; None elsewhere."""
        self.pipeline.tied.refresh()
        answers = self.pipeline.forward([ready])
        return answers[0] if answers else None


def _targets(inputs: Any) -> int:
    """About how many targets a micro-batch has: as many as its largest tensor of whole numbers, or its first's rows."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    whole = [leaf.numel() for leaf in tensors if not leaf.is_floating_point()]
    return max(whole, default=len(tensors[0]) if tensors else 1)
