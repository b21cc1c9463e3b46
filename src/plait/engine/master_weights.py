"""What the optimizer sees: plain fp32 tensors, whatever the model computes with.

[Note: the optimizer sees local tensors]
Most optimizers work element by element, so a shard is as good to them as the whole. They get this rank's
part as a plain tensor that shares its storage with the model's DTensor: no dispatch through DTensor on any
of their operations, and fused kernels work as they do on one process. Optimizers that look at a whole
parameter (LAMB, Adafactor, Muon) get the DTensor itself, or, where they know nothing of ranks, all of it as a plain
tensor on the rank that updates it: see `optim.kinds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed import (
    GradientBuckets,
    Gradients,
    LocalGradients,
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
    """The parameters that are trained, and their names, in the order of the model."""
    pairs = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    if not pairs:
        raise ModelError(
            "no parameter that this rank holds has requires_grad: there is nothing to train. In a pipeline every rank "
            "needs one: train one in each stage, or name other layers in strategy.pipeline.split"
        )
    return [name for name, _ in pairs], [param for _, param in pairs]


class MasterWeights(ABC):
    """The trainable parameters by name, each with the tensor that the optimizer updates in its place."""

    norm_group: dist.ProcessGroup | None = None
    """Over which ranks the squares of local gradients add up to the whole."""
    shows_gradients: ClassVar[bool] = True
    """Whether a step's gradients are all there at once, once they are complete."""
    norm_weights: list[float] | None = None
    """How much each of them counts; see `optim.grad_norm`."""
    frozen: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    """Parameters that do not train and are rounded for computing: what they were before."""
    owned: OwnedParams | None = None
    """Whole parameters for an optimizer that knows nothing of ranks, each on the rank that updates it."""
    before_forward: Callable[[], None] | None = None
    """What must be done before each call of the model, where that cannot be left to the model's own hooks."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], *, elementwise: bool = True) -> None:
        """`elementwise`: the optimizer is content with this rank's part of a parameter."""
        self.names = list(names)
        self.params = list(params)
        self._elementwise = elementwise
        self.tensors = self._make_tensors()

    @abstractmethod
    def _make_tensors(self) -> list[nn.Parameter]: ...

    def _optimizer_param(self, tensor: Tensor) -> nn.Parameter:
        """What the optimizer sees of a parameter, or of the fp32 weights behind it."""
        if self._elementwise and is_sharded(tensor):
            with torch.no_grad():
                return nn.Parameter(tensor.to_local())
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)

    def use_owned_params(self) -> None:
        """Give the optimizer whole parameters: see [Note: one owner a parameter]. Every rank must call it."""
        if any(is_sharded(tensor) for tensor in self.tensors):
            from plait.optim import OwnedParams

            self.owned = OwnedParams(self.tensors)

    @property
    def updated(self) -> Sequence[nn.Parameter | None]:
        """For each parameter the tensor that the optimizer has of it; None where another rank updates it."""
        return self.tensors if self.owned is None else self.owned.updated

    def gathered(self, *, gradients: bool = False) -> AbstractContextManager[None]:
        """While this lasts, what the optimizer has is what the model has; at the end it is the other way round.

        Every rank must enter it.
        """
        return nullcontext() if self.owned is None else self.owned.gathered(gradients=gradients)

    @abstractmethod
    def gather_gradients(self) -> list[Tensor]:
        """Give every view its gradient of this step; returns this rank's part of each, as plain tensors."""

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """For each updated tensor, the parameter that `publish` rounds it into.

        An optimizer that goes element by element may write it there itself. Empty where nothing is rounded.
        """
        return {}

    def publish(self) -> None:  # noqa: B027  # most master_weights share storage with the model
        """Bring the model's parameters up to date with the updated tensors."""

    def settle(self) -> None:  # noqa: B027  # most updates are made when they return
        """Wait until the model has the weights of the last update."""

    def publish_frozen(self) -> None:
        """Bring the model up to date with `frozen`, which only loading changes."""
        with torch.no_grad():
            for param, whole in self.frozen.items():
                param.copy_(whole)

    def clear_gradients(self) -> None:
        """Forget the gradients of this step."""
        for param in self.params:
            param.grad = None

    @property
    def in_buckets(self) -> bool:
        """Whether gradients are collected in buckets, where `gradient_of` finds them."""
        return False

    def gradient_of(self, name: str) -> Tensor:
        """This rank's part of a gradient, where it is collected."""
        raise NotImplementedError("only gradients in buckets have a place of their own")

    def gradient(self, index: int) -> Tensor | None:
        """The gradient of this step, while there is one."""
        return self.tensors[index].grad

    def readable(self) -> AbstractContextManager[None]:
        """While this lasts, the tensors and the optimizer's state can be read, wherever they live."""
        return nullcontext()

    def allocate_states(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> frozenset[int]:
        """Make room for optimizer state of the shapes of the master_weights, where that is not ordinary memory.

        Returns for which master_weights that was done.
        """
        return frozenset()

    def local(self, index: int) -> Tensor:
        """This rank's part of one tensor."""
        return to_local(self.tensors[index])

    def logical(self, index: int, local: Tensor) -> Tensor:
        """Wrap a local tensor, shaped like this view, as the whole that it is a part of."""
        return dtensor_like(local, self.params[index])


class DirectParams(MasterWeights):
    """One process, no smaller format: the parameters themselves."""

    def _make_tensors(self) -> list[nn.Parameter]:
        return self.params

    def gather_gradients(self) -> list[Tensor]:
        """Each parameter's own gradient."""
        grads = []
        for param in self.params:
            if param.grad is None:
                # Took no part in this step. A gradient of zero, as on many ranks, where another may have used it.
                param.grad = torch.zeros_like(param)
            grads.append(param.grad)
        return grads


class BucketParams(MasterWeights):
    """Replicated parameters: gradients come from buckets, weights may be fp32 copies."""

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
        """`masters` holds, for each parameter in a smaller format, its fp32 weights; None for the others."""
        self.frozen = frozen
        self._buckets = buckets
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
        """Each view's place in a bucket."""
        grads = []
        for index, tensor in enumerate(self.tensors):
            # Where gradients are summed in a smaller format, the optimizer still wants its own.
            local = self._buckets.view_of(index).to(tensor.dtype)
            tensor.grad = local if self._elementwise else dtensor_like(local, tensor)
            grads.append(local)
        return grads

    @property
    def in_buckets(self) -> bool:
        """Always."""
        return True

    def gradient_of(self, name: str) -> Tensor:
        """This rank's part of a gradient, where it is collected."""
        return self._buckets.view_of(self.names.index(name))

    def clear_gradients(self) -> None:
        """Forget the wholes and the parts."""
        super().clear_gradients()
        for tensor in self.tensors:
            tensor.grad = None

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """The parameters behind which fp32 weights are updated."""
        if not self._elementwise:
            return {}
        masters = [tensor for tensor, master in zip(self.tensors, self._masters, strict=True) if master is not None]
        return {tensor: param for tensor, (param, _) in zip(masters, self._copied, strict=True)}

    def publish(self) -> None:
        """Round the fp32 weights to what the model computes with."""
        if self._copied:
            params, tensors = zip(*self._copied, strict=True)
            with torch.no_grad():
                foreach_copy_(params, tensors)


class ShardedParams(MasterWeights):
    """Parameters of which some are spread over ranks, and whose gradients are complete: this rank's part of each."""

    def _make_tensors(self) -> list[nn.Parameter]:
        return [self._optimizer_param(param) for param in self.params]

    def gather_gradients(self) -> list[Tensor]:
        """This rank's part of each gradient."""
        grads = []
        with torch.no_grad():  # lets to_local return the part itself, without recording anything
            for param, tensor in zip(self.params, self.tensors, strict=True):
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                local = local_grad(param.grad, param)
                tensor.grad = local if self._elementwise else dtensor_like(local, param)
                grads.append(local)
        return grads

    def clear_gradients(self) -> None:
        """Forget the wholes and the parts."""
        super().clear_gradients()
        for tensor in self.tensors:
            tensor.grad = None


# One process with fp32 weights behind smaller ones, and an optimizer that does everything in one pass.


class RoundedParams(MasterWeights):
    """The optimizer sees the fp32 weights; it finds small gradients on the parameters, and writes those itself.

    See `optim.one_pass` and `parallel.single`.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        gradients: LocalGradients,
        masters: Sequence[Tensor | None],
        frozen: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """`masters` holds, for each parameter in a smaller format, its fp32 weights; None for the others."""
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
        """The gradients as the backward pass left them, or their sums."""
        grads = []
        for index, tensor in enumerate(self.tensors):
            grad = self._gradients.of(index)
            if grad.dtype == tensor.dtype:
                tensor.grad = grad
            grads.append(grad)
        return grads

    def gradient(self, index: int) -> Tensor | None:
        """The gradient of this step, while there is one."""
        return self._gradients.of(index)

    def clear_gradients(self) -> None:
        """Forget gradients and sums."""
        super().clear_gradients()
        self._gradients.clear()
        for tensor in self.tensors:
            tensor.grad = None

    def rounded_params(self) -> dict[Tensor, Tensor]:
        """The parameters behind which fp32 weights are updated."""
        return {tensor: param for tensor, param in zip(self.tensors, self.params, strict=True) if tensor is not param}

    def publish(self) -> None:
        """Round the fp32 weights to what the model computes with."""
        if rounded_params := self.rounded_params():
            with torch.no_grad():
                foreach_copy_([*rounded_params.values()], [*rounded_params])


# Parameters that several ranks hold alike: what the optimizer sees of them, and how their gradients are summed.


def replicate(
    given: Preparation, module: nn.Module, *, elementwise: bool, leaves: bool
) -> tuple[Gradients | None, MasterWeights]:
    """What collects the gradients of a model at ZeRO stage 0, if anything has to, and the master weights.

    `leaves`: gradients may stay what the backward pass makes them, where that is exact.
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
    # A checkpoint holds them as they were, on every layout alike.
    frozen = {param: data for param, data in rounded.items() if not param.requires_grad}
    alone = leaves and layout.size == 1 and given.config.train.clip_value is None
    if alone and is_one_pass(given.config.optim, [rounded.get(param, param) for param in params]):
        collector = LocalGradients(params, policy.reduce)
        return collector, RoundedParams(names, params, collector, masters, frozen)
    buckets = make_buckets(given, params)
    return buckets, BucketParams(names, params, buckets, masters, frozen, elementwise=elementwise)


def make_buckets(given: Preparation, params: list[nn.Parameter]) -> GradientBuckets:
    """Buckets that sum each gradient over the ranks that see other data. Every rank must make them."""
    world, policy = given.world, given.policy
    # Both groups are made here, on every rank: a stage of a pipeline may have no experts, where another has some.
    dense = world.group("dp_replicate", "dp_shard", "ep", "cp")
    of_experts = world.group("dp_replicate", "dp_shard", "cp")
    return GradientBuckets(
        params,
        dtype_of=lambda param: policy.reduce if param.dtype == policy.compute else param.dtype,
        group_of=lambda param: of_experts if _is_expert(param) else dense,
        bucket_bytes=int(given.config.strategy.bucket_mb * 2**20),
    )


def _is_expert(param: nn.Parameter) -> bool:
    """Whether a parameter is one of the experts that ranks share out among them."""
    return is_sharded(param) and any(name in ("ep", "ep_tp") for name in param.device_mesh.mesh_dim_names or ())
