"""Master weights: the tensors that the optimizer updates. They are fp32 also if the model computes in bf16 or fp16.

[Note: the optimizer sees local tensors]
Most optimizers are elementwise, so a shard is enough for them. They get this rank's shard as a plain tensor that shares
its storage with the model's DTensor: their operations do not dispatch through DTensor, and fused kernels work as in one
process. Plait's optimizers over whole parameters (LAMB, Adafactor, Muon) get the DTensor itself. Other optimizers that
are not elementwise get the full parameter as a plain tensor, on the rank that updates it: see `ParamForm` in
`optim.base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed import (
    GradientBuckets,
    Gradients,
    LocalGradients,
    combine_collectors,
    dtensor_like,
    is_sharded,
    local_grad,
    to_local,
)
from plait.engine.construction import round_parameters
from plait.engine.preparation import Preparation
from plait.errors import ModelError
from plait.optim import MakeState, is_one_pass
from plait.torch_internals import foreach_copy_

if TYPE_CHECKING:
    from plait.optim import OwnedParams


def trainable(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Return the names and the parameters that are trained, in the order of `named_parameters`.

    Raises `ModelError` if there are none.
    """
    pairs = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not pairs:
        raise ModelError(
            "no parameter of this rank has requires_grad: there is nothing to train. In a pipeline every rank needs a "
            "trainable parameter: train one in each stage, or name other layers in strategy.pipeline.split"
        )
    return [name for name, _ in pairs], [param for _, param in pairs]


