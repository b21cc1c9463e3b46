"""The base class of engines that train with another library (DeepSpeed, ColossalAI).

Model, initial values, data, losses and checkpoints are the same as with Plait's own engine; the library runs backward
pass and update, and owns the sharded weights and optimizer states.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from plait.config import RunConfig
from plait.distributed import (
    apply_recompute,
    average_buffers,
    find_wrap_units,
    first_input,
    is_sharded,
    make_deterministic,
    materialize,
    param_attributes,
    persistent_buffers,
    restore_attributes,
    to_local,
)
from plait.engine.base import Evaluation, Skips, SteppingEngine, StepResult, ignore_phase, inputs_and_samples
from plait.engine.construction import build_module, load_pretrained_into
from plait.engine.forward import Forward, select_inputs
from plait.engine.loss import LossNormalizer, StepLoss, WeightedLoss, read_loss
from plait.engine.parallelize import refuse_hooks
from plait.engine.preparation import Preparation
from plait.errors import TrainingError
from plait.launch import Phase
from plait.optim import GroupSpec, OptimizerGroup, build_optimizer, split_groups


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A full, initialized model, and what must be recorded before the library wraps it and replaces its parameters."""

    module: nn.Module
    groups: list[GroupSpec]
    blanks: dict[str, Tensor]
    """A meta tensor of the global shape of every parameter, by name."""
    trained: list[str]
    """The names of the parameters that are trained."""
    buffers: list[str]
    """The names of the persistent buffers."""
    originals: dict[str, Tensor]
    """The values before casting of parameters that are cast or not trained, by name, in host memory."""

    def optimizer(self, config: RunConfig) -> torch.optim.Optimizer:
        """Return the optimizer that `config.optim` describes, over the module's parameters, without state."""
        params = named_parameters(self.module)
        master_weights = [
            OptimizerGroup(spec.names, [params[name] for name in spec.names], spec.options) for spec in self.groups
        ]
        optimizer = build_optimizer(config.optim, master_weights)
        optimizer.state.clear()  # the library replaces the parameters, and the state of these would never be freed
        return optimizer


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by their original names, without the prefixes of FSDP wrappers."""
    return {name.replace("_fsdp_wrapped_module.", ""): param for name, param in module.named_parameters()}


def build_full_model(given: Preparation) -> BuiltModel:
    """Build the full model in host memory; return it with the same initial values as every other engine."""
    config, world, policy, host = given.config, given.world, given.policy, torch.device("cpu")
    if config.deterministic:
        make_deterministic()
    torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
    module, initializer = build_module(config, given.model, log=given.log)
    refuse_hooks(given, module)
    if initializer is None:
        module.to(host)
        if world.everyone is not None:
            materialize.copy_from_main(module, world.everyone, world.device)
    else:
        attributes = param_attributes(module)
        materialize.give_storage(module, host)
        restore_attributes(module, attributes)
        materialize.initialize(module, initializer, seed=config.seed, device=world.device)
    if given.model is None:
        load_pretrained_into(given, module, module)
    groups = split_groups(module, config.optim)
    apply_recompute(find_wrap_units(module, config.strategy.wrap), config.strategy.recompute)
    params = dict(module.named_parameters())
    return BuiltModel(
        module,
        groups,
        blanks={name: torch.empty(param.shape, device="meta") for name, param in params.items()},
        trained=[name for name, param in params.items() if param.requires_grad],
        buffers=[name for name, _ in persistent_buffers(module)],
        originals={
            name: param.detach().clone() for name, param in params.items() if policy.mixed or not param.requires_grad
        },
    )


class EvenNormalizer(LossNormalizer):
    """Divides losses by an estimate of the step's number of targets: as if all micro-batches had as many as the first.

    If they do, the gradients need no correction in the update. The native engine divides by a power of two instead and
    always corrects, which costs nothing there; with other libraries a correction is a pass over all gradients.
    """

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        return max(self._count(weight) * micro_batches, 1.0)

    def _count(self, weight: Tensor | float) -> float:
        """Return the weight of one micro-batch, summed over all ranks."""
        count = torch.as_tensor(weight, dtype=self._dtype, device=self._device).reshape(1).clone()
        if self._group is not None:
            dist.all_reduce(count, group=self._group)
        return float(count)


class StepNormalizer(EvenNormalizer):
    """Divides losses by the exact number of targets of each step, which is summed over ranks before the backward pass.

    For a library whose gradients cannot be corrected afterwards; only for steps of one micro-batch.
    """

    def _choose_divisor(self, weight: Tensor | float, micro_batches: int) -> float:
        assert micro_batches == 1
        return self._count(weight) or 1.0

    def finish(self) -> StepLoss:
        """Return the step's summed loss; the next step computes its divisor anew."""
        sums = super().finish()
        self._divisor = None
        return sums


