"""What is learned from tokenized text besides the next token: rows of documents, and the objectives that hide parts.

[Note: what is hidden]
What an objective hides in a row is a pure function of (seed, epoch, index of the row), as the order of samples is. So
batches do not depend on ranks, workers or a resume, each epoch hides other tokens, and a validation, which always reads
epoch 0, hides the same ones every time.

Labels are in the convention of the model: at the index of the token that is predicted, not shifted. A model with a
decoder makes the decoder's inputs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import DenoisingObjective, MaskedObjective, Seq2SeqObjective, SpanCorruptionObjective, counted
from plait.data.order import sample_seed
from plait.data.packing import IGNORE, Split, choose_documents
from plait.data.tokenizer import TextTokenizer
from plait.data.tokens import TokenFile
from plait.errors import DataError

Ids = NDArray[np.int64]


class Objective(Protocol):
    """Makes a row's inputs of the model from the tokens of a document, without special tokens."""

    def __call__(self, tokens: Ids, random: np.random.Generator, /) -> Mapping[str, Any]:
        """Return the row: tensors or arrays of the same shapes for every row."""


class SpecialTokens:
    """The special tokens that an objective puts into its rows."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.pad = tokenizer.named("pad")
        self.before = np.array(tokenizer.begin, dtype=np.int64)
        self.after = np.array(tokenizer.after or (tokenizer.end,), dtype=np.int64)
        """Where the tokenizer puts nothing after a text, the end token."""

    @property
    def count(self) -> int:
        """The number of tokens around a text."""
        return len(self.before) + len(self.after)

    def around(self, tokens: Ids) -> Ids:
        """Return the tokens between those of the tokenizer."""
        return np.concatenate([self.before, tokens, self.after])

    def row(self, tokens: Ids, length: int) -> dict[str, Tensor]:
        """Return the tokens padded to `length`, and the mask of those that are no padding."""
        ids = np.full(length, self.pad, dtype=np.int64)
        ids[: len(tokens)] = tokens
        return {"input_ids": torch.from_numpy(ids), "attention_mask": (torch.arange(length) < len(tokens)).long()}


def padded_labels(tokens: Ids, length: int) -> Tensor:
    """Return labels: the tokens, and after them `IGNORE`."""
    labels = np.full(length, IGNORE, dtype=np.int64)
    labels[: len(tokens)] = tokens
    return torch.from_numpy(labels)


class Masked:
    """Masked words: BERT's 80/10/10, by tokens or by whole words."""

    def __init__(self, config: MaskedObjective, *, tokenizer: TextTokenizer, seq_len: int) -> None:
        self._config = config
        self._seq_len = seq_len
        self.special = SpecialTokens(tokenizer)
        self.capacity = _capacity(seq_len, self.special.count)
        self._mask = tokenizer.named("mask")
        self._ordinary = tokenizer.ordinary_tokens()
        self._begins_word = tokenizer.word_beginnings() if config.whole_words else None

    def __call__(self, tokens: Ids, random: np.random.Generator) -> Mapping[str, Any]:
        """Return the row, with the labels of the chosen tokens."""
        config = self._config
        if self._begins_word is None:
            chosen = random.random(len(tokens)) < config.probability
        else:
            numbers = self._begins_word(tokens).cumsum()
            chosen = (random.random(len(tokens) + 1) < config.probability)[numbers]
        how = random.random(len(tokens))
        shown = tokens.copy()
        shown[chosen & (how < config.mask_share)] = self._mask
        other = chosen & (how >= config.mask_share) & (how < config.mask_share + config.random_share)
        shown[other] = self._ordinary[random.integers(0, len(self._ordinary), int(other.sum()))]
        labels = np.full(len(tokens) + self.special.count, IGNORE, dtype=np.int64)
        first = len(self.special.before)
        labels[first : first + len(tokens)][chosen] = tokens[chosen]
        return {
            **self.special.row(self.special.around(shown), self._seq_len),
            "labels": padded_labels(labels, self._seq_len),
        }


class SpanCorruption:
    """T5's span corruption: each hidden span is a sentinel, and the target has the spans after their sentinels."""

    def __init__(self, config: SpanCorruptionObjective, *, tokenizer: TextTokenizer, seq_len: int) -> None:
        self._config = config
        self._seq_len = seq_len
        self.special = SpecialTokens(tokenizer)
        self.capacity = _span_capacity(config, _capacity(seq_len, self.special.count))
        hidden, spans = _span_counts(self.capacity, config.probability, config.mean_span_length)
        self._sentinels = np.array(tokenizer.sentinels(spans), dtype=np.int64)
        self.target_len = hidden + spans + len(self.special.after)

    def __call__(self, tokens: Ids, random: np.random.Generator) -> Mapping[str, Any]:
        """Return the row without its hidden spans, with these as labels."""
        spans = _spans(len(tokens), self._config.probability, self._config.mean_span_length, random)
        shown: list[Ids] = []
        target: list[Ids] = []
        at = 0
        for sentinel, (start, stop) in zip(self._sentinels, spans, strict=False):
            shown += [tokens[at:start], np.array([sentinel])]
            target += [np.array([sentinel]), tokens[start:stop]]
            at = stop
        whole = np.concatenate([*shown, tokens[at:]])
        return {
            **self.special.row(self.special.around(whole), self._seq_len),
            "labels": padded_labels(np.concatenate([*target, self.special.after]), self.target_len),
        }


