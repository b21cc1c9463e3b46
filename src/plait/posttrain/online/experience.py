"""The answers of one rollout and all that is known of them: tensors of a fixed shape, whole on every rank.

Their shapes follow from the run description alone, so a checkpoint may be written in the middle of a rollout's steps,
and read under any layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.models import IGNORE_INDEX
from plait.posttrain.data.datasets import STEP
from plait.posttrain.logprobs import as_bits


class Experience:
    """Rows of (answers, tokens). A label is the token that follows; -100 where it is none of the answer's."""

    def __init__(self, answers: int, width: int, pad: int) -> None:
        self.width = -(-width // STEP) * STEP
        self.ids = torch.full((answers, self.width), pad, dtype=torch.int64)
        self.labels = torch.full((answers, self.width), IGNORE_INDEX, dtype=torch.int64)
        self.lengths = torch.zeros(answers, dtype=torch.int64)
        self.old, self.reference, self.advantages, self.values, self.returns = (
            torch.zeros(answers, self.width) for _ in range(5)
        )
        self.number = -1
        """Which rollout it is, counted from 0; -1 before the first."""
        self._pad = pad

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mask(self) -> Tensor:
        """Where there is a token of an answer to learn from."""
        return self.labels != IGNORE_INDEX

    def put(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Take new answers; nothing else is known of them yet."""
        self.ids.fill_(self._pad)
        self.labels.fill_(IGNORE_INDEX)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = torch.tensor([*prompt, *answer])
            length = len(tokens) - 1
            self.ids[row, :length] = tokens[:-1]
            self.labels[row, len(prompt) - 1 : length] = tokens[len(prompt) :]
            self.lengths[row] = length
        for each in (self.old, self.reference, self.advantages, self.values, self.returns):
            each.zero_()

    def forget(self, rows: Tensor) -> None:
        """Let nothing be learned from some answers."""
        self.labels[rows] = IGNORE_INDEX

    def inputs(self, rows: Sequence[int], *names: str) -> dict[str, Tensor]:
        """Rows for a model, cut to the longest: ids and labels, and numbers under these names, as bits."""
        chosen = torch.tensor(rows)
        width = -(-int(self.lengths[chosen].max()) // STEP) * STEP
        found = {"input_ids": self.ids[chosen, :width], "labels": self.labels[chosen, :width]}
        numbers = {name: as_bits(getattr(self, name)[chosen, :width]) for name in names}
        return {**found, **numbers}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        names = ("ids", "labels", "lengths", "old", "reference", "advantages", "values", "returns")
        return {name: getattr(self, name) for name in names}