# Access to the weights and optimizer states that a library keeps in its own layout; see
# [Note: states by way of full tensors], `engine/foreign.py`.


class ForeignStates(ABC):
    """The fp32 weights and optimizer states of a library, read and written as full tensors, one by one."""

    def __init__(self, optimizer: Optimizer) -> None:
        """`optimizer` is the torch optimizer that the library's optimizer wraps."""
        self.optimizer = optimizer

    @abstractmethod
    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return the tensor that the torch optimizer updates for a parameter; several parameters may share it."""

    @abstractmethod
    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the full fp32 weight (`key` None), or the full optimizer state `key`, of a parameter."""

    @abstractmethod
    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Set the weight or state that `read` returns, from a full tensor."""

    def write_model_weight(self, param: Any, full: Tensor) -> None:
        """Set the weight that the model computes with, which may have a smaller dtype than the fp32 weight."""
        param.data.copy_(full)

    def publish(self) -> None:  # noqa: B027  # nothing to do if the written weights are the model's own
        """Copy the fp32 weights to the weights that the model computes with."""

    def state(self, param: Any) -> dict[str, Any]:
        """Return the torch optimizer's state for a parameter, by name."""
        state: dict[str, Any] = self.optimizer.state.get(self.optimizer_tensor(param), {})
        return state

    def keys(self, param: Any) -> list[str]:
        """Return the names of the states that are tensors."""
        return [key for key, value in self.state(param).items() if isinstance(value, Tensor)]

    def allocate(self, param: Any, key: str, shape: torch.Size, dtype: torch.dtype, *, full: bool) -> None:
        """Allocate the state `key`, filled with zeros.

        `full`: it has the shape of the optimizer's tensor; else `shape`. Parameters that lie in one optimizer tensor
        share it.
        """
        optimizer_tensor = self.optimizer_tensor(param)
        fused = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
        device = optimizer_tensor.device if full or fused else torch.device("cpu")
        zeros = torch.zeros(optimizer_tensor.shape if full else shape, dtype=dtype, device=device)
        self.optimizer.state[optimizer_tensor].setdefault(key, zeros)

    def _scalar(self, param: Any, key: str | None) -> Tensor | None:
        """Return a scalar state, such as `step`; None for others."""
        value = None if key is None else self.state(param)[key]
        return value if isinstance(value, Tensor) and value.ndim == 0 else None


class PlainStates(ForeignStates):
    """For libraries without sharding: every rank has all states, and cast parameters have fp32 master weights."""

    def __init__(self, optimizer: Optimizer, masters: Mapping[int, Tensor]) -> None:
        """`masters` holds the fp32 weights of cast parameters, by the `id` of the parameter."""
        super().__init__(optimizer)
        self._masters = masters

    def optimizer_tensor(self, param: Any) -> Tensor:
        """Return the fp32 weights of a cast parameter; the parameter itself if it is not cast."""
        optimizer_tensor: Tensor = self._masters.get(id(param), param)
        return optimizer_tensor

    def read(self, param: Any, key: str | None) -> Tensor:
        """Return the tensor of this rank, which is complete."""
        value: Tensor = self.optimizer_tensor(param) if key is None else self.state(param)[key]
        return value.detach()

    def write(self, param: Any, key: str | None, full: Tensor) -> None:
        """Copy `full` into the state, or into the fp32 weights and the weights that the model computes with."""
        self.read(param, key).copy_(full)
        if key is None and id(param) in self._masters:
            self.write_model_weight(param, full)


