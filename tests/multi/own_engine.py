"""An engine as somebody outside would write one: plain `DistributedDataParallel` around the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from plait.config.run import RunConfig
from plait.strategy import (
    Built,
    Evaluation,
    LossNormalizer,
    Preparation,
    Skips,
    SteppingEngine,
    StepResult,
    WeightedLoss,
    build_whole,
    read_loss,
)
from plait.world import World


class DdpEngine(SteppingEngine):
    """Keeps the whole model and its optimizer on every rank. Takes one argument of its own, DDP's `bucket_mb`."""

    honours: ClassVar[tuple[str, ...]] = ("schedule", "train.clip_norm")
    stage = 0

    @classmethod
    def prepare(cls, given: Preparation, *, bucket_mb: int = 25) -> DdpEngine:
        engine = cls(build_whole(given), given.config, given.world, bucket_mb)
        engine.accumulation = given.accumulation
        engine._schedule = given.schedule()
        engine._loss_function = given.loss_function
        return engine

    def __init__(self, built: Built, config: RunConfig, world: World, bucket_mb: int) -> None:
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
        outputs = self._called(**batch.inputs)
        return read_loss(outputs, batch.inputs, batch.samples, self._loss_function)

    def _begin_backward(self, loss: Tensor, *, last: bool) -> None:
        (loss * self.world.size).backward()  # DDP takes the mean over ranks of what are parts of a mean

    def _finish_step(self) -> StepResult:
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

    def agree_on_buffers(self) -> None:
        for buffer in self.model.buffers() if self.world.size > 1 else ():
            dist.broadcast(buffer, 0)

    @torch.no_grad()
    def evaluate_micro_batch(self, batch: Any) -> Evaluation:
        self.model.eval()
        outputs = self.model(**batch.inputs)
        self.model.train()
        loss = read_loss(outputs, batch.inputs, batch.samples, self._loss_function)
        return Evaluation(float(loss.total()), float(loss.weight), outputs)

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def state_tensors(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items()}
        for name, param in self._named().items():
            for key, value in self._optimizer.state.get(param, {}).items():
                tensors[f"optim.{name}.{key}"] = value
        return tensors

    def allocate_optimizer_state(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        params = self._named()
        for entry, (shape, dtype) in shapes.items():
            name, _, key = entry.rpartition(".")
            if name in params:
                self._optimizer.state[params[name]][key] = torch.zeros(shape, dtype=dtype)

    def state_loaded(self) -> None:
        """Everything was written in place."""

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "scaler": None, **self.skips.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.skips.restore(state)

    def parameter_count(self) -> tuple[int, int]:
        sizes = {name: param.numel() for name, param in self._named().items()}
        return sum(sizes.values()), sum(sizes[name] for name in self._built.trained)

    def frozen(self) -> frozenset[str]:
        return frozenset(self._built.blanks) - frozenset(self._built.trained)

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._named().items() if param.requires_grad}

    def weights_changed(self) -> None:
        """They are the parameters themselves."""

    def as_whole(self, name: str, part: Tensor) -> Tensor:
        return part


class NotAnEngine:
    """Declares a key that does not exist."""

    honours = ("strategy.zeroo",)


class OwnWay(DdpEngine):
    """One that no plan is near."""

    as_native = False


def makes_nothing(given: Preparation) -> None:
    """Returns no engine."""


makes_nothing.honours = ("*",)  # type: ignore[attr-defined]
