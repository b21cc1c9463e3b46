"""Generation of one batch: choosing tokens, batches that start together, and continuous batching.

A *row* is one prompt and its answer. A *step* computes one token for every row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from plait.generate.decoder import Decoder, GrowingDecoder
from plait.generate.options import Completion, Sampling
from plait.kernels import capture_graph
from plait.kernels.decode import (
    CounterRNG,
    TokenRecords,
    bits_of,
    greedy,
    logprob_of,
    pick_index,
    record_tokens,
    sample_tokens,
    weights_of,
    with_seed,
)

# Choosing the next token of every row on the device; the host does not wait for it.
#
# Sampling from the whole vocabulary, as rollouts do, is one kernel (`sample_tokens`; see [Note: integer weights in
# pieces]). Top-k, top-p and penalties are computed here, with torch operations. Here too, probabilities become integer
# weights: their sum does not depend on the order of addition, a random number below the sum always selects a token with
# a positive weight, and they can be summed cumulatively in deterministic runs, where torch refuses to do that with
# floating-point numbers on a GPU.


def choose(
    logits: Tensor, rng: CounterRNG | Tensor | None, sampling: Sampling, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row from logits (rows, vocabulary).

    Return the tokens and their log-probabilities under the model (temperature 1, without top-k, top-p or penalty).
    `rng` is the random number of each row, or a `CounterRNG` that computes them; temperature 0 needs none. `seen`
    (rows, vocabulary) marks the tokens that a repetition penalty applies to.
    """
    if seen is None and (rng is None or sampling.temperature == 0.0):
        return greedy(logits)
    if seen is None and rng is not None and sampling.draws_from_all:
        return sample_tokens(logits, sampling.temperature, rng)
    scores = logits if seen is None else _penalised(logits.float(), seen, sampling.repetition_penalty)
    token = scores.argmax(-1) if rng is None or sampling.temperature == 0.0 else _sample(scores, rng, sampling)
    return token, logprob_of(logits, token)


def _sample(scores: Tensor, rng: CounterRNG | Tensor, sampling: Sampling) -> Tensor:
    order: Tensor | None = None
    share = sampling.top_p if sampling.top_p is not None and sampling.top_p < 1.0 else None
    # Temperature and the cast to fp32 do not change the order, so they are applied to the remaining tokens only.
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        scores, order = scores.topk(sampling.top_k)
    elif share is not None:
        scores, order = scores.sort(descending=True, stable=True)
    weights = weights_of(scores, sampling.temperature)
    cumulative, total = weights.cumsum(-1), None
    if share is not None:
        # The most likely token is always kept. The tokens cut off are at the end, so `cumulative` stays valid.
        kept = (cumulative - weights).double() < share * cumulative[:, -1:].double()
        total = (weights * kept).sum(-1, keepdim=True)
    index = pick_index(cumulative, bits_of(rng), total)
    return index if order is None else order.gather(1, index[:, None]).squeeze(1)


def _penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)


# One decode step as a CUDA graph.
#
# A small model computes a token in less time than Python needs to launch its kernels; a graph launches them all at
# once. A captured step must read and write the same tensors each time, as `Answers.take` and `CachedDecoder.step` do.


WARM_UP = 1
"""Steps that run eagerly before the capture, in which libraries initialize themselves. Their tokens are used."""


