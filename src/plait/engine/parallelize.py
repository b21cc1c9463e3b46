"""Apply the axes of a layout (tensor, context, expert, pipeline, FSDP) to a model.

The techniques, in `distributed`, do not call one another: this file combines them.

[Note: techniques are imported where they are used]
Most of them import DTensor, which a run without sharding never needs: [Note: DTensor is loaded late].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

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
"""The pipeline stages of this rank; empty without a pipeline."""

_MOSTLY_REPLICATED = 0.5
"""Above this share of replicated parameters, tensor parallelism has hardly an effect."""
_ONE_MESSAGE = 25 << 20
"""Bytes: the bucket size of DistributedDataParallel."""


def refuse_hooks(given: Preparation, module: nn.Module, *, whole_steps: bool = True) -> None:
    """Raise `ModelError` if a parameter has a gradient hook that would not receive the gradient of the whole step.

    [Note: what a gradient hook may see] A hook receives the gradient of one backward pass on one rank. It has the same
    effect as in a plain loop only if that is the gradient of the whole step, divided by the step's number of targets.
    With `whole_steps` false, a custom loop decides how many micro-batches it accumulates, so `accumulation` is ignored.
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
            f"the parameter {name!r} has a gradient hook ({hook}), which would not receive the step's full gradient: "
            f"{reason}. Do it in the forward pass instead (`weight * mask + (weight * (1 - mask)).detach()` for a "
            "mask), or train on one process with one micro-batch per step, without offload and graphs"
        )


def refuse_other_references(given: Preparation, module: nn.Module) -> None:
    """Raise `ModelError` if the model refers to a parameter outside of its module, and the parameter will be replaced.

    Sharding and offload replace parameters; such a reference would keep the old tensor.
    """
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
                f"{shared[0]!r} and {shared[1]!r} share memory without being the same tensor, and would be separated: "
                "register one of them, and derive the other from it in the forward pass"
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
    """Return this rank's pipeline stages; empty without a pipeline. The module itself becomes the last of them.

    If stages will be sharded, a weight that two of this rank's stages share becomes a separate tensor in each.
    """
    config, world, sharded = given.config, given.world, given.sharded
    group = world.group("pp")
    if group is None:
        return []
    from plait.distributed import broadcast_costs, make_stages, measure_layers, plan_stages

    if world.layout.ep > 1:
        from plait.distributed import check_experts

        check_experts(module, world.layout.ep)  # on the full model: a stage may have no experts
    options = config.strategy.pipeline
    costs = None
    if options.split == "time":
        if given.example is None:
            message = "'time' needs one micro-batch to measure, and none is given"
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
        example=given.example,
    )
    twice = plan.twice_on_a_rank() if sharded else []
    if twice and config.strategy.offload.on:  # every rank raises it: the others would hang in the next collective
        message = (
            f"{options.schedule} puts two stages that share {twice[0]} on one rank, which offload does not support"
        )
        remedy = "Leave strategy.offload out, or use another schedule, such as interleaved_1f1b."
        raise ConfigError(Problem("strategy.pipeline.schedule", message, remedy))
    return make_stages(plan, world.coordinate("pp"), one_copy=not sharded)


def join_stages(stage_modules: Sequence[nn.Module], *, sharded: bool) -> nn.Module:
    """Return several stages of this rank as one module. A shared weight becomes one tensor if `sharded` is false."""
    from plait.distributed import tie_stages

    if not sharded:
        tie_stages(stage_modules)
    return StageSet(stage_modules)


