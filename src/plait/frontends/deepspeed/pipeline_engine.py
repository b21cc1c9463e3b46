"""`PipelineEngine`: steps over whole batches, for a `PipelineModule`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import TrainingError
from plait.frontends.deepspeed.engine import DeepSpeedEngine, EngineComponents


class PipelineEngine(DeepSpeedEngine):
    """An engine that trains with `train_batch` only, because a pipeline computes several micro-batches at a time.

    Every rank must read the data, also those of middle stages, which use only the number of samples.
    """

    def __init__(self, components: EngineComponents) -> None:
        super().__init__(components)
        self.num_stages = components.native.world.layout.pp
        self.stage_id = components.native.world.coordinate("pp")
        self._batch_fn: Callable[[Any], Any] | None = None
        self._last_print = time.perf_counter()

    @property
    def micro_batches(self) -> int:
        """The micro-batches per step."""
        return self._batch.accumulation

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one step over micro-batches of (inputs, labels); return the mean loss of all ranks."""
        self._need_optimizer("train_batch")
        self._latest.settle()
        self.train()
        data = self._data(data_iter)
        batches = [next(data) for _ in range(self._batch.accumulation)]
        with self._timed("train_batch"):
            result = self._native.train_step(self._prepared(batches))
        self.micro_steps += self._batch.accumulation
        self._updated = True
        self._count(result)
        if self._print_interval and self.global_steps % self._print_interval == 0:
            seconds = (time.perf_counter() - self._last_print) / self._print_interval
            self._last_print = time.perf_counter()
            self._print(
                [
                    f"steps: {self.global_steps} loss: {result.loss:0.4f} iter time (s): {seconds:0.3f} "
                    f"samples/sec: {self.train_batch_size() / seconds:0.3f}"
                ]
            )
        if self._timers is not None:
            self._print(self._timers.lines(boundary=True)[1:])
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
        """Return the mean loss over micro-batches and ranks, on every rank; with `return_logits`, the outputs too.

        Without `compute_loss`, return the outputs on the last stage, and None on others. Losses are always averaged,
        and broadcast to all ranks.
        """
        if reduce_output not in (None, "avg"):
            raise TrainingError(f"reduce_output={reduce_output!r} is not offered: leave it out, or write None")
        count = num_micro_batches or self._batch.accumulation
        batches = self._prepared([next(data_iter) for _ in range(count)])
        results = [self._native.evaluate_micro_batch(batch) for batch in batches]
        outputs = [result.outputs for result in results] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        totals = sum(result.loss_sum for result in results), sum(result.loss_count for result in results)
        sums = self._native.world.gather(totals)
        loss = torch.tensor(sum(s for s, _ in sums) / (sum(n for _, n in sums) or 1.0), device=self.device)
        return (loss, outputs) if return_logits else loss

    def _prepared(self, batches: list[Any]) -> list[Any]:
        return batches if self._batch_fn is None else [self._batch_fn(batch) for batch in batches]

    def set_dataloader(self, loader: Any) -> None:
        """Read training data from a loader."""
        self._training_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read training data from an iterator."""
        self._training_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that prepares every micro-batch."""
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise: a pipeline has `train_batch` alone."""
        raise _not_offered("engine(…)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: a pipeline has `train_batch` alone."""
        raise _not_offered("engine.backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: a pipeline has `train_batch` alone."""
        raise _not_offered("engine.step")


def _not_offered(what: str) -> TrainingError:
    return TrainingError(f"{what} is not offered by a pipeline: call engine.train_batch(data_iter) or eval_batch")