class MasterWeights(ABC):
    """The trainable parameters of this rank (`params`), and for each the tensor that the optimizer updates (`tensors`).

    The two are the same tensor, or share storage, or the second is an fp32 copy, perhaps offloaded; then `publish`
    copies it to the first. `names`, `params` and `tensors` have the same order, whose positions are called `index`.
    """

    norm_group: dist.ProcessGroup | None = None
    """The ranks over which the squared norms of local gradients are summed; None if this rank has full gradients."""
    shows_gradients: ClassVar[bool] = True
    """Whether `gather_gradients` returns all gradients of a step; false if they are offloaded as they are computed."""
    norm_weights: list[float] | None = None
    """The weight of each squared norm in that sum; None: all 1. See `optim.grad_norm`."""
    frozen: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    """The values before casting of parameters that are cast and not trained; checkpoints hold these."""
    owned: OwnedParams | None = None
    """For an optimizer that needs full parameters: each as a plain tensor on the rank that updates it; else None."""
    buckets: GradientBuckets | None = None
    """The buckets that all-reduce the gradients of replicated parameters; None if there are none."""
    before_forward: Callable[[], None] | None = None
    """Called before each forward pass, if module hooks cannot wait for updated weights; see `engine/offload.py`."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], *, elementwise: bool = True) -> None:
        """`elementwise`: the optimizer gets this rank's shard of a parameter as a plain tensor, not the DTensor."""
        self.names = list(names)
        self.params = list(params)
        self._elementwise = elementwise
        self.tensors = self._make_tensors()

    @abstractmethod
    def _make_tensors(self) -> list[nn.Parameter]: ...

    def _optimizer_param(self, tensor: Tensor) -> nn.Parameter:
        """Return the tensor for the optimizer that stands for `tensor`, a parameter or its fp32 weights."""
        if self._elementwise and is_sharded(tensor):
            with torch.no_grad():
                return nn.Parameter(tensor.to_local())
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)

    def use_owned_params(self) -> None:
        """Have the optimizer update full parameters: see [Note: one owner per parameter]. Every rank must call it."""
        if any(is_sharded(tensor) for tensor in self.tensors):
            from plait.optim import OwnedParams

            self.owned = OwnedParams(self.tensors)

    @property
    def updated(self) -> Sequence[nn.Parameter | None]:
        """For each parameter the tensor that this rank's optimizer updates; None if another rank updates it."""
        return self.tensors if self.owned is None else self.owned.updated

    def gathered(self, *, gradients: bool = False) -> AbstractContextManager[None]:
        """Within the block, the optimizer's tensors have the model's current weights; at its end they are copied back.

        `gradients`: they have the step's gradients, too. Does nothing unless there are `owned` parameters. Every rank
        must enter it.
        """
        return nullcontext() if self.owned is None else self.owned.gathered(gradients=gradients)

    @abstractmethod
    def gather_gradients(self) -> list[Tensor]:
        """Set `.grad` of the optimizer's tensors; return this rank's shard of each gradient, as plain tensors."""

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """Return for each updated tensor the parameter that `publish` rounds it into.

        An elementwise optimizer may write it there itself (`OnePassAdam`). Empty if no parameter is rounded.
        """
        return {}

    def publish(self) -> None:  # noqa: B027  # most share storage with the model
        """Copy the updated tensors to the model's parameters, in their dtype."""

    def settle(self) -> None:  # noqa: B027  # most updates are complete when they return
        """Wait until the model has the weights of the last update."""

    def publish_frozen(self) -> None:
        """Copy the tensors of `frozen` to the model; needed after a checkpoint was loaded into them."""
        with torch.no_grad():
            for param, whole in self.frozen.items():
                param.copy_(whole)

    def clear_gradients(self) -> None:
        """Free the gradients of this step."""
        for param in self.params:
            param.grad = None

    def gradient_of(self, name: str) -> Tensor:
        """Return this rank's gradient of a named parameter, a view of its bucket; only if there are `buckets`."""
        assert self.buckets is not None
        return self.buckets.view_of(self.names.index(name))

    def gradient(self, index: int) -> Tensor | None:
        """Return the gradient of one parameter in this step; None if there is none, or it was freed."""
        return self.tensors[index].grad

    def readable(self) -> AbstractContextManager[None]:
        """Within the block, the tensors and the optimizer's state can be read, also if they are stored in files."""
        return nullcontext()

    def allocate_states(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> frozenset[int]:
        """Allocate the optimizer states that are stored in files; `wanted` has a function per parameter and state.

        Returns the indices of the parameters whose states are in files; the caller allocates the others.
        """
        return frozenset()

    def local(self, index: int) -> Tensor:
        """Return this rank's shard of one of `tensors`, as a plain tensor."""
        return to_local(self.tensors[index])

    def in_memory(self, index: int) -> Tensor:
        """Return this rank's shard of a parameter: that of `tensors`, or the rounded one if these are in files."""
        return self.local(index)

    def logical(self, index: int, local: Tensor) -> Tensor:
        """Return the global tensor whose shard on this rank is `local`, sharded like the parameter."""
        return dtensor_like(local, self.params[index])


class DirectParams(MasterWeights):
    """For one process without mixed precision: the optimizer updates the parameters themselves."""

    def _make_tensors(self) -> list[nn.Parameter]:
        return self.params

    def gather_gradients(self) -> list[Tensor]:
        """Return each parameter's own gradient."""
        grads = []
        for param in self.params:
            if param.grad is None:
                # Unused in this step: a zero gradient, as on several ranks, where another may have used it.
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
        return grads


class BucketParams(MasterWeights):
    """For replicated parameters: gradients are all-reduced in buckets, and cast parameters have fp32 master weights."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        buckets: GradientBuckets,
        masters: Sequence[Tensor | None],
        frozen: Mapping[nn.Parameter, Tensor],
        *,
        elementwise: bool = True,
    ) -> None:
        """`masters` holds, for each parameter in a smaller dtype, its fp32 weights; None for the others."""
        self.frozen = frozen
        self.buckets: GradientBuckets = buckets
        self._masters = masters
        super().__init__(names, params, elementwise=elementwise)
        self._copied = [
            (to_local(param.detach()), to_local(tensor.detach()))
            for param, tensor, master in zip(self.params, self.tensors, masters, strict=True)
            if master is not None
        ]

    def _make_tensors(self) -> list[nn.Parameter]:
        return [
            self._optimizer_param(param if master is None else master)
            for param, master in zip(self.params, self._masters, strict=True)
        ]

    def gather_gradients(self) -> list[Tensor]:
        """Return views of the buckets, cast to the optimizer's dtype."""
        grads = []
        for index, tensor in enumerate(self.tensors):
            # Gradients may be summed in a smaller dtype than the optimizer's.
            local = self.buckets.view_of(index).to(tensor.dtype)
            tensor.grad = local if self._elementwise else dtensor_like(local, tensor)
            grads.append(local)
        return grads

    def clear_gradients(self) -> None:
        """Free the gradients of the parameters and of the optimizer's tensors."""
        super().clear_gradients()
        for tensor in self.tensors:
            tensor.grad = None

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """Return the model's cast parameter for each fp32 weight."""
        if not self._elementwise:
            return {}
        masters = [tensor for tensor, master in zip(self.tensors, self._masters, strict=True) if master is not None]
        return {tensor: param for tensor, (param, _) in zip(masters, self._copied, strict=True)}

    def publish(self) -> None:
        """Round the fp32 weights into the model's parameters."""
        if self._copied:
            params, tensors = zip(*self._copied, strict=True)
            with torch.no_grad():
                foreach_copy_(params, tensors)


class ShardedParams(MasterWeights):
    """For parameters sharded by FSDP or `tp`, with gradients in `.grad` that are reduced already.

    The optimizer updates this rank's shards, or the DTensors. Scalars beside them are replicated: `scalars` has their
    gradients, and their fp32 weights if they are cast.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        *,
        elementwise: bool = True,
        scalars: ReplicatedScalars | None = None,
    ) -> None:
        self._sums = {} if scalars is None else scalars.sums
        self._masters = {} if scalars is None else scalars.masters
        self.frozen = {param: whole for param, whole in self._masters.items() if not param.requires_grad}
        super().__init__(names, params, elementwise=elementwise)

    def _make_tensors(self) -> list[nn.Parameter]:
        return [self._optimizer_param(self._masters.get(param, param)) for param in self.params]

    def gather_gradients(self) -> list[Tensor]:
        """Return this rank's shard of each gradient."""
        grads = []
        with torch.no_grad():  # lets to_local return the shard itself, without an autograd node
            for param, tensor in zip(self.params, self.tensors, strict=True):
                if param in self._sums:
                    local = self._sums[param].to(tensor.dtype)
                else:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    local = local_grad(param.grad, param)
                tensor.grad = local if self._elementwise else dtensor_like(local, param)
                grads.append(local)
        return grads

    def clear_gradients(self) -> None:
        """Free the gradients of the parameters and of the optimizer's tensors."""
        super().clear_gradients()
        for tensor in self.tensors:
            tensor.grad = None

    def publish(self) -> None:
        """Round the fp32 weights of scalars into the model's parameters."""
        with torch.no_grad():
            for param, master in zip(self.params, self.tensors, strict=True):
                if param in self._masters:
                    param.copy_(master)


class RoundedParams(MasterWeights):
    """For one process with cast parameters, fp32 master weights, and `OnePassAdam` as optimizer.

    That optimizer reads gradients in the compute dtype, and writes the cast parameters itself, so neither is copied.
    See `optim.fused_adam` and `LocalGradients` in `distributed`.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        gradients: LocalGradients,
        masters: Sequence[Tensor | None],
        frozen: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """`masters` holds, for each parameter in a smaller dtype, its fp32 weights; None for the others."""
        self.frozen = frozen
        self._gradients = gradients
        self._masters = masters
        super().__init__(names, params)

    def _make_tensors(self) -> list[nn.Parameter]:
        return [
            param if master is None else nn.Parameter(master)
            for param, master in zip(self.params, self._masters, strict=True)
        ]

    def gather_gradients(self) -> list[Tensor]:
        """Return the gradients as the backward pass computed them, or their sums over micro-batches."""
        grads = []
        for index, tensor in enumerate(self.tensors):
            grad = self._gradients.of(index)
            if grad.dtype == tensor.dtype:
                tensor.grad = grad
            grads.append(grad)
        return grads

    def gradient(self, index: int) -> Tensor | None:
        """Return the gradient of one parameter in this step; None if there is none, or it was freed."""
        return self._gradients.of(index)

    def clear_gradients(self) -> None:
        """Free the gradients, and their sums over micro-batches."""
        super().clear_gradients()
        self._gradients.clear()
        for tensor in self.tensors:
            tensor.grad = None

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """Return the model's cast parameter for each fp32 weight."""
        return {tensor: param for tensor, param in zip(self.tensors, self.params, strict=True) if tensor is not param}

    def publish(self) -> None:
        """Round the fp32 weights into the model's parameters."""
        if rounded_params := self.rounded_params():
            with torch.no_grad():
                foreach_copy_([*rounded_params.values()], [*rounded_params])


def replicate(
    given: Preparation, module: nn.Module, *, elementwise: bool, leaves: bool
) -> tuple[Gradients | None, MasterWeights]:
    """Return the gradient collector of a model that FSDP does not shard (None if none is needed), and master weights.

    `leaves`: each step has one backward pass, so its gradients need no buffer to be summed in.
    """
    layout, policy = given.world.layout, given.policy
    rounds = policy.mixed and policy.master
    rounded = round_parameters(module, policy.compute) if rounds else {}
    names, params = trainable(module)
    if layout.replicas == 1 and not rounds:
        if any(is_sharded(param) for param in params):
            return None, ShardedParams(names, params, elementwise=elementwise)
        return None, DirectParams(names, params)
    masters = [rounded.get(param) for param in params]
    # Kept because a checkpoint holds the values before casting, in every layout.
    frozen = {param: data for param, data in rounded.items() if not param.requires_grad}
    alone = leaves and layout.size == 1 and given.config.train.clip_value is None
    if alone and is_one_pass(given.config.optim, [rounded.get(param, param) for param in params]):
        collector = LocalGradients(params, policy.reduce)
        return collector, RoundedParams(names, params, collector, masters, frozen)
    buckets = make_buckets(given, params)
    return buckets, BucketParams(names, params, buckets, masters, frozen, elementwise=elementwise)


@dataclass(frozen=True, slots=True)
class ReplicatedScalars:
    """The scalars of a sharded model, which `fully_shard` leaves out: every rank has all of them."""

    sums: Mapping[nn.Parameter, Tensor]
    """The gradient of each trained one, after the collectors have finished a step: a view of a bucket."""
    masters: Mapping[nn.Parameter, Tensor]
    """The fp32 weights of those that are cast to the compute dtype."""


def replicate_scalars(
    given: Preparation, modules: Sequence[nn.Module], collectors: Sequence[Gradients], *, rounds: bool
) -> tuple[list[Gradients], ReplicatedScalars]:
    """Return the collectors of sharded stages, which then also sum the gradients of scalars, and these scalars.

    `rounds`: scalars are cast to the compute dtype, as `fully_shard` casts what it gathers. Every rank must call it.
    """
    given.world.group("dp_replicate", "dp_shard", "ep", "cp")  # on every rank: another stage may have no scalars
    sums: dict[nn.Parameter, Tensor] = {}
    masters: dict[nn.Parameter, Tensor] = {}
    combined: list[Gradients] = []
    for module, collector in zip(modules, collectors, strict=True):
        if rounds:
            masters |= round_parameters(module, given.policy.compute, only=_is_scalar)
        trained = [param for param in module.parameters() if param.requires_grad and _is_scalar(param)]
        if trained:
            buckets = make_buckets(given, trained)
            sums |= {param: buckets.view_of(index) for index, param in enumerate(trained)}
            collector = combine_collectors([collector, buckets])
        combined.append(collector)
    return combined, ReplicatedScalars(sums, masters)


def _is_scalar(param: nn.Parameter) -> bool:
    return param.ndim == 0 and not is_sharded(param)


def make_buckets(given: Preparation, params: list[nn.Parameter]) -> GradientBuckets:
    """Return buckets that sum each gradient over the ranks that read other data. Every rank must call it."""
    world, policy = given.world, given.policy
    # Both groups are created on every rank: one pipeline stage may have experts, and another none.
    dense = world.group("dp_replicate", "dp_shard", "ep", "cp")
    of_experts = world.group("dp_replicate", "dp_shard", "cp")
    return GradientBuckets(
        params,
        dtype_of=lambda param: policy.reduce if param.dtype == policy.compute else param.dtype,
        group_of=lambda param: of_experts if _is_expert(param) else dense,
        bucket_bytes=int(given.config.strategy.bucket_mb * 2**20),
    )


def _is_expert(param: nn.Parameter) -> bool:
    """Whether a parameter belongs to experts that are sharded over ranks."""
    return is_sharded(param) and any(name in ("ep", "ep_tp") for name in param.device_mesh.mesh_dim_names or ())