class Denoising:
    """BART's text infilling: each hidden span is one mask token, and the target is the whole text."""

    def __init__(self, config: DenoisingObjective, *, tokenizer: TextTokenizer, seq_len: int) -> None:
        self._config = config
        self._seq_len = seq_len
        self.special = SpecialTokens(tokenizer)
        self.capacity = _capacity(seq_len, self.special.count)
        self.target_len = seq_len
        self._mask = np.array([tokenizer.named("mask")])

    def __call__(self, tokens: Ids, random: np.random.Generator) -> Mapping[str, Any]:
        """Return the row without its hidden spans, with the whole text as labels."""
        shown: list[Ids] = []
        at = 0
        for start, stop in _spans(len(tokens), self._config.probability, self._config.mean_span_length, random):
            shown += [tokens[at:start], self._mask]
            at = stop
        whole = np.concatenate([*shown, tokens[at:]])
        return {
            **self.special.row(self.special.around(whole), self._seq_len),
            "labels": padded_labels(self.special.around(tokens), self._seq_len),
        }


class TextToText:
    """Prompts for the encoder, completions for the decoder."""

    def __init__(self, config: Seq2SeqObjective, *, tokenizer: TextTokenizer, seq_len: int) -> None:
        self._seq_len = seq_len
        self.truncate = config.truncate
        self.special = SpecialTokens(tokenizer)
        self.target_len = config.target_len or seq_len
        self.capacity = _capacity(seq_len, self.special.count)
        self.target_capacity = _capacity(self.target_len, self.special.count, "objective.target_len")

    def pair(self, prompt: Ids, completion: Ids) -> dict[str, Tensor]:
        """Return the row of a prompt with its completion."""
        target = self.special.around(completion[: self.target_capacity])
        return {
            **self.special.row(self.special.around(prompt[: self.capacity]), self._seq_len),
            "labels": padded_labels(target, self.target_len),
        }


def _capacity(seq_len: int, special: int, key: str = "seq_len") -> int:
    if seq_len <= special:
        raise DataError(f"{key} {seq_len}: the tokenizer puts {special} special tokens around a text; write more")
    return seq_len - special


def target_length(objective: Any, seq_len: int) -> int:
    """Return the number of labels of a row of `seq_len` tokens, with one special token around a text."""
    if isinstance(objective, Seq2SeqObjective):
        return objective.target_len or seq_len
    if not isinstance(objective, SpanCorruptionObjective):
        return seq_len
    capacity = _span_capacity(objective, seq_len - 1)
    return sum(_span_counts(capacity, objective.probability, objective.mean_span_length)) + 1


def _span_capacity(objective: SpanCorruptionObjective, capacity: int) -> int:
    """Return the length of the longest text whose visible tokens and sentinels fit into `capacity` tokens."""
    fits = 1
    for length in range(1, 4 * capacity + 4):
        hidden, spans = _span_counts(length, objective.probability, objective.mean_span_length)
        if length - hidden + spans <= capacity:
            fits = length
    return fits


# [Note: random spans] As in T5, the number of hidden tokens, and of spans, follows from the length of the text. The
# hidden tokens are cut into as many parts at random places, the visible ones into one part more, and the parts put
# together in turn. The first and the last visible part may be empty. (In T5 a text always ends with a hidden span; with
# one span it would always be the same.)


def _span_counts(length: int, probability: float, mean: float) -> tuple[int, int]:
    """Return the number of hidden tokens of a text of `length`, and of the spans that they form."""
    if length < 2:
        return 0, 0
    hidden = min(max(round(length * probability), 1), length - 1)
    return hidden, min(max(round(hidden / mean), 1), length - hidden)


def _spans(length: int, probability: float, mean: float, random: np.random.Generator) -> list[tuple[int, int]]:
    """Return the hidden spans of a text, `[start, stop)`, none beside another: [Note: random spans]."""
    hidden, count = _span_counts(length, probability, mean)
    if count == 0:
        return []
    starts, at = [], 0
    first, *others = _cut(length - hidden + 2, count + 1, random)
    for visible, size in zip([first - 1, *others[:-1]], _cut(hidden, count, random), strict=True):
        starts.append((at + visible, at + visible + size))
        at += visible + size
    return starts


