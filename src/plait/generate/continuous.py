"""Continuous batching: rows join and leave a batch between two tokens, each with a sampling of its own.

A row gets the tokens that it would get alone. Its decoder keeps rows apart, and what decides a draw depends on its own
seed and key only; see [Note: a row's chance is its own] in `ops.chance`. A seed is folded into the key, so rows of
different seeds are drawn together; rows that differ in temperature, cut or penalty are chosen group by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from plait.generate.choose import choose
from plait.generate.decoder import Decoder, GrowingDecoder
from plait.generate.graph import Recorded
from plait.generate.options import Sampling
from plait.ops import Chance, with_seed


class Token(NamedTuple):
    """The next token of a row."""

    id: int
    logprob: float
    """Under the model itself: temperature 1, nothing cut off, nothing penalised."""
    top: list[tuple[int, float]]
    """The likeliest tokens and their log-probabilities, as many as the row asked for."""


@dataclass(frozen=True, eq=False)
class Row:
    """One prompt and how it is answered. When its answer ends is for the caller to say."""

    prompt: Sequence[int]
    sampling: Sampling
    room: int
    """New tokens at most."""
    key: int = 0
    """Decides, together with the seed, what is drawn."""
    top: int = 0
    """Alternatives that are reported with each token."""


class ContinuousBatch:
    """The rows that a decoder works on. One decoder serves one batch at a time."""

    def __init__(self, decoder: Decoder, device: torch.device, *, graphs: bool = True) -> None:
        self.rows: list[Row] = []
        self._decoder, self._device = decoder, device
        self._keys = self._counts = self._token = torch.zeros(0, dtype=torch.int64, device=device)
        self._logprob = torch.zeros(0, device=device)
        self._seen: Tensor | None = None
        self._top: tuple[Tensor, Tensor] | None = None
        self._groups: list[tuple[Sampling, Tensor | None]] = []
        record = graphs and decoder.capturable
        self._step = Recorded(self._go_on, on=record, is_warm=lambda: decoder.is_warm(self._way()))

    def takes(self, rows: Sequence[Row]) -> bool:
        """Whether these rows may join now; if not, they may when the batch is empty, in the worst case one by one."""
        if self.rows and not isinstance(self._decoder, GrowingDecoder):
            return False
        lengths = {len(row.prompt) for row in (*self.rows, *rows)}
        return self._decoder.mixes_lengths or len(lengths) == 1

    @torch.no_grad()
    def add(self, rows: Sequence[Row]) -> list[Token]:
        """Read the prompts of further rows; returns the first token of each."""
        assert self.takes(rows), "ask `takes` first"
        prompts, rooms = [row.prompt for row in rows], [row.room for row in rows]
        if self.rows:
            assert isinstance(self._decoder, GrowingDecoder)
            logits = self._decoder.add(prompts, rooms)
        else:
            logits = self._decoder.begin(prompts, rooms)
        new = ContinuousBatch(self._decoder, self._device, graphs=False)
        new._begin(rows, logits)
        new._choose(logits)
        first = new._tokens()
        self._join(new, logits.shape[1])
        return first

    @torch.no_grad()
    def step(self) -> list[Token]:
        """The next token of every row."""
        self._step()
        return self._tokens()

    @torch.no_grad()
    def keep(self, numbers: Sequence[int]) -> None:
        """Let go of all rows but these."""
        if len(numbers) == len(self.rows):
            return
        if not numbers:
            self.close()
            return
        kept = torch.tensor(numbers, device=self._device)
        self._decoder.keep(kept)
        self.rows = [self.rows[number] for number in numbers]
        for name in ("_keys", "_counts", "_token", "_logprob"):
            setattr(self, name, getattr(self, name)[kept])
        self._seen = None if self._seen is None else self._seen[kept]
        self._regroup()

    def close(self) -> None:
        """Let go of all rows, and leave the model as it was."""
        self._decoder.close()
        self._step.forget()
        self.rows, self._seen, self._top, self._groups = [], None, None, []
        self._keys, self._counts, self._token = self._keys[:0], self._counts[:0], self._token[:0]
        self._logprob = self._logprob[:0]

    def _begin(self, rows: Sequence[Row], logits: Tensor) -> None:
        self.rows = list(rows)
        self._keys = torch.tensor([with_seed(row.key, row.sampling.seed) for row in rows], device=self._device)
        self._counts, self._token = torch.zeros_like(self._keys), torch.zeros_like(self._keys)
        self._logprob = torch.zeros(len(rows), device=self._device)
        if any(row.sampling.repetition_penalty != 1.0 for row in rows):
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for seen, row in zip(self._seen, rows, strict=True):
                seen[torch.tensor(row.prompt, device=self._device)] = True
        self._regroup()

    def _join(self, new: ContinuousBatch, vocabulary: int) -> None:
        if self._seen is not None or new._seen is not None:
            # Rows without a penalty never look at what they have seen.
            seen = [
                torch.zeros(len(each.rows), vocabulary, dtype=torch.bool, device=self._device)
                if each._seen is None
                else each._seen
                for each in (self, new)
            ]
            self._seen = torch.cat(seen)
        for name in ("_keys", "_counts", "_token", "_logprob"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        self.rows += new.rows
        self._regroup()

    def _regroup(self) -> None:
        """Find which rows are chosen together, and give the results a place that no step changes."""
        groups: dict[Sampling, list[int]] = {}
        for number, row in enumerate(self.rows):
            groups.setdefault(_way(row.sampling), []).append(number)
        alone = len(groups) == 1
        self._groups = [
            (way, None if alone else torch.tensor(numbers, device=self._device)) for way, numbers in groups.items()
        ]
        most = max(row.top for row in self.rows)
        if most:
            values = torch.zeros(len(self.rows), most, device=self._device)
            self._top = values, torch.zeros_like(values, dtype=torch.int64)
        else:
            self._top = None
        self._step.forget()

    def _way(self) -> tuple[object, ...]:
        return (*(way for way, _ in self._groups), self._top is not None)

    def _go_on(self) -> None:
        """One step. Changes tensors in place only, so that a graph may repeat it."""
        if len(self._groups) == 1 and self._top is None:
            way = self._groups[0][0]
            if way.is_greedy:
                self._note(None, *self._decoder.likeliest(self._token))
                self._counts.add_(1)
                return
            if way.draws_from_all:
                self._note(None, *self._decoder.draw(self._token, way.temperature, self._chance(None)))
                self._counts.add_(1)
                return
        self._choose(self._decoder.step(self._token))

    def _choose(self, logits: Tensor) -> None:
        for way, rows in self._groups:
            seen = self._seen if way.repetition_penalty != 1.0 else None
            part = logits if rows is None else logits[rows]
            if seen is not None and rows is not None:
                seen = seen[rows]
            self._note(rows, *choose(part, self._chance(rows), way, seen))
        if self._seen is not None:
            self._seen.scatter_(1, self._token[:, None], True)
        if self._top is not None:
            values, ids = logits.float().log_softmax(-1).topk(min(self._top[0].shape[1], logits.shape[1]))
            self._top[0][:, : values.shape[1]] = values
            self._top[1][:, : ids.shape[1]] = ids
        self._counts.add_(1)

    def _chance(self, rows: Tensor | None) -> Chance:
        keys, counts = (each if rows is None else each[rows] for each in (self._keys, self._counts))
        return Chance(keys, counts, 0)

    def _note(self, rows: Tensor | None, token: Tensor, logprob: Tensor) -> None:
        if rows is None:
            self._token.copy_(token)
            self._logprob.copy_(logprob)
        else:
            self._token[rows], self._logprob[rows] = token, logprob.float()

    def _tokens(self) -> list[Token]:
        ids, logprobs = self._token.tolist(), self._logprob.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in ids]
        if self._top is not None:
            found = zip(self.rows, self._top[1].tolist(), self._top[0].tolist(), strict=True)
            tops = [list(zip(names, values, strict=True))[: row.top] for row, names, values in found]
        return [Token(*each) for each in zip(ids, logprobs, tops, strict=True)]


def _way(sampling: Sampling) -> Sampling:
    """What of a sampling decides how a token is chosen."""
    return replace(sampling, max_new_tokens=1, stop=(), seed=0)
