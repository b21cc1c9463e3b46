"""The answers of one rollout with their log-probabilities, values and advantages: tensors of fixed shapes.

Every rank has all of them. Their shapes follow from the run description alone, so a checkpoint may be written between
two steps on the same rollout, and loaded with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.config import ResolvedBatch
from plait.data import MicroBatch, RankLoader, SampleOrder
from plait.distributed import World
from plait.errors import ConfigError, Problem, TrainingError
from plait.models import IGNORE_INDEX
from plait.posttrain.data.datasets import STEP, ExampleRow, stack
from plait.posttrain.losses import as_bits
from plait.posttrain.rl.settings import Online


class Experience:
    """Tensors (answers, tokens). A label is the next token; -100 where that does not belong to the answer."""

    def __init__(self, answers: int, width: int, pad: int) -> None:
        self.width = -(-width // STEP) * STEP
        self.ids = torch.full((answers, self.width), pad, dtype=torch.int64)
        self.labels = torch.full((answers, self.width), IGNORE_INDEX, dtype=torch.int64)
        self.lengths = torch.zeros(answers, dtype=torch.int64)
        self.old, self.reference, self.advantages, self.values, self.returns = (
            torch.zeros(answers, self.width) for _ in range(5)
        )
        self.number = -1
        """The number of the current rollout, from 0; -1 before the first."""
        self._pad = pad

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mask(self) -> Tensor:
        """True where the label is a token of an answer that is trained on."""
        return self.labels != IGNORE_INDEX

    def put(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Store new prompts and answers, and set all other tensors to zero."""
        self.ids.fill_(self._pad)
        self.labels.fill_(IGNORE_INDEX)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = torch.tensor([*prompt, *answer])
            length = len(tokens) - 1
            self.ids[row, :length] = tokens[:-1]
            self.labels[row, len(prompt) - 1 : length] = tokens[len(prompt) :]
            self.lengths[row] = length
        for numbers in (self.old, self.reference, self.advantages, self.values, self.returns):
            numbers.zero_()

    def forget(self, rows: Tensor) -> None:
        """Remove the labels of some answers, so that they are not trained on."""
        self.labels[rows] = IGNORE_INDEX

    def inputs(self, rows: Sequence[int], *names: str) -> dict[str, Tensor]:
        """Return a micro-batch of some rows, cut to the longest: ids, labels, and the named tensors as bits.

        See [Note: inputs that keep their precision], `posttrain/losses.py`.
        """
        chosen = torch.tensor(rows)
        width = -(-int(self.lengths[chosen].max()) // STEP) * STEP
        batch = {"input_ids": self.ids[chosen, :width], "labels": self.labels[chosen, :width]}
        numbers = {name: as_bits(getattr(self, name)[chosen, :width]) for name in names}
        return {**batch, **numbers}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores, by name."""
        names = ("ids", "labels", "lengths", "old", "reference", "advantages", "values", "returns")
        return {name: getattr(self, name) for name in names}


# The loader of an online phase: it yields the micro-batches of each step, and starts a new rollout when all steps of
# the last one are done.
#
# [Note: a rollout is some steps long]
# The answers of a rollout are a whole number of batches, and steps go over them `epochs` times; one such time is a
# *pass*. So a rollout lasts a fixed number of steps, and an epoch of the prompts is a fixed number of rollouts. The
# number of a step determines its answers, so the step is all that is needed to resume, as with other data.


Roll = Callable[[int], None]
"""A function that generates the rollout with a number, and stores it in the `Experience`."""


class ExperienceLoader:
    """Yields the micro-batches of answers of each step; see [Note: a rollout is some steps long]."""

    def __init__(
        self,
        online: Online,
        experience: Experience,
        roll: Roll,
        *,
        prompts: int,
        batch: ResolvedBatch,
        world: World,
        seed: int,
        ptx: ExampleMixture | None = None,
    ) -> None:
        answers = online.answers
        if answers % batch.total:
            group = f" × {online.group} answers per prompt" if online.group > 1 else ""
            message = f"{online.rollout.prompts}{group} is not a multiple of batch.total {batch.total}"
            raise ConfigError(Problem("rollout.prompts", message, "Make one a multiple of the other."))
        self.dataset = experience
        self.current: list[Sequence[int]] = []
        """The rows of answers in each micro-batch of the latest step, on this rank."""
        self._online, self._roll, self._ptx = online, roll, ptx
        self._passes = online.method.epochs
        self._per_pass = answers // batch.total
        self._rollouts = -(-prompts // online.rollout.prompts)
        self._order = RankLoader(
            range(answers),
            rank=world.data_rank,
            ranks=world.layout.data_parallel,
            batch=batch,
            seed=seed,
            shuffle=True,
            collate=list,
        )

    @property
    def steps_per_rollout(self) -> int:
        """The number of steps on the answers of one rollout."""
        return self._passes * self._per_pass

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps until every prompt was used once."""
        return self._rollouts * self.steps_per_rollout

    @property
    def samples_per_epoch(self) -> int:
        """The number of answers in the steps of an epoch; an answer counts once per pass."""
        return self._rollouts * self._passes * len(self.dataset)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of each step of an epoch, from `start_step` on."""
        first, step_in_rollout = divmod(start_step, self.steps_per_rollout)
        for rollout in range(first, self._rollouts):
            number = epoch * self._rollouts + rollout
            if step_in_rollout == 0:
                self._roll(number)
            elif self.dataset.number != number:
                raise TrainingError(
                    f"the run stopped within rollout {number}, and its checkpoint has the answers of rollout "
                    f"{self.dataset.number}: resume from a checkpoint of this run, with the same rollout and method"
                )
            for turn in range(step_in_rollout // self._per_pass, self._passes):
                yield from self._pass(number * self._passes + turn, step_in_rollout % self._per_pass)
                step_in_rollout = 0

    def _pass(self, turn: int, start: int) -> Iterator[list[MicroBatch]]:
        names = ("old", "advantages", *(() if self._online.reference == "none" else ("reference",)))
        for step, micro_batches in enumerate(self._order.epoch(turn, start), start):
            self.current = [micro_batch.inputs for micro_batch in micro_batches]
            scale = None
            if self._ptx is not None:
                everybody = self._order.sample_ids(turn, step).tolist()
                scale = self._ptx.scale(turn, everybody, int(self.dataset.mask[everybody].sum()))
            yield [
                MicroBatch(self._inputs(turn, micro_batch.inputs, names, scale), micro_batch.samples)
                for micro_batch in micro_batches
            ]

    def _inputs(self, turn: int, rows: Sequence[int], names: Sequence[str], scale: float | None) -> dict[str, Any]:
        inputs = self.dataset.inputs(rows, *names)
        return inputs if self._ptx is None or scale is None else self._ptx.append_to(inputs, turn, rows, scale)

    def close(self) -> None:
        """Do nothing: no resource is held."""


class ExampleMixture:
    """Examples of the pretraining mixture (`ptx_data`): one for each answer.

    Which one depends on the pass and the answer only, not on the ranks.
    """

    def __init__(self, rows: Sequence[ExampleRow], *, weight: float, seed: int, pad: int, answers: int) -> None:
        self._rows, self._weight, self._pad, self._answers = rows, weight, pad, answers
        self._order = SampleOrder(len(rows), seed)

    def _example_for(self, turn: int, answer: int) -> ExampleRow:
        epoch, index = divmod(turn * self._answers + answer, len(self._rows))
        return self._rows[self._order.index(epoch, index)]

    def scale(self, turn: int, answers: Sequence[int], targets: int) -> float:
        """Return the factor of the summed loss of the examples.

        The loss of a step is divided by `targets`, the number of tokens of the answers. With this factor the examples
        contribute `weight` times the mean loss of their own tokens.
        """
        learned = sum(int((self._example_for(turn, answer).labels != IGNORE_INDEX).sum()) for answer in answers)
        return self._weight * targets / max(learned, 1)

    def append_to(
        self, inputs: dict[str, Tensor], turn: int, answers: Sequence[int], scale: float
    ) -> dict[str, Tensor]:
        """Return the micro-batch with its examples appended after the answers."""
        rows = [self._example_for(turn, answer) for answer in answers]
        ids = stack([torch.from_numpy(row.ids).long() for row in rows], self._pad)
        labels = stack([torch.from_numpy(row.labels).long() for row in rows], IGNORE_INDEX)
        width = max(ids.shape[1], inputs["input_ids"].shape[1])
        batch = {name: _widened(tensor, width, 0) for name, tensor in inputs.items()}
        batch["input_ids"] = torch.cat(
            [_widened(inputs["input_ids"], width, self._pad), _widened(ids, width, self._pad)]
        )
        batch["labels"] = torch.cat(
            [_widened(inputs["labels"], width, IGNORE_INDEX), _widened(labels, width, IGNORE_INDEX)]
        )
        return {**batch, "ptx_scale": as_bits(torch.tensor([scale]))}


def _widened(rows: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)