def staged_steps(
    given: Preparation, stages: Stages, collectors: Sequence[Gradients], master_weights: MasterWeights
) -> StagedSteps:
    """Return an object that runs micro-batches through the pipeline stages. Every rank must call it."""
    from plait.distributed import Pipeline, make_table

    config, world = given.config, given.world
    options, group = config.strategy.pipeline, world.group("pp")
    assert group is not None
    count = options.micro_batches or config.batch.accumulation
    if count is not None and isinstance(options.schedule, CustomPipelineSchedule):
        make_table(options.schedule, world.layout.pp, count)  # checks the schedule before the first step
    # A split backward computes the gradients of inputs and of weights separately. With recomputation, each of the two
    # would run a block's forward pass again.
    splits = config.strategy.recompute.mode == "none"
    pipeline = Pipeline(stages, schedule=options.schedule, group=group, device=world.device, splits_backward=splits)
    # Only sharded stages have one gradient collector each; gradient buckets hook the parameters of all stages at once.
    of_stage = {stage.index: collector for stage, collector in zip(stages, collectors, strict=bool(collectors))}
    find = (lambda _stage, name: master_weights.gradient_of(name)) if master_weights.buckets is not None else None
    return StagedSteps(pipeline, of_stage, find)


def shard_module(given: Preparation, module: nn.Module, units: list[WrapUnit], experts: list[nn.Module]) -> Gradients:
    """Shard a model, or a pipeline stage, with `fully_shard` for the ZeRO stage; return its gradient collector."""
    from plait.distributed import fsdp

    config, world = given.config, given.world
    strategy = config.strategy
    options = fsdp.ShardingOptions(
        strategy.stage, strategy.reshard_after_forward, strategy.forward_prefetch, strategy.backward_prefetch
    )
    shared = None
    if world.layout.ep * world.layout.tp > 1:
        from plait.distributed import expert_placement

        # Created on every rank: one pipeline stage may have experts, and another none.
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
    """Set the Python attributes of the original parameters also on the unsharded parameters of a sharded model."""
    if attributes:
        from plait.distributed import fsdp

        fsdp.carry_attributes(module, frozenset(key for by_name in attributes.values() for key in by_name))


def _shard_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Return a function that chooses the dim for FSDP to shard, for parameters that `tp` may have sharded already."""
    from torch.distributed.tensor import Shard

    from plait.distributed import sharding_dim

    shards = mesh.shape[-1]
    return lambda param: Shard(sharding_dim(param, shards))


def _is_one_message(model: nn.Module, config: RunConfig) -> bool:
    """Whether a model is so small that one all-gather costs less than one per wrapped module.

    Below stage 3 all parameters are unsharded during a step anyway; wrapping decides only the number of messages.
    """
    strategy = config.strategy
    as_asked = "wrap" in strategy.model_fields_set or strategy.forward_prefetch or strategy.backward_prefetch
    if strategy.stage == 3 or as_asked or strategy.offload.on or strategy.layout.pp > 1:
        return False
    return sum(param.numel() * param.itemsize for param in model.parameters()) <= _ONE_MESSAGE


def rebind_initializer(initializer: Initializer, module: nn.Module) -> Initializer:
    """Return an initializer for `module`, a pipeline stage or copy of the model that `initializer` was made for."""
    if isinstance(initializer, InitializerChain):
        return InitializerChain(
            rebind_initializer(initializer.first, module), rebind_initializer(initializer.second, module)
        )
    if isinstance(initializer, Replay):
        return initializer.onto(module)
    # Not by class: `fully_shard` and pipeline stages give each module a class derived from its own.
    method = getattr(initializer, "__func__", None)
    name = getattr(method, "__name__", "")
    if method is not None and getattr(type(module), name, None) is method:
        return cast(Initializer, getattr(module, name))
    return initializer


Cut = Callable[[Any], Any]
"""From the inputs of a micro-batch to this rank's shard of them along `cp`."""


def apply_axes(given: Preparation, module: nn.Module, *, stage: bool) -> tuple[Cut | None, list[nn.Module]]:
    """Apply tensor, context and expert parallelism; return the function that shards a micro-batch, and the experts.

    The function is None without context parallelism. `stage`: the module is a pipeline stage.
    """
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

        experts = list(apply_expert_parallel(module, shared, replicated=alike, stage=stage).values())
    if tensor is not None:
        _log_sharded_share(module, tensor.size(), given.log)
    return cut, experts


