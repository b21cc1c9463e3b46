"""Documents packed into sequences of one length."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import counted
from plait.data.order import splitmix64
from plait.data.tokens import TokenFile
from plait.errors import DataError

IGNORE = -100
"""The label of a position without a target; the default `ignore_index` of torch's cross entropy."""

Split = Literal["all", "train", "val"]


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Sequences of `seq_len` tokens, cut one after another from the documents of a split.

    Each item has `input_ids` and `labels`, already shifted: the label of a position is the token after
    it. With `document_mask` documents are independent: the last token of a document has no label, and
    `positions` (from 0 in each document, and at the start of a sequence) and `document_ids` (from 0 in each
    sequence) define the attention mask. Prompt tokens, which the file masks, are never labels. The remainder
    at the end, less than a sequence, is not used. `source` is the name in messages: the text file that was
    tokenized, not the file in the cache.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        seq_len: int,
        document_mask: bool = True,
        split: Split = "all",
        val_fraction: float = 0.05,
        source: str | None = None,
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.document_mask = document_mask
        offsets, chosen = choose_documents(np.asarray(tokens.offsets), split, val_fraction)
        lengths = offsets[chosen + 1] - offsets[chosen]
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        """The start of each document of the split, in the concatenation of these documents."""
        self._shifts = offsets[chosen] - self._starts[:-1]
        """Its start in the file, minus its start in that concatenation."""
        self._count = int(self._starts[-1])
        # Without a document mask the last token has no label, so it cannot be an input.
        self._length = (self._count - (not document_mask)) // seq_len
        if self._length < 1:
            prefix = "" if split == "all" else f"split {split!r} of "
            raise DataError(
                f"{prefix}{source or tokens.path} has {counted(self._count, 'token')}, less than one sequence of "
                f"seq_len {seq_len}: make seq_len smaller, or give more text"
            )

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary: a model needs at least as many embeddings."""
        return self.tokens.meta.vocab_size

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer of the tokens; empty where it is not known."""
        return self.tokens.meta.tokenizer

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self._length <= index < self._length:
            raise IndexError(f"sequence {index} of {self._length}")
        start = (index % self._length) * self.seq_len
        stop = min(start + self.seq_len + 1, self._count)
        first, last = np.searchsorted(self._starts, (start, stop - 1), side="right") - 1
        bounds = self._starts[first : last + 2].clip(start, stop) - start
        documents = np.repeat(np.arange(last - first + 1), np.diff(bounds))
        offsets = np.arange(start, stop) + self._shifts[first : last + 1][documents]
        window = self.tokens.tokens[offsets].astype(np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        shown = len(window) - 1
        labels[:shown] = window[1:]
        if self.tokens.mask is not None:
            labels[:shown][self.tokens.mask[offsets[1:]] == 0] = IGNORE
        item = {"input_ids": window[: self.seq_len], "labels": labels}
        if self.document_mask:
            labels[:shown][documents[1:] != documents[:-1]] = IGNORE
            documents = documents[: self.seq_len]
            item["positions"] = np.arange(self.seq_len) - bounds[documents]
            item["document_ids"] = documents
        return {key: torch.from_numpy(value) for key, value in item.items()}


def choose_documents(
    offsets: NDArray[np.int64], split: Split, val_fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets, and the indices in them of the documents of a split.

    Documents are sorted by a hash of their index, and the first ones are for validation. A source with a
    single document is split in two first: its end is for validation.
    """
    count = len(offsets) - 1
    if split == "all":
        return offsets, np.arange(count)
    if count == 1:
        end = offsets[1]
        offsets = np.array([0, end - max(1, round(end * val_fraction)), end])
        return offsets, np.array([0 if split == "train" else 1])
    ranked = np.argsort(splitmix64(np.arange(1, count + 1, dtype=np.uint64)))
    boundary = min(max(1, round(count * val_fraction)), count - 1)
    return offsets, np.sort(ranked[boundary:] if split == "train" else ranked[:boundary])