class CapturedStep:
    """A step that runs eagerly at first, and is captured as a CUDA graph and replayed afterwards."""

    def __init__(self, step: Callable[[], None], *, on: bool, is_warm: Callable[[], bool] = lambda: False) -> None:
        """`on`: it may be captured; at once, if `is_warm` returns that a step of this kind was done before."""
        self._step, self._on, self._is_warm = step, on, is_warm
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_left: int | None = None

    def __call__(self) -> None:
        """Do one step."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self._eager_left is None:
            self._eager_left = 0 if self._is_warm() else WARM_UP
        if not self._on or self._eager_left > 0:
            self._eager_left -= 1
            self._step()
            return
        # Capturing runs no kernel; the replay is this step.
        self._graph = capture_graph(self._step)
        self._graph.replay()

    def forget(self) -> None:
        """Discard the graph, because the tensors have changed."""
        self._graph = self._eager_left = None


CHECK_EVERY = 16
"""The number of steps between two checks of which rows are done; each check waits for the device."""
MIN_TOKENS_TO_CAPTURE = 48
"""If fewer tokens remain, done rows are not removed: capturing a graph of the smaller batch would take longer."""

Decode = Callable[[Sequence[int]], str]
AnyRank = Callable[[bool], bool]
"""A collective: returns whether any rank has unfinished rows, given whether this rank has."""


class Answers:
    """The answers so far, in tensors on the device; see [Note: counter-based random numbers].

    A row that is done stays in the batch, and its further tokens are stored in a column that is not read. It is removed
    when at least half of the rows are done. When that happens does not change any answer.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int],
        limits: Sequence[int],
        sampling: Sampling,
        device: torch.device,
    ) -> None:
        rows, self.width = len(prompts), max(limits)
        self._sampling = sampling
        self._prompts = prompts
        self.keys = torch.tensor(keys, device=device)
        self.limits = torch.tensor(limits, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stopped = torch.zeros_like(self.done)
        """Whether a row is done because of a stop token or text."""
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, self.width + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, self.width + 1, device=device)
        self._stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self._seen: Tensor | None = None

    def take(self, logits: Tensor) -> None:
        """Choose each row's next token from logits, and append it. Changes tensors in place only, for CUDA graphs."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0 and self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in zip(self._seen, self._prompts, strict=True):
                row[torch.tensor(prompt, device=row.device)] = True
        token, logprob = choose(logits, self._rng(), sampling, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        self.record(token, logprob)

    def record(self, token: Tensor, logprob: Tensor) -> None:
        """Append each row's next token. Changes tensors in place only."""
        state = (self.token, self.tokens, self.logprobs, self.counts, self.limits, self.done, self.stopped)
        record_tokens(token, logprob, TokenRecords(*state, self._stops))

    def advance(self, decoder: Decoder) -> None:
        """Do one step: run the model on the last tokens, choose the next ones, and append them."""
        if self._sampling.is_greedy:
            self.record(*decoder.step_greedy(self.token))
        elif self._sampling.draws_from_all:
            self.record(*decoder.step_sample(self.token, self._sampling.temperature, self._rng()))
        else:
            self.take(decoder.step(self.token))

    def _rng(self) -> CounterRNG:
        return CounterRNG(self.keys, self.counts, self._sampling.seed)

    def keep(self, rows: Tensor) -> Answers:
        """Return an object with the answers of these rows only."""
        kept = object.__new__(Answers)
        kept.__dict__.update(self.__dict__)
        for name in ("keys", "limits", "counts", "done", "stopped", "token", "tokens", "logprobs"):
            setattr(kept, name, getattr(self, name)[rows])
        kept._prompts = [self._prompts[row] for row in rows.tolist()]
        kept._seen = None if self._seen is None else self._seen[rows]
        return kept

    def end_by_text(self, decode: Decode) -> None:
        """End the rows that contain a stop text, right after the token that completes it."""
        texts = self._sampling.stop_texts
        for row, length in enumerate(self.counts.tolist()):
            if (length_with_stop := end_of_text(self.tokens[row, :length].tolist(), texts, decode)) is not None:
                self.counts[row], self.stopped[row], self.done[row] = length_with_stop, True, True

    def completions(self) -> list[Completion]:
        """Return the completion of each row so far."""
        columns = (self.counts, self.tokens, self.logprobs, self.stopped)
        return [
            Completion(tokens[:length], logprobs[:length], "stop" if stopped else "length")
            for length, tokens, logprobs, stopped in zip(*(tensor.tolist() for tensor in columns), strict=True)
        ]


