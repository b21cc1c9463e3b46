"""A model with its tokenizer and its way of writing conversations down: what can be talked to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.data.tokenizer import TextTokenizer, half_character
from plait.errors import ContextError, GenerateError
from plait.generate.generator import Generator
from plait.generate.options import Completion, Sampling

ROOM = 16
"""New tokens that must have room behind a conversation, before its beginning is left out."""
_HALF = "\ufffd"
"""What a character decodes to of which not all bytes have come."""


class Turn(NamedTuple):
    """What one side says."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str


class Piece(NamedTuple):
    """A part of an answer, as it grows."""

    text: str
    """What is new."""
    so_far: Completion


class Asked(NamedTuple):
    """A conversation as a prompt."""

    tokens: list[int]
    left_out: int
    """Earliest turns that had no room."""


@dataclass(frozen=True)
class Speaker:
    """What `plait chat`, `plait serve` and `plait generate` talk to."""

    name: str
    generator: Generator
    tokenizer: TextTokenizer
    write_down: Callable[[Sequence[Turn]], list[int]]
    """From a conversation to the prompt that an answer follows."""
    stop: tuple[int | str, ...]
    """What ends an answer in any case."""
    begin: tuple[int, ...] = ()
    """What a text that is no conversation begins with, where the model was trained on rows that do."""
    template: str = "own"
    """Which way of writing conversations down it is, for people."""

    def encode(self, text: str) -> list[int]:
        """A text as a prompt; an empty one is the beginning of a document."""
        return [*self.begin, *self.tokenizer.encode(text)] or [self.tokenizer.end]

    def ask(self, turns: Sequence[Turn]) -> Asked:
        """A conversation as a prompt. Where it is longer than the model sees, its earliest turns are left out.

        What the system says stays.
        """
        if not turns:
            raise GenerateError("the conversation is empty: say something first")
        if wrong := next(filter(None, (half_character(turn.content) for turn in turns)), None):
            raise GenerateError(f"{wrong}; leave it out")
        system = [turn for turn in turns[:1] if turn.role == "system"]
        rest, context = list(turns[len(system) :]), self.generator.context
        # A conversation goes on from what a user says: templates refuse one that begins with an answer.
        begins = [at for at, turn in enumerate(rest) if at == 0 or turn.role == "user"] or [0]
        for left_out in begins:
            tokens = self.write_down([*system, *rest[left_out:]])
            if not tokens:
                raise GenerateError("nothing of that is known to the tokenizer of this model; say it in its own words")
            if context is None or len(tokens) + ROOM <= context:
                return Asked(tokens, left_out)
        if context is not None and len(tokens) < context:
            return Asked(tokens, left_out)
        raise ContextError(f"the last turn alone takes {len(tokens)} tokens, and the model sees {context}; say less")

    def write(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, between: Callable[[], object] | None = None
    ) -> list[tuple[str, Completion]]:
        """An answer to each prompt, as text without what ended it, and as tokens.

        `between` is called before each token; what it raises ends the answers.
        """
        sampling = self._with_stops(sampling)
        found = self.generator.generate(prompts, sampling, between=between)
        for each in found:
            _refuse_no_numbers(each)
        return [(cut(self.tokenizer.decode(each.tokens), sampling.stop_texts), each) for each in found]

    def tell(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Piece]:
        """The answer to one prompt, piece by piece. Text is held back while it may be the beginning of a stop text."""
        sampling, told = self._with_stops(sampling), 0
        so_far: Completion | None = None
        for so_far in self.generator.stream(prompt, sampling):
            _refuse_no_numbers(so_far)
            text = cut(self.tokenizer.decode(so_far.tokens), sampling.stop_texts)
            ready = len(text.rstrip(_HALF)) - _held(text, sampling.stop_texts)
            if ready > told:
                yield Piece(text[told:ready], so_far)
                told = ready
        if so_far is not None:
            rest = cut(self.tokenizer.decode(so_far.tokens), sampling.stop_texts)[told:]
            yield Piece(rest, so_far)

    def _with_stops(self, sampling: Sampling) -> Sampling:
        return replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self.stop))))


def _refuse_no_numbers(found: Completion) -> None:
    """Weights that diverged give tokens all the same, and no number says how likely they are."""
    if any(math.isnan(value) for value in found.logprobs[-1:]):
        raise GenerateError(
            "the model gives numbers that are not finite: its weights are damaged or diverged in training; open an "
            "earlier checkpoint, or another --dtype where fp16 overflows"
        )


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop text in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def _held(text: str, stops: Sequence[str]) -> int:
    """How many last characters may be the beginning of a stop text."""
    most = max((len(stop) for stop in stops), default=0)
    lengths = range(min(most, len(text)), 0, -1)
    return next((length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops)), 0)