def _cut(total: int, count: int, random: np.random.Generator) -> list[int]:
    """Return `count` random lengths of at least 1 that sum to `total`."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    bounds: list[int] = np.diff(np.concatenate([[0], cuts, [total]])).tolist()
    return bounds


class SeededRows(Dataset[dict[str, Any]]):
    """A dataset with a random generator for each row: [Note: what is hidden]."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Hide what is hidden in this epoch."""
        self._epoch = epoch

    def generator(self, index: int) -> np.random.Generator:
        """Return the random generator of one row in this epoch."""
        return np.random.default_rng(sample_seed(self._seed, self._epoch, index))


class ObjectiveRows(SeededRows):
    """Rows of a token file for an objective: none with tokens of two documents, unless `document_mask` is false.

    A document longer than a row is cut into several. Without `document_mask` rows are cut from all documents in
    sequence, with their end tokens, and are full; the remainder, less than a row, is not used.
    """

    def __init__(
        self,
        tokens: TokenFile,
        objective: Any,
        tokenizer: TextTokenizer,
        *,
        seq_len: int,
        document_mask: bool,
        split: Split,
        val_fraction: float,
        seed: int,
        source: str,
    ) -> None:
        super().__init__(seed)
        self.seq_len = seq_len
        self.special_tokens = {"pad": tokenizer.named("pad")} if document_mask else {}
        """The tokens whose ids a model's config has too."""
        self._tokens = tokens
        self._objective = objective
        self._pairs: Callable[[Ids, Ids], dict[str, Tensor]] | None = getattr(objective, "pair", None)
        self._document_mask = document_mask
        capacity = getattr(objective, "capacity", seq_len)
        self._capacity = capacity
        offsets, chosen = choose_documents(np.asarray(tokens.offsets), split, val_fraction)
        self._starts, self._stops = offsets[chosen], offsets[chosen + 1]
        ended = (self._stops > self._starts) & (tokens.tokens[self._stops - 1] == tokenizer.end)
        self._contents = self._stops - ended
        """The end of each document without its end token, which the objective adds."""
        if self._pairs is not None:
            self._check_pairs(objective, source)
            rows = np.ones(len(chosen), dtype=np.int64)
        elif document_mask:
            rows = -(-(self._contents - self._starts) // capacity)
        else:
            self._cumulative = np.concatenate([[0], np.cumsum(self._stops - self._starts)])
            rows = np.array([self._cumulative[-1] // capacity])
        self._rows = np.concatenate([[0], np.cumsum(rows)])
        if self._rows[-1] < 1:
            raise DataError(
                f"{source} has {counted(int((self._stops - self._starts).sum()), 'token')}, not enough for one row of "
                f"seq_len {seq_len}: give more text, or make seq_len smaller"
            )

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self._tokens.meta.vocab_size

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer of the tokens."""
        return self._tokens.meta.tokenizer

    def __len__(self) -> int:
        return int(self._rows[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._pairs is not None:
            return self._pairs(*self._pair(index))
        row: Mapping[str, Any] = self._objective(self._window(index), self.generator(index))
        if not self._document_mask:
            row = {key: value for key, value in row.items() if key != "attention_mask"}  # it is full
        return {key: value if isinstance(value, Tensor) else torch.as_tensor(value) for key, value in row.items()}

    def _window(self, index: int) -> Ids:
        if not self._document_mask:
            start = index * self._capacity
            positions = np.arange(start, start + self._capacity)
            documents = np.searchsorted(self._cumulative, positions, side="right") - 1
            positions += self._starts[documents] - self._cumulative[documents]
            return self._read(positions)
        document = int(np.searchsorted(self._rows, index, side="right")) - 1
        start = int(self._starts[document]) + (index - int(self._rows[document])) * self._capacity
        stop = min(start + self._capacity, int(self._contents[document]))
        return self._read(slice(start, stop))

    def _read(self, where: Any) -> Ids:
        tokens: Ids = self._tokens.tokens[where].astype(np.int64)
        return tokens

    def _pair(self, index: int) -> tuple[Ids, Ids]:
        start, stop = int(self._starts[index]), int(self._contents[index])
        assert self._tokens.mask is not None
        learned = self._tokens.mask[start:stop] != 0
        tokens = self._tokens.tokens[start:stop].astype(np.int64)
        return tokens[~learned], tokens[learned]

    def _check_pairs(self, objective: TextToText, source: str) -> None:
        if self._tokens.mask is None:
            raise DataError(f"{source} has no prompts: the objective seq2seq needs prompts and completions")
        if objective.truncate:
            return
        learned = np.concatenate([[0], np.cumsum(self._tokens.mask, dtype=np.int64)])
        completions = learned[self._contents] - learned[self._starts]
        prompts = self._contents - self._starts - completions
        for name, key, lengths, limit in (
            ("prompt", "seq_len", prompts, objective.capacity),
            ("completion", "objective.target_len", completions, objective.target_capacity),
        ):
            longer = int((lengths > limit).sum())
            if longer:
                needed = int(lengths.max()) + objective.special.count
                raise DataError(
                    f"{source}: {counted(longer, name)} of {len(lengths)} have more tokens than fit; write "
                    f"{key}: {needed} or more, or objective.truncate: true to cut them"
                )
