"""`PipelineEngine`: steps over whole batches, for a `PipelineModule`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import TrainingError
from plait.frontends.deepspeed.engine import DeepSpeedEngine, Parts


class PipelineEngine(DeepSpeedEngine):
    """Trains with `train_batch` alone: a pipeline has several micro-batches under way.

    Every rank reads its data, those in the middle of the pipeline too, for the number of samples.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.num_stages = parts.native.world.layout.pp
        self.stage_id = parts.native.world.coordinate("pp")
        self._batch_fn: Callable[[Any], Any] | None = None
        self._last_print = time.perf_counter()

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step."""
        return self._batch.accumulation

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step over `gradient_accumulation_steps` micro-batches of (inputs, labels); the mean loss of all ranks."""
        self._need_optimizer("train_batch")
        self._latest.settle()
        self.train()
        data = self._data(data_iter)
        batches = [next(data) for _ in range(self._batch.accumulation)]
        if self._clock is None:
            result = self._native.train_step(self._prepared(batches))
        else:
            with self._clock.measure("train_batch"):
                result = self._native.train_step(self._prepared(batches))
        self.micro_steps += self._batch.accumulation
        self._updated = True
        self._count(result)
        if self._every and self.global_steps % self._every == 0:
            each = (time.perf_counter() - self._last_print) / self._every
            self._last_print = time.perf_counter()
            self._say(
                [
                    f"steps: {self.global_steps} loss: {result.loss:0.4f} iter time (s): {each:0.3f} "
                    f"samples/sec: {self.train_batch_size() / each:0.3f}"
                ]
            )
        if self._clock is not None:
            self._say(self._clock.take(boundary=True)[1:])
        return torch.tensor(result.loss, device=self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss over micro-batches and ranks, on every rank; with `return_logits`, the answers too.

        Without `compute_loss` the outputs alone, on the last stage, and None elsewhere. Losses are always averaged,
        and always told to all.
        """
        if reduce_output not in (None, "avg"):
            raise TrainingError(f"reduce_output={reduce_output!r} is not offered: leave it out, or write None")
        count = num_micro_batches or self._batch.accumulation
        batches = self._prepared([next(data_iter) for _ in range(count)])
        found = [self._native.evaluate_micro_batch(batch) for batch in batches]
        outputs = [each.outputs for each in found] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        sums = self._native.world.gather((sum(e.loss_sum for e in found), sum(e.loss_count for e in found)))
        loss = torch.tensor(sum(s for s, _ in sums) / (sum(n for _, n in sums) or 1.0), device=self.device)
        return (loss, outputs) if return_logits else loss

    def _prepared(self, batches: list[Any]) -> list[Any]:
        return batches if self._batch_fn is None else [self._batch_fn(batch) for batch in batches]

    def set_dataloader(self, loader: Any) -> None:
        """Read training data from here."""
        self._training_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read training data from here."""
        self._training_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Change every micro-batch with this function before it is used."""
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank gives the answer."""
        return self.stage_id == self.num_stages - 1

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Not to be had."""
        raise _only_batches("engine(…)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not to be had."""
        raise _only_batches("engine.backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not to be had."""
        raise _only_batches("engine.step")


def _only_batches(what: str) -> TrainingError:
    return TrainingError(f"{what} is not offered by a pipeline: call engine.train_batch(data_iter) or eval_batch")