def end_of_text(tokens: Sequence[int], texts: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens after which one of the texts is contained in the answer; None if none is."""
    if not any(text in decode(tokens) for text in texts):
        return None
    fewest, most = 1, len(tokens)
    while fewest < most:  # a bisection: a text that is complete stays complete
        middle = (fewest + most) // 2
        if any(text in decode(tokens[:middle]) for text in texts):
            most = middle
        else:
            fewest = middle + 1
    return fewest


@torch.no_grad()
def generate_batch(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    limits: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    *,
    decode: Decode | None = None,
    any_rank: AnyRank | None = None,
    graphs: bool = True,
    check_every: int = CHECK_EVERY,
) -> Generator[Answers, None, list[Completion]]:
    """Generate one batch. `limits` are the maximum of new tokens of each row; for keys, see `CounterRNG`.

    Yields the answers of the rows that are still in the batch every `check_every` tokens, and returns the completions
    of all rows. `any_rank` is for ranks that must do every step together, because they share a model: they go on until
    no rank has unfinished rows.
    """
    live = Answers(prompts, keys, limits, sampling, device)
    shortest, longest, numbers = min(limits), live.width, torch.arange(len(prompts), device=device)
    finished: dict[int, Completion] = {}
    try:
        live.take(decoder.begin(prompts, limits))
        captures = graphs and decoder.capturable
        settings = replace(sampling, seed=0)  # the seed does not change which kernels run
        step = CapturedStep(lambda: live.advance(decoder), on=captures, is_warm=lambda: decoder.is_warm(settings))
        for length in count(1):
            # Ranks that share a model must check after the same steps, even if this rank's rows have reached their
            # limits.
            if length % check_every == 0 or (any_rank is None and length >= longest):
                if decode is not None and sampling.stop_texts:
                    live.end_by_text(decode)
                yield live
                # Without stop tokens or texts, rows end at their limits only, so the host need not ask the device.
                rows = numbers if not sampling.stop and length < shortest else (~live.done).nonzero().squeeze(1)
                unfinished = len(rows) > 0
                if not (unfinished if any_rank is None else any_rank(unfinished)):
                    break
                pays = longest - length >= MIN_TOKENS_TO_CAPTURE or not captures
                if 0 < len(rows) <= len(live.done) // 2 and pays:
                    finished.update(zip(numbers.tolist(), live.completions(), strict=True))
                    decoder.keep(rows)
                    live, numbers = live.keep(rows), numbers[rows]
                    step.forget()
            step()
        finished.update(zip(numbers.tolist(), live.completions(), strict=True))
    finally:
        decoder.close()
    return [finished[number] for number in range(len(prompts))]


# Continuous batching: rows join and leave a batch between two tokens, each with its own sampling settings.
#
# A row gets the tokens that it would get alone: its random numbers depend on its own seed and key only; see [Note:
# counter-based random numbers]. Rows with different seeds are sampled together: the seed is made part of the key. Rows
# with different temperature, top-k, top-p or penalty are sampled separately, one group of equal settings after another.


class Token(NamedTuple):
    """The next token of a row."""

    id: int
    logprob: float
    """Its log-probability under the model: temperature 1, without top-k, top-p or penalty."""
    top: list[tuple[int, float]]
    """The `GenerationRow.top` most likely tokens and their log-probabilities."""


@dataclass(frozen=True, eq=False)
class GenerationRow:
    """One prompt and its sampling settings. The caller decides when its answer ends."""

    prompt: Sequence[int]
    sampling: Sampling
    max_new_tokens: int
    """The maximum of new tokens."""
    key: int = 0
    """Determines the random numbers, together with the seed."""
    top: int = 0
    """The number of most likely tokens to report with each token."""


class ContinuousBatch:
    """A batch that rows may join and leave between two tokens. A decoder can be used by one batch at a time."""

    def __init__(self, decoder: Decoder, device: torch.device, *, graphs: bool = True) -> None:
        self.rows: list[GenerationRow] = []
        self._decoder, self._device = decoder, device
        self._keys = self._counts = self._token = torch.zeros(0, dtype=torch.int64, device=device)
        self._logprob = torch.zeros(0, device=device)
        self._seen: Tensor | None = None
        self._top: tuple[Tensor, Tensor] | None = None
        self._groups: list[tuple[Sampling, Tensor | None]] = []
        capture = graphs and decoder.capturable
        self._step = CapturedStep(self._advance, on=capture, is_warm=lambda: decoder.is_warm(self._group_keys()))

    def takes(self, rows: Sequence[GenerationRow]) -> bool:
        """Whether these rows may join now.

        If not, they may join once the batch is empty: all of them, or one by one if their prompts differ in length.
        """
        if self.rows and not isinstance(self._decoder, GrowingDecoder):
            return False
        lengths = {len(row.prompt) for row in (*self.rows, *rows)}
        return self._decoder.mixes_lengths or len(lengths) == 1

    @torch.no_grad()
    def add(self, rows: Sequence[GenerationRow]) -> list[Token]:
        """Add rows: prefill their prompts, and return the first token of each."""
        assert self.takes(rows), "call `takes` first"
        prompts, max_new_tokens = [row.prompt for row in rows], [row.max_new_tokens for row in rows]
        if self.rows:
            assert isinstance(self._decoder, GrowingDecoder)
            logits = self._decoder.add(prompts, max_new_tokens)
        else:
            logits = self._decoder.begin(prompts, max_new_tokens)
        new = ContinuousBatch(self._decoder, self._device, graphs=False)
        new._begin(rows, logits)
        new._choose(logits)
        first = new._tokens()
        self._join(new, logits.shape[1])
        return first

    @torch.no_grad()
    def step(self) -> list[Token]:
        """Do one step, and return the next token of every row."""
        self._step()
        return self._tokens()

    @torch.no_grad()
    def keep(self, numbers: Sequence[int]) -> None:
        """Remove all rows but these."""
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
        """Remove all rows, and restore the model."""
        self._decoder.close()
        self._step.forget()
        self.rows, self._seen, self._top, self._groups = [], None, None, []
        self._keys, self._counts, self._token = self._keys[:0], self._counts[:0], self._token[:0]
        self._logprob = self._logprob[:0]

    def _begin(self, rows: Sequence[GenerationRow], logits: Tensor) -> None:
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
            # Rows without a penalty do not use `_seen`.
            seen = [
                torch.zeros(len(batch.rows), vocabulary, dtype=torch.bool, device=self._device)
                if batch._seen is None
                else batch._seen
                for batch in (self, new)
            ]
            self._seen = torch.cat(seen)
        for name in ("_keys", "_counts", "_token", "_logprob"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(new, name)]))
        self.rows += new.rows
        self._regroup()

    def _regroup(self) -> None:
        """Group the rows by sampling settings, and allocate the tensors that every step writes its results to."""
        groups: dict[Sampling, list[int]] = {}
        for number, row in enumerate(self.rows):
            groups.setdefault(_sampling_group(row.sampling), []).append(number)
        alone = len(groups) == 1
        self._groups = [
            (settings, None if alone else torch.tensor(numbers, device=self._device))
            for settings, numbers in groups.items()
        ]
        most = max(row.top for row in self.rows)
        if most:
            values = torch.zeros(len(self.rows), most, device=self._device)
            self._top = values, torch.zeros_like(values, dtype=torch.int64)
        else:
            self._top = None
        self._step.forget()

    def _group_keys(self) -> tuple[object, ...]:
        return (*(settings for settings, _ in self._groups), self._top is not None)

    def _advance(self) -> None:
        """Do one step. Changes tensors in place only, for CUDA graphs."""
        if len(self._groups) == 1 and self._top is None:
            settings = self._groups[0][0]
            if settings.is_greedy:
                self._record(None, *self._decoder.step_greedy(self._token))
                self._counts.add_(1)
                return
            if settings.draws_from_all:
                self._record(None, *self._decoder.step_sample(self._token, settings.temperature, self._rng(None)))
                self._counts.add_(1)
                return
        self._choose(self._decoder.step(self._token))

    def _choose(self, logits: Tensor) -> None:
        for settings, rows in self._groups:
            seen = self._seen if settings.repetition_penalty != 1.0 else None
            group_logits = logits if rows is None else logits[rows]
            if seen is not None and rows is not None:
                seen = seen[rows]
            self._record(rows, *choose(group_logits, self._rng(rows), settings, seen))
        if self._seen is not None:
            self._seen.scatter_(1, self._token[:, None], True)
        if self._top is not None:
            values, ids = logits.float().log_softmax(-1).topk(min(self._top[0].shape[1], logits.shape[1]))
            self._top[0][:, : values.shape[1]] = values
            self._top[1][:, : ids.shape[1]] = ids
        self._counts.add_(1)

    def _rng(self, rows: Tensor | None) -> CounterRNG:
        keys, counts = (tensor if rows is None else tensor[rows] for tensor in (self._keys, self._counts))
        return CounterRNG(keys, counts, 0)

    def _record(self, rows: Tensor | None, token: Tensor, logprob: Tensor) -> None:
        if rows is None:
            self._token.copy_(token)
            self._logprob.copy_(logprob)
        else:
            self._token[rows], self._logprob[rows] = token, logprob.float()

    def _tokens(self) -> list[Token]:
        ids, logprobs = self._token.tolist(), self._logprob.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in ids]
        if self._top is not None:
            tops_of_rows = zip(self.rows, self._top[1].tolist(), self._top[0].tolist(), strict=True)
            tops = [list(zip(names, values, strict=True))[: row.top] for row, names, values in tops_of_rows]
        return [Token(*token) for token in zip(ids, logprobs, tops, strict=True)]


def _sampling_group(sampling: Sampling) -> Sampling:
    """Return the sampling settings without those that do not affect how a token is chosen."""
    return replace(sampling, max_new_tokens=1, stop=(), seed=0)