# Full tensors that are sharded over ranks for a checkpoint, so that no rank needs to hold everything.
#
# [Note: states by way of full tensors]
# Other libraries have their own layouts: flat buffers, chunks, shards that begin in the middle of a row. A checkpoint
# needs names and global shapes. So to save, full tensors are gathered one at a time, and each rank keeps the shard that
# `fully_shard` would give it. To load, each rank reads its shards, and full tensors are gathered one at a time and
# written to the library's layout.


def shard_full_tensor(full: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return this rank's shard of a tensor that every rank has, as a DTensor that owns its memory.

    Without a mesh, and for scalars: a copy of `full`.
    """
    if mesh is None or full.ndim == 0:
        return full.detach().clone()
    from torch.distributed.tensor import Shard, distribute_tensor

    cut = distribute_tensor(full.detach(), mesh, [Shard(0)], src_data_rank=None)
    return as_dtensor(cut.to_local().clone(), full, mesh)


def as_dtensor(shard: Tensor, full: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a local shard, split as `shard_full_tensor` splits, as a DTensor of the shape of `full` (may be meta)."""
    if mesh is None or full.ndim == 0:
        return shard
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=_strides(full))


def _strides(full: Tensor) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(full.shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


class ForeignEngine(SteppingEngine):
    """Trains with another library. A subclass implements its library's backward, update and states."""

    def __init__(
        self,
        called: nn.Module,
        states: ForeignStates,
        built: BuiltModel,
        given: Preparation,
        *,
        normalizer: type[LossNormalizer] = EvenNormalizer,
    ) -> None:
        """`called` is the library's wrapper of the model, whose call runs the forward pass.

        `normalizer` is the class that divides losses: `LossNormalizer` if multiplying the gradients by the correction
        costs nothing in the library.
        """
        config, world = given.config, given.world
        self.model = built.module
        self.world = world
        self.config = config
        self.steps = 0
        self.accumulation = given.accumulation
        self.optimizer = states.optimizer
        """The torch optimizer in whose groups the schedule sets the learning rates."""
        self._built = built
        self._states = states
        self._params: dict[str, nn.Parameter] = named_parameters(built.module)
        self._guard = config.train.guard
        self.skips = Skips(config.train.guard)
        scaler = config.precision.scaler
        self._lowest_scale = scaler.minimum if scaler.static is None else math.inf
        self._schedule = given.schedule()
        self._loss_function = given.loss_function
        self._log = given.log
        self._normalizer = normalizer(world.everyone, world.device)
        select = select_inputs(built.module, config.model_inputs, has_loss=given.loss_function is not None)
        row = _SequentialWrapper.wrap(called, built.module)
        self._forward = Forward(row, world.device, given.policy, compiled=(), select=select, log=given.log)
        self._mesh = world.submesh("dp_replicate", "dp_shard")
        self._peers = world.group("dp_replicate", "dp_shard")
        # The tensors that `state_tensors` returned last. A caller may write to them, and `state_loaded` copies them
        # back to the library. These are weak references, so that the tensors are freed when the caller drops them.
        self._state: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._weights: dict[str, Tensor] = {}
        self._frozen = {name: shard_full_tensor(value, self._mesh) for name, value in self._frozen_values().items()}
        self.on_phase: Callable[[Phase], None] = ignore_phase
        self._after_step = getattr(built.module, "after_step", None)
        self.model.train()

    # ---- implemented per library

    @abstractmethod
    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward pass of a normalized loss; see `SteppingEngine._begin_backward`."""

    @abstractmethod
    def _update(self, correction: float) -> tuple[float, bool]:
        """Update the weights with the gradients times `correction`.

        Return their norm before clipping, and whether the update was skipped.
        """

    def _scaler_state(self) -> dict[str, float] | None:
        """Return the loss scaler's state, with the same keys as `LossScaler.state`; None without a scaler."""
        return None

    def _restore_scaler(self, state: Mapping[str, float]) -> None:
        """Set the loss scaler's state."""

    # ---- one step

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step over this rank's micro-batches; return its result."""
        count = len(micro_batches)
        if not 0 < count <= self.accumulation:
            raise TrainingError(
                f"train_step was called with {count} micro-batches, and the engine was prepared for "
                f"{self.accumulation}; give `accumulation` to prepare, or set batch.accumulation"
            )
        return super().train_step(micro_batches)

    def _forward_loss(self, batch: Any) -> WeightedLoss:
        self.on_phase(Phase.FORWARD)
        inputs, samples = inputs_and_samples(batch)
        inputs = self._forward.ready(inputs)
        return read_loss(self._forward(inputs), inputs, samples, self._loss_function)

    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        self.on_phase(Phase.BACKWARD)
        self._backward(loss, last=last)

    def _finish_step(self) -> StepResult:
        self.on_phase(Phase.STEP)
        lr = self._schedule.apply(self.optimizer, self.steps)
        sums = self._normalizer.finish()
        loss, targets, stop = sums.read()
        norm, skipped = self._update(1.0 if sums.divisor is None else sums.divisor / (targets or 1.0))
        self._count_skip(skipped or (self._guard.enabled and not math.isfinite(loss)))
        if self._after_step is not None:
            self._after_step(self._peers, updated=not skipped)
        self.steps += 1
        self.on_phase(Phase.IDLE)
        return StepResult(loss, norm, skipped, lr, targets, stop)

    def _count_skip(self, skipped: bool) -> None:
        scaler = self._scaler_state()
        if skipped and scaler is not None and scaler["scale"] > self._lowest_scale:
            return  # the scaler lowers the scale after an overflow, until it fits: not a failure
        if not skipped:
            self.skips.in_a_row = 0
            return
        whose = self.describe_samples(self.steps)
        self._log(f"step {self.steps} skipped on every rank: its loss or gradient is not finite{whose}")
        self.skips.add(self.steps, whose, scale=None if scaler is None else scaler["scale"])

    def sync_buffers(self) -> None:
        """Average running statistics over the ranks; copy other buffers from rank 0."""
        if self._peers is not None:
            average_buffers(self.model, self._peers, self.world.size)

    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Return this rank's loss and outputs for one micro-batch, without gradients, in evaluation mode."""
        inputs, samples = inputs_and_samples(batch)
        inputs = self._forward.ready(inputs)
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                outputs = self._forward(inputs)
                loss = read_loss(outputs, inputs, samples, self._loss_function)
                return Evaluation(float(loss.total()), float(loss.weight), outputs)
        finally:
            self.model.train(training)

    # ---- state, see [Note: states by way of full tensors]

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint holds, as this rank's shard of a copy. Every rank must call it."""
        weights = self._share_weights()
        tensors = {f"model.{name}": weights.get(name, self._frozen.get(name)) for name in self._built.blanks}
        buffers = dict(self.model.named_buffers())
        tensors |= {f"model.{name}": buffers[name] for name in self._built.buffers}
        for name in self._built.trained:
            for key in self._states.keys(self._params[name]):
                tensors[f"optim.{name}.{key}"] = shard_full_tensor(
                    self._states.read(self._params[name], key), self._mesh
                )
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._state = WeakValueDictionary(present)
        return present

    def _share_weights(self) -> dict[str, Tensor]:
        return {
            name: shard_full_tensor(self._states.read(self._params[name], None), self._mesh)
            for name in self._built.trained
        }

    @torch.no_grad()
    def state_loaded(self) -> None:
        """Copy the tensors that the last `state_tensors` returned, and that were loaded into, back to the library."""
        for name in self._built.trained:
            param = self._params[name]
            if (weight := self._state.get(f"model.{name}")) is not None:
                self._states.write(param, None, _whole(weight))
            for key in self._states.keys(param):
                if (state := self._state.get(f"optim.{name}.{key}")) is not None:
                    self._states.write(param, key, _whole(state))
        for name, share in self._frozen.items():
            self._states.write_model_weight(self._params[name], _whole(share))
        self._states.publish()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return copies of this rank's shard of each trained weight. Every rank must call it.

        `weights_changed` copies them back.
        """
        self._weights = self._share_weights()
        return {name: to_local(share) for name, share in self._weights.items()}

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Copy the tensors that the last `weights` returned back to the library. Every rank must call it."""
        for name, share in self._weights.items():
            self._states.write(self._params[name], None, _whole(share))
        self._states.publish()
        self._weights = {}

    def as_global(self, name: str, local: Tensor) -> Tensor:
        """Return the global tensor whose shard on this rank is `local`; it has the shape and sharding of the weight."""
        return as_dtensor(local, self._built.blanks[name], self._mesh)

    @torch.no_grad()
    def restore_originals(self) -> None:
        """Copy the fp32 values from before casting into the library's fp32 weights, and free them."""
        rounded = [name for name in self._built.trained if name in self._built.originals]
        for name in rounded:
            self._states.write(self._params[name], None, self._built.originals[name].to(self.world.device))
        if rounded:
            self._states.publish()
        self._built.originals.clear()

    def _frozen_values(self) -> dict[str, Tensor]:
        trained = set(self._built.trained)
        names = [name for name in self._built.blanks if name not in trained]
        return {name: self._built.originals[name].to(self.world.device) for name in names}

    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint will be loaded into."""
        for entry, (shape, dtype) in shapes.items():
            name, _, key = entry.rpartition(".")
            if name in self._params:
                full = shape == self._built.blanks[name].shape and len(shape) > 0
                self._states.allocate(self._params[name], key, shape, dtype, full=full)

    def state(self) -> dict[str, Any]:
        """Return the state besides tensors: step count, skipped steps, loss scale."""
        return {"steps": self.steps, **self.skips.state(), "scaler": self._scaler_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned."""
        self.steps = int(state["steps"])
        self.skips.restore(state)
        if state["scaler"] is not None:
            self._restore_scaler(state["scaler"])

    def parameter_count(self) -> tuple[int, int]:
        """Return the number of parameters of the full model, and of the trained ones."""
        sizes = {name: blank.numel() for name, blank in self._built.blanks.items()}
        return sum(sizes.values()), sum(sizes[name] for name in self._built.trained)

    def frozen(self) -> frozenset[str]:
        """Return the names of the parameters that are not trained."""
        return frozenset(self._built.blanks) - frozenset(self._built.trained)


class _SequentialWrapper(nn.Module):
    """Calls a library's wrapper of an `nn.Sequential` with one argument: the first value of a micro-batch."""

    def __init__(self, called: nn.Module) -> None:
        super().__init__()
        self.called = called

    @classmethod
    def wrap(cls, called: nn.Module, module: nn.Module) -> nn.Module:
        """Return `called`, wrapped in this class if `module` is an `nn.Sequential`."""
        return cls(called) if type(module).forward is nn.Sequential.forward else called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(first_input(kwargs or (args[0] if len(args) == 1 else args)))


def _whole(share: Tensor) -> Tensor:
    return share.full_tensor() if is_sharded(share) else share
