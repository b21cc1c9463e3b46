"""One optimizer step through another library, told and saved as every engine's is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from plait.errors import TrainingError
from plait.parallel import average_buffers
from plait.spec import Phase, first_part
from plait.strategy.base import Evaluation, StepResult
from plait.strategy.foreign.build import Built, named_parameters
from plait.strategy.foreign.loss import EvenNormalizer
from plait.strategy.foreign.states import States
from plait.strategy.foreign.wholes import as_share, share_of
from plait.strategy.native.fields import select_inputs
from plait.strategy.native.forward import Forward
from plait.strategy.native.loss import LossNormalizer, WeightedLoss, read_loss
from plait.strategy.preparation import Preparation
from plait.strategy.skips import Skips
from plait.strategy.stepping import SteppingEngine, inputs_and_samples, unheard
from plait.world import is_sharded, local_part


class ForeignEngine(SteppingEngine):
    """Trains with another library. What is common to all of them; a subclass knows its library's steps and states."""

    def __init__(
        self,
        called: nn.Module,
        states: States,
        built: Built,
        given: Preparation,
        *,
        normalizer: type[LossNormalizer] = EvenNormalizer,
    ) -> None:
        """`called` is what the library wants to be called for a forward pass.

        `normalizer` divides losses: as the native engine does it, where a correction of the gradients costs nothing.
        """
        config, world = given.config, given.world
        self.model = built.module
        self.world = world
        self.config = config
        self.steps = 0
        self.accumulation = given.accumulation
        self.optimizer = states.optimizer
        """The torch optimizer whose groups carry the learning rates."""
        self._built = built
        self._states = states
        self._params: dict[str, nn.Parameter] = named_parameters(built.module)
        self._guard = config.train.guard
        self.skips = Skips(config.train.guard)
        scaler = config.precision.scaler
        self._lowest_scale = scaler.minimum if scaler.static is None else math.inf
        self._schedule = given.schedule()
        self._loss_function = given.loss_function
        self._say = given.say
        self._normalizer = normalizer(world.everyone, world.device)
        select = select_inputs(built.module, config.model_inputs, has_loss=given.loss_function is not None)
        row = _Row.around(called, built.module)
        self._forward = Forward(row, world.device, given.policy, compiled=(), select=select, say=given.say)
        self._mesh = world.submesh("dp_replicate", "dp_shard")
        self._peers = world.group("dp_replicate", "dp_shard")
        # What was handed out last and may be written to, as long as somebody holds it; see [Note: states by way of
        # wholes].
        self._state: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        self._weights: dict[str, Tensor] = {}
        self._frozen = {name: share_of(value, self._mesh) for name, value in self._frozen_values().items()}
        self.on_phase: Callable[[Phase], None] = unheard
        self._after_step = getattr(built.module, "after_step", None)
        self.model.train()

    # ---- what a library does in its own way

    @abstractmethod
    def _backward(self, loss: Tensor, *, last: bool) -> None:
        """Backward through a loss that is this rank's part of the global mean; `last` of a step."""

    @abstractmethod
    def _update(self, correction: float) -> tuple[float, bool]:
        """Update with the gradients times `correction`; their norm before clipping, and whether it was left out."""

    def _scaler_state(self) -> dict[str, float] | None:
        """The loss scaler's state, in the native engine's words."""
        return None

    def _restore_scaler(self, state: Mapping[str, float]) -> None:
        """Go on from it."""

    # ---- one step

    def train_step(self, micro_batches: Sequence[Any]) -> StepResult:
        """One optimizer step over this rank's micro-batches."""
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
            return  # an overflow is part of the search for a scale, which ends by itself
        if not skipped:
            self.skips.in_a_row = 0
            return
        whose = self.whose(self.steps)
        self._say(f"step {self.steps} skipped on every rank: its loss or gradient is not finite{whose}")
        self.skips.add(self.steps, whose, scale=None if scaler is None else scaler["scale"])

    def agree_on_buffers(self) -> None:
        """Average running statistics over the ranks; other buffers become rank 0's."""
        if self._peers is not None:
            average_buffers(self.model, self._peers, self.world.size)

    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Forward one micro-batch without gradients, in evaluation mode."""
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

    # ---- state, see [Note: states by way of wholes]

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """The logical state: `model.<name>`, `optim.<name>.<key>`. Every rank must ask."""
        weights = self._share_weights()
        tensors = {f"model.{name}": weights.get(name, self._frozen.get(name)) for name in self._built.blanks}
        buffers = dict(self.model.named_buffers())
        tensors |= {f"model.{name}": buffers[name] for name in self._built.buffers}
        for name in self._built.trained:
            for key in self._states.keys(self._params[name]):
                tensors[f"optim.{name}.{key}"] = share_of(self._states.read(self._params[name], key), self._mesh)
        found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._state = WeakValueDictionary(found)
        return found

    def _share_weights(self) -> dict[str, Tensor]:
        return {name: share_of(self._states.read(self._params[name], None), self._mesh) for name in self._built.trained}

    @torch.no_grad()
    def state_loaded(self) -> None:
        """What `state_tensors` handed out last was written to: give it to the library."""
        for name in self._built.trained:
            param = self._params[name]
            if (weight := self._state.get(f"model.{name}")) is not None:
                self._states.write(param, None, _whole(weight))
            for key in self._states.keys(param):
                if (state := self._state.get(f"optim.{name}.{key}")) is not None:
                    self._states.write(param, key, _whole(state))
        for name, share in self._frozen.items():
            self._states.write_computing(self._params[name], _whole(share))
        self._states.publish()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """This rank's part of each trained weight: a copy, until `weights_changed`. Every rank must ask."""
        self._weights = self._share_weights()
        return {name: local_part(share) for name, share in self._weights.items()}

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Somebody wrote into what `weights` handed out last. Every rank must ask."""
        for name, share in self._weights.items():
            self._states.write(self._params[name], None, _whole(share))
        self._states.publish()
        self._weights = {}

    def as_whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of a weight, as the logical whole."""
        return as_share(part, self._built.blanks[name], self._mesh)

    @torch.no_grad()
    def restore_originals(self) -> None:
        """Give the library the fp32 values that it was handed rounded; forget them."""
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
        """Make room for the optimizer state that a checkpoint is about to fill."""
        for entry, (shape, dtype) in shapes.items():
            name, _, key = entry.rpartition(".")
            if name in self._params:
                whole = shape == self._built.blanks[name].shape and len(shape) > 0
                self._states.allocate(self._params[name], key, shape, dtype, whole=whole)

    def state(self) -> dict[str, Any]:
        """The state that is numbers, not tensors."""
        return {"steps": self.steps, **self.skips.state(), "scaler": self._scaler_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.steps = int(state["steps"])
        self.skips.restore(state)
        if state["scaler"] is not None:
            self._restore_scaler(state["scaler"])

    def parameter_count(self) -> tuple[int, int]:
        """How many numbers the whole model has, and how many of them are trained."""
        sizes = {name: blank.numel() for name, blank in self._built.blanks.items()}
        return sum(sizes.values()), sum(sizes[name] for name in self._built.trained)

    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return frozenset(self._built.blanks) - frozenset(self._built.trained)


class _Row(nn.Module):
    """A library's wrapper around a row of layers: of a micro-batch it gets the first part, as the row itself would."""

    def __init__(self, called: nn.Module) -> None:
        super().__init__()
        self.called = called

    @classmethod
    def around(cls, called: nn.Module, module: nn.Module) -> nn.Module:
        """`called` itself where `module` takes whole micro-batches."""
        return cls(called) if type(module).forward is nn.Sequential.forward else called

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.called(first_part(named or (inputs[0] if len(inputs) == 1 else inputs)))


def _whole(share: Tensor) -> Tensor:
    return share.full_tensor() if is_sharded(share) else share
