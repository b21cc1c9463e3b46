"""One batch of answers, from prompts to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from plait.generate.choose import choose
from plait.generate.decoder import Decoder
from plait.generate.graph import Recorded
from plait.generate.options import Completion, Sampling
from plait.ops import Book, Chance, note

CHECK_EVERY = 16
"""Tokens between two looks at which rows are done; each look waits for the device."""
WORTH_RECORDING = 48
"""Tokens that must be left for a smaller batch to pay where its steps have to be recorded anew."""

Decode = Callable[[Sequence[int]], str]
Agree = Callable[[bool], bool]
"""From whether this rank has rows that go on, to whether any rank has."""


class Answers:
    """The answers so far, all of them on the device; see [Note: a row's chance is its own] in `ops.chance`.

    Rows that are done go on being computed, into a column that nobody reads, until enough of them are done for a
    smaller batch to pay. Nothing here depends on when that is.
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
        """Done because a stop token or text came."""
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, self.width + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, self.width + 1, device=device)
        self._stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self._seen: Tensor | None = None

    def take(self, logits: Tensor) -> None:
        """Choose each row's next token. Changes tensors in place only, so that a graph may repeat it."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0 and self._seen is None:
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in zip(self._seen, self._prompts, strict=True):
                row[torch.tensor(prompt, device=row.device)] = True
        token, logprob = choose(logits, self._chance(), sampling, self._seen)
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        self.note(token, logprob)

    def note(self, token: Tensor, logprob: Tensor) -> None:
        """Write each row's next token down. Changes tensors in place only."""
        state = (self.token, self.tokens, self.logprobs, self.counts, self.limits, self.done, self.stopped)
        note(token, logprob, Book(*state, self._stops))

    def go_on(self, decoder: Decoder) -> None:
        """One step: what the model says to the last tokens, and the choice of the next."""
        if self._sampling.is_greedy:
            self.note(*decoder.likeliest(self.token))
        elif self._sampling.draws_from_all:
            self.note(*decoder.draw(self.token, self._sampling.temperature, self._chance()))
        else:
            self.take(decoder.step(self.token))

    def _chance(self) -> Chance:
        return Chance(self.keys, self.counts, self._sampling.seed)

    def keep(self, rows: Tensor) -> Answers:
        """These rows alone."""
        kept = object.__new__(Answers)
        kept.__dict__.update(self.__dict__)
        for name in ("keys", "limits", "counts", "done", "stopped", "token", "tokens", "logprobs"):
            setattr(kept, name, getattr(self, name)[rows])
        kept._prompts = [self._prompts[row] for row in rows.tolist()]
        kept._seen = None if self._seen is None else self._seen[rows]
        return kept

    def end_by_text(self, decode: Decode) -> None:
        """End the rows in which a stop text came, right behind the token that completed it."""
        texts = self._sampling.stop_texts
        for row, length in enumerate(self.counts.tolist()):
            if (place := end_of_text(self.tokens[row, :length].tolist(), texts, decode)) is not None:
                self.counts[row], self.stopped[row], self.done[row] = place, True, True

    def completions(self) -> list[Completion]:
        """What each row has."""
        every = (self.counts, self.tokens, self.logprobs, self.stopped)
        return [
            Completion(tokens[:length], logprobs[:length], "stop" if stopped else "length")
            for length, tokens, logprobs, stopped in zip(*(each.tolist() for each in every), strict=True)
        ]


def end_of_text(tokens: Sequence[int], texts: Sequence[str], decode: Decode) -> int | None:
    """After how many tokens one of the texts has come; None where none has."""
    if not any(text in decode(tokens) for text in texts):
        return None
    fewest, most = 1, len(tokens)
    while fewest < most:  # a text that has come stays
        middle = (fewest + most) // 2
        if any(text in decode(tokens[:middle]) for text in texts):
            most = middle
        else:
            fewest = middle + 1
    return fewest


@torch.no_grad()
def answering(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    limits: Sequence[int],
    sampling: Sampling,
    device: torch.device,
    *,
    decode: Decode | None = None,
    agree: Agree | None = None,
    graphs: bool = True,
    check_every: int = CHECK_EVERY,
) -> Generator[Answers, None, list[Completion]]:
    """Answer one batch; `limits` are the most new tokens of each row.

    Yields the rows that go on whenever it looks at them, every `check_every` tokens, and returns all answers.
    `agree` is for ranks that have to take every step together.
    """
    live = Answers(prompts, keys, limits, sampling, device)
    shortest, longest, numbers = min(limits), live.width, torch.arange(len(prompts), device=device)
    finished: dict[int, Completion] = {}
    try:
        live.take(decoder.begin(prompts, limits))
        recorded = graphs and decoder.capturable
        way = replace(sampling, seed=0)  # every seed goes the same way
        step = Recorded(lambda: live.go_on(decoder), on=recorded, is_warm=lambda: decoder.is_warm(way))
        for length in count(1):
            # Ranks that go together must look at the same moments, however long their own rows are.
            if length % check_every == 0 or (agree is None and length >= longest):
                if decode is not None and sampling.stop_texts:
                    live.end_by_text(decode)
                yield live
                # Where nothing stops a row before its limit, nobody has to wait for the device to say so.
                rows = numbers if not sampling.stop and length < shortest else (~live.done).nonzero().squeeze(1)
                goes_on = len(rows) > 0
                if not (goes_on if agree is None else agree(goes_on)):
                    break
                pays = longest - length >= WORTH_RECORDING or not recorded
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
