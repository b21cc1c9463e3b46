"""Data sets of tokenized examples, and the collate functions that make micro-batches of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from plait.data import IGNORE
from plait.posttrain.data.template import ChatTokens
from plait.posttrain.losses import as_bits

# Packing: several examples in one row, none of them cut.


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices whose lengths add up to at most `capacity`, by best-fit decreasing.

    The result depends on the lengths only. Rows are in the order of their first example.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """The free space of each row, as sorted pairs (space, row)."""
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        assert 0 < length <= capacity, "examples that do not fit were left out before"
        at = bisect_left(free, (length, -1))
        if at == len(free):
            rows.append([index])
            insort(free, (capacity - length, len(rows) - 1))
        else:
            space, row = free.pop(at)
            rows[row].append(index)
            insort(free, (space - length, row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


STEP = 8
"""Rows are padded to the longest one rounded up to a multiple of this, so that ranks can split the sequence evenly."""


class ExampleRow:
    """One tokenized example. The label of a token is the next token if that is trained on, else -100.

    The last token is only a label, and is not in `ids`. For a reward model it is (`judged`): the reward also depends on
    whether the answer has ended.
    """

    __slots__ = ("ids", "labels")

    def __init__(self, tokens: ChatTokens) -> None:
        ids = np.asarray(tokens.ids, dtype=np.int32)
        self.ids: NDArray[np.int32] = ids[:-1]
        self.labels: NDArray[np.int32] = np.where(np.asarray(tokens.learned[1:], dtype=bool), ids[1:], IGNORE).astype(
            np.int32
        )

    @classmethod
    def judged(cls, tokens: ChatTokens) -> ExampleRow:
        """Return a row with all tokens and no labels, for a reward model."""
        row = cls.__new__(cls)
        row.ids = np.asarray(tokens.ids, dtype=np.int32)
        row.labels = np.full(len(row.ids), IGNORE, dtype=np.int32)
        return row

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_targets(self) -> bool:
        """Whether any token has a label."""
        return bool((self.labels != IGNORE).any())


class AnswerRows(Dataset[dict[str, Tensor]]):
    """Examples for SFT: one per row, or with `packing` as many as fit into `seq_len` tokens.

    Packed examples do not attend to each other: `document_ids` and `positions` are those of `plait.data.packing`.
    """

    def __init__(self, rows: Sequence[ExampleRow], *, seq_len: int, packing: bool, pad: int) -> None:
        self.seq_len = seq_len
        self._rows = rows
        self._packing = packing
        self._pad = pad
        lengths = [len(row) for row in rows]
        self._groups = pack(lengths, seq_len) if packing else [[index] for index in range(len(rows))]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rows = [self._rows[row] for row in self._groups[index]]
        if not self._packing:
            return {"input_ids": _long(rows[0].ids), "labels": _long(rows[0].labels)}
        lengths = [len(row) for row in rows]
        rest = self.seq_len - sum(lengths)
        padding = np.full(rest, self._pad)
        ids = np.concatenate([*(row.ids for row in rows), padding])
        labels = np.concatenate([*(row.labels for row in rows), np.full(rest, IGNORE)])
        sizes = [*lengths, rest]
        return {
            "input_ids": _long(ids),
            "labels": _long(labels),
            "positions": _long(np.concatenate([np.arange(size) for size in sizes])),
            "document_ids": _long(np.repeat(np.arange(len(sizes)), sizes)),
        }


class PairRows(Dataset[dict[str, Tensor]]):
    """Pairs: a prompt with two answers, and their log-probabilities under the reference."""

    def __init__(self, pairs: Sequence[tuple[ExampleRow, ExampleRow]]) -> None:
        self._pairs = pairs
        self.reference = torch.zeros(len(pairs), 2)
        """The log-probabilities (chosen, rejected) of each pair under the reference; zeros until they are computed."""

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chosen, rejected = self._pairs[index]
        return {
            "chosen_ids": _long(chosen.ids),
            "chosen_labels": _long(chosen.labels),
            "rejected_ids": _long(rejected.ids),
            "rejected_labels": _long(rejected.labels),
            "reference": self.reference[index],
        }


class PadAnswers:
    """Collates rows of different lengths into one micro-batch; padding comes at the end and has no labels."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the micro-batch, each row padded to the longest."""
        fills = {"input_ids": self._pad, "labels": IGNORE, "positions": 0, "document_ids": 0}
        return {key: stack([item[key] for item in items], fills[key]) for key in items[0]}


class PadPairs:
    """Collates pairs into one micro-batch: all chosen answers first, then all rejected ones in the same order.

    For a reward model (`rewards`) it has `last`, the position of each answer's last token; for DPO it has labels and
    the log-probabilities under the reference, as bits: see [Note: inputs that keep their precision],
    `posttrain/losses.py`.
    """

    def __init__(self, pad: int, *, rewards: bool) -> None:
        self._pad = pad
        self._rewards = rewards

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the micro-batch, each row padded to the longest."""
        ids = [item[f"{which}_ids"] for which in ("chosen", "rejected") for item in items]
        batch = {"input_ids": stack(ids, self._pad)}
        if self._rewards:
            return {**batch, "last": torch.tensor([len(row) - 1 for row in ids])}
        labels = [item[f"{which}_labels"] for which in ("chosen", "rejected") for item in items]
        reference = torch.stack([item["reference"] for item in items], 1).flatten()
        return {**batch, "labels": stack(labels, IGNORE), "reference": as_bits(reference)}


def stack(rows: Sequence[Tensor], fill: int) -> Tensor:
    """Return one tensor of rows, each padded with `fill` at its end."""
    longest = -(-max(len(row) for row in rows) // STEP) * STEP
    out = torch.full((len(rows), longest), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def _long(values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
