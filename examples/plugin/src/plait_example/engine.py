"""An engine of one's own: torch's `DistributedDataParallel` around the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from plait import (
    Evaluation,
    LossNormalizer,
    Preparation,
    Skips,
    SteppingEngine,
    StepResult,
    WeightedLoss,
    build_full_model,
    read_loss,
)


class PlainDDP(SteppingEngine):
    """Keeps the whole model and its optimizer on every rank. Takes one argument of its own, DDP's `bucket_mb`."""

    honours: ClassVar[tuple[str, ...]] = ("schedule", "train.clip_norm")
    stage = 0

    @classmethod
    def prepare(cls, given: Preparation, *, bucket_mb: int = 25) -> PlainDDP:
        """Return the engine; `given` says all that is known of the run."""
        return cls(given, bucket_mb)

    def __init__(self, given: Preparation, bucket_mb: int) -> None:
        built, world, config = build_full_model(given), given.world, given.config
        self.config = config
        self.accumulation = given.accumulation
        self._schedule = given.schedule()
        self._loss_function = given.loss_function
        self.model = built.module.to(world.device).train()
        self.world, self.steps = world, 0
        self.skips = Skips(config.train.guard)
        self.on_phase = lambda phase: None
        self.bucket_mb = bucket_mb
        self._built = built
        self._called = DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb) if world.size > 1 else self.model
        self._optimizer = built.optimizer(config)
        self._clip_norm = config.train.clip_norm or math.inf
        self._normalizer = LossNormalizer(world.everyone, world.device)

    def _forward_loss(self, batch: Any) -> WeightedLoss:
        """Return the loss of one micro-batch, and how many targets it is over."""
        outputs = self._called(**batch.inputs)
        return read_loss(outputs, batch.inputs, batch.samples, self._loss_function)

    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        """Backward through one micro-batch's share of the loss; DDP sums it over ranks."""
        torch.autograd.backward(loss * self.world.size)  # DDP takes the mean over ranks of what are parts of a mean

    def _finish_step(self) -> StepResult:
        """Divide by the exact number of targets, clip, update."""
        lr = self._schedule.apply(self._optimizer, self.steps)
        sums = self._normalizer.finish()
        correction = sums.correction()
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(correction)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm))
        loss, targets, stop = sums.read()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return StepResult(loss, norm, False, lr, targets, stop)

    def sync_buffers(self) -> None:
        """Take rank 0's running statistics."""
        for buffer in self.model.buffers() if self.world.size > 1 else ():
            dist.broadcast(buffer, 0)

    @torch.no_grad()
    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        """Return the loss of one micro-batch in evaluation mode."""
        self.model.eval()
        outputs = self.model(**batch.inputs)
        self.model.train()
        loss = read_loss(outputs, batch.inputs, batch.samples, self._loss_function)
        return Evaluation(float(loss.total()), float(loss.weight), outputs)

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def state_tensors(self) -> dict[str, Tensor]:
        """Return weights, buffers and optimizer state, under the names that every engine gives them."""
        tensors = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items()}
        for name, param in self._named().items():
            for key, value in self._optimizer.state.get(param, {}).items():
                tensors[f"optim.{name}.{key}"] = value
        return tensors

    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the optimizer state that a checkpoint has."""
        params = self._named()
        for entry, (shape, dtype) in shapes.items():
            name, _, key = entry.rpartition(".")
            if name in params:
                self._optimizer.state[params[name]][key] = torch.zeros(shape, dtype=dtype)

    def state_loaded(self) -> None:
        """Everything was written in place."""

    def state(self) -> dict[str, Any]:
        """Return the numbers that belong in a checkpoint."""
        return {"steps": self.steps, "scaler": None, **self.skips.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from them."""
        self.steps = int(state["steps"])
        self.skips.restore(state)

    def parameter_count(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many are trained."""
        sizes = {name: param.numel() for name, param in self._named().items()}
        return sum(sizes.values()), sum(sizes[name] for name in self._built.trained)

    def frozen(self) -> frozenset[str]:
        """Return the names of those that are not trained."""
        return frozenset(self._built.blanks) - frozenset(self._built.trained)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer updates."""
        return {name: param.detach() for name, param in self._named().items() if param.requires_grad}

    def weights_changed(self) -> None:
        """They are the parameters themselves."""

    def as_global(self, name: str, local: Tensor) -> Tensor:
        """Return a weight as a checkpoint has it: every rank has it whole."""
        return local