def _log_sharded_share(module: nn.Module, ranks: int, log: Callable[[str], None]) -> None:
    """Log how many parameters tensor parallelism shards; if few, with a warning that names what is replicated."""
    from plait.distributed import replicated_parameters

    replicated = replicated_parameters(module)
    total = max(sum(param.numel() for param in module.parameters()), 1)
    share = sum(replicated.values()) / total
    name = type(module).__name__.removeprefix("FSDP")
    text = (
        f"strategy.layout.tp: {ranks} shards {1 - share:.0%} of the parameters of this {name}; each rank holds "
        f"{share + (1 - share) / ranks:.0%} of them"
    )
    if share > _MOSTLY_REPLICATED:
        largest = ", ".join(f"{key} ({count / total:.0%})" for key, count in list(replicated.items())[:4])
        text = (
            f"warning: {text}. Replicated on every rank are {largest}{', …' if len(replicated) > 4 else ''}; "
            "write strategy.tensor.plan, or use strategy.zero instead"
        )
    log(text)


ReadLoss = Callable[[Any, int], WeightedLoss]
"""(the model's outputs, the index of the micro-batch) → its loss."""


class StageSet(nn.Module):
    """The pipeline stages of one rank as one module; its tensors have the names that they have in the full model."""

    def __init__(self, stage_modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage_modules)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all stages; a container whose layers lie in several stages is yielded once per stage."""
        for stage_module in self.stages:
            yield from stage_module.named_modules(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the first stage that has it."""
        *others, last = self.stages
        for stage_module in others:
            with suppress(AttributeError):
                return stage_module.get_submodule(target)
        return last.get_submodule(target)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages; a shared one once, from the first stage."""
        seen = set[str]()
        for stage_module in self.stages:
            for name, param in stage_module.named_parameters(*args, **kwargs):
                if name not in seen:
                    yield name, param
                seen.add(name)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages."""
        for stage_module in self.stages:
            yield from stage_module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the tensors of all stages."""
        backwards = list(self.stages)[::-1]  # later entries win: a name in two stages gets the tensor of the first one
        return {
            name: value
            for stage_module in backwards
            for name, value in stage_module.state_dict(*args, **kwargs).items()
        }


class StagedSteps:
    """Runs micro-batches through the pipeline stages, and adds up their losses."""

    def __init__(self, pipeline: Pipeline, collectors: Mapping[int, Gradients], find_gradient: TensorOf | None) -> None:
        """`collectors` has the gradient collector of each sharded stage, by stage index.

        `find_gradient` returns the gradient of a named parameter if gradients are not in `.grad`; None if they are.
        """
        self.pipeline = pipeline
        self._collectors = collectors
        self._find_gradient = find_gradient

    def at_least(self, count: int) -> int:
        """Return the smallest number of micro-batches ≥ `count` that the schedule supports."""
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
        """Run forward and backward pass of all micro-batches of a step, and add their losses to `normalizer`.

        `ready` are the micro-batches on the device, `inputs` those of their fields that the model receives. `scale`
        multiplies a loss by the loss scale.
        """
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
        """Sum the gradients of weights that several stages share, such as tied embeddings."""
        self.pipeline.tied.sum(self._find_gradient)

    def forward(self, ready: Any) -> Any:
        """Return the model's outputs for one micro-batch on ranks with the last stage; None elsewhere."""
        self.pipeline.tied.refresh()
        answers = self.pipeline.forward([ready])
        return answers[0] if answers else None


def _targets(inputs: Any) -> int:
    """Estimate the targets of a micro-batch: the elements of its largest integer tensor, or the rows of its first."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    whole = [leaf.numel() for leaf in tensors if not leaf.is_floating_point()]
    return max(whole, default=len(tensors[0]) if tensors else 1)
