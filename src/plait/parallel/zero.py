"""ZeRO 1, 2 and 3, FSDP and HSDP: one mechanism, `fully_shard`.

| stage | parameters after forward | gradients while accumulating         | optimizer |
|-------|--------------------------|--------------------------------------|-----------|
| 1     | whole until the step     | whole, scattered on the last backward | sharded   |
| 2     | whole until the step     | scattered on every backward          | sharded   |
| 3     | resharded                | scattered on every backward          | sharded   |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from plait.errors import ModelError
from plait.parallel.exchange import exchange_directly
from plait.parallel.units import Unit
from plait.parallel.viewless import return_no_views
from plait.parallel.within import allow_passes_within
from plait.precision import FP32_MODULES, Policy
from plait.torch_internals import (
    fsdp_after_gathering,
    fsdp_around_reduction,
    fsdp_fill_gradients,
    fsdp_group,
    fsdp_params,
    fsdp_reduces,
    fsdp_sums_any_formats,
    fsdp_whole,
)


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """How `shard` cuts a model."""

    stage: int
    reshard_after_forward: bool | int | None
    forward_prefetch: int
    backward_prefetch: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Modules whose parameters are spread over ranks already, and which fewer ranks have in common."""

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    placement: Callable[[nn.Parameter], Shard | None]
    """Along which dimension each of their parameters is cut."""


class ShardedGradients:
    """Tells a sharded model, before each micro-batch, what to do with gradients and parameters."""

    def __init__(self, root: FSDPModule, stage: int) -> None:
        self._root = root
        self._stage = stage
        self._was_last: bool | None = None

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; `last` is the one before the optimizer steps."""
        if last == self._was_last:
            return
        self._was_last = last
        if self._stage == 1:
            self._root.set_requires_gradient_sync(last)
        if self._stage < 3:
            # Whole until the step: gathered once a step, not once a micro-batch.
            self._root.set_reshard_after_backward(last)
        self._root.set_is_last_backward(last)

    def finish(self) -> None:
        """Nothing is left to wait for: the backward pass itself waits for its reductions."""


def shard(
    model: nn.Module,
    units: Sequence[Unit],
    *,
    mesh: DeviceMesh,
    policy: Policy,
    options: ShardingOptions,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    experts: Experts | None = None,
    at_once: bool = False,
) -> ShardedGradients:
    """Shard the units, then the rest of the model, over the last axis of the mesh; copies along the first of two.

    `placement` says along which dimension a parameter is cut; absent: the first. `at_once`: the model is small enough
    to be gathered as one, and to hold on to the memory which that takes.
    """
    scalar = next((name for name, param in model.named_parameters() if param.ndim == 0), None)
    if scalar is not None:
        raise ModelError(
            f"the parameter {scalar!r} is a scalar, which strategy.zero={options.stage} cannot cut: make it a vector "
            "of one number (`torch.ones(1)`), or set strategy.zero: 0"
        )
    reshard = options.stage == 3 if options.reshard_after_forward is None else options.reshard_after_forward
    common: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard, "shard_placement_fn": placement}
    casting = MixedPrecisionPolicy(
        param_dtype=policy.compute if policy.mixed and policy.master else None,
        reduce_dtype=policy.reduce,
        # Inputs are cast once, for the whole model, by the engine: a cast at every unit would also
        # round what a model passes between its blocks on purpose in fp32.
        cast_forward_inputs=False,
    )
    _shard_fp32_modules(model, common, policy)
    if experts is not None:
        for module in experts.modules:
            fully_shard(
                module,
                mp_policy=casting,
                mesh=experts.mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=experts.placement,
            )
    for unit in () if at_once else units:
        if not isinstance(unit.module, FSDPModule):  # experts, or a norm that stays in fp32, may be units too
            fully_shard(unit.module, mp_policy=casting, **common)
    root = fully_shard(model, mp_policy=casting, **common)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # The engine divides, by the global count; ranks only sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    exchange_directly(sharded, mesh, keep=at_once)
    return_no_views(sharded)
    _reduce_unused(root, policy)
    _pass_over_idle(sharded)
    allow_passes_within(sharded)
    if not at_once:
        _prefetch([u.module for u in units], options)
    return ShardedGradients(root, options.stage)


def carry_attributes(model: nn.Module, names: AbstractSet[str]) -> None:
    """Give whole parameters, once they are gathered, these attributes of the sharded ones."""

    def give(part: Tensor, whole: nn.Parameter) -> None:
        own = vars(part)
        vars(whole).update({name: own[name] for name in names if name in own})

    for module in model.modules():
        group = fsdp_group(module)
        for param in () if group is None else fsdp_params(group):
            fsdp_after_gathering(param, give)


def _shard_fp32_modules(model: nn.Module, common: dict[str, Any], policy: Policy) -> None:
    if not policy.mixed:
        return
    keep = [m for m in model.modules() if isinstance(m, FP32_MODULES) and any(True for _ in m.parameters())]
    for module in keep:
        fully_shard(
            module,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
            **common,
        )


def _reduce_unused(root: FSDPModule, policy: Policy) -> None:
    """Have parameters that took no part reduced as zeros: other ranks may have used them, and would wait."""
    # From torch 2.13 on it does so itself; until 2.14 not where some gradients are in the format of the sum already.
    does_so = hasattr(root, "set_reduce_scatter_unused_params")
    if does_so and (policy.reduce == policy.compute or fsdp_sums_any_formats()):
        root.set_reduce_scatter_unused_params(True)
        return
    assert isinstance(root, nn.Module)
    for module in root.modules():
        group = fsdp_group(module)
        if group is not None:
            fsdp_around_reduction(group, partial(_with_zeros, group))


def _pass_over_idle(sharded: Sequence[FSDPModule]) -> None:
    """Let a unit that nobody has called yet keep nothing from one micro-batch to the next.

    torch looks for its gradients all the same, where it was gathered ahead, and finds no parameters.
    """
    for group in map(fsdp_group, sharded):
        if group is not None:
            fsdp_around_reduction(group, partial(_unless_idle, group))


def _unless_idle(group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
    def kept(*args: Any) -> Any:
        called = any(fsdp_whole(each) is not None for each in fsdp_params(group))
        return post_backward(*args) if called or fsdp_reduces(group) else None

    return kept


def _with_zeros(group: Any, post_backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch alone leaves such parameters out, each rank its own; so they get zeros before anything is reduced.

    What earlier micro-batches left is in the format of the sum already, and torch reduces one format at a time: then
    the gradients of parameters that took part in the last one alone, or in none, are given that format too.
    """

    def filled(*args: Any) -> Any:
        if fsdp_reduces(group):
            fsdp_fill_gradients(group)
        return post_backward(*args)

    return filled


def _prefetch(modules: Sequence[nn.Module], options: ShardingOptions) -> None:
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        if options.forward_prefetch:
            ahead = modules[index + 1 : index + 1 + options.forward_prefetch]
            module.set_modules_to_forward_prefetch([m for m in ahead if isinstance(m, FSDPModule)])
        if options.backward_prefetch:
            behind = modules[max(index - options.backward_prefetch, 0) : index][::-1]
            module.set_modules_to_backward_prefetch([m for m in behind if isinstance(m, FSDPModule)])
