"""The live policy as a writer: answers, and what they are worth to whoever judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import GenerateError
from plait.generate import Completion, HybridEngine, Sampling, cut
from plait.posttrain.data.prompts import Check, Prompt
from plait.posttrain.online.clock import Clock
from plait.posttrain.online.scoring import Answer, Scorer

VERIFIED = 32
"""Answers that the guard looks at."""


class Stop(NamedTuple):
    """What ends an answer."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]


class Written(NamedTuple):
    """Answers, and what became of them."""

    answers: list[Answer]
    tokens: list[list[int]]
    rewards: Tensor
    """NaN where nothing is known."""


class Writer:
    """Answers prompts with the live policy, and has the answers judged."""

    def __init__(
        self, hybrid: HybridEngine, scorer: Scorer, correct: Check, decode: Callable[[Sequence[int]], str], stop: Stop
    ) -> None:
        self._hybrid, self._scorer, self._correct = hybrid, scorer, correct
        self._decode, self._stop = decode, stop
        self.clock = Clock()

    def write(
        self, prompts: Sequence[Prompt], sampling: Sampling, keys: Sequence[int], *, verify: bool = False
    ) -> Written:
        """An answer to each prompt, on every rank. Together with the seed, a key decides what is drawn."""
        with self.clock.count("writing"):
            found = self._generate([prompt.tokens for prompt in prompts], sampling, keys, verify=verify)
        self.clock.tokens += sum(len(each.tokens) for each in found)
        with self.clock.count("judging"):
            answers = [self._answer(prompt, each) for prompt, each in zip(prompts, found, strict=True)]
            rewards = torch.tensor(self._scorer.judge(answers), dtype=torch.float32)
        return Written(answers, [each.tokens for each in found], rewards)

    def _generate(
        self, asked: Sequence[Sequence[int]], sampling: Sampling, keys: Sequence[int], *, verify: bool
    ) -> list[Completion]:
        try:
            found = self._hybrid.generate(asked, sampling, keys=keys)
            if verify:
                mode = self._hybrid.mode
                self._hybrid.verify(asked[:VERIFIED], found[:VERIFIED])
                if self._hybrid.mode != mode:  # those answers were not the policy's
                    found = self._hybrid.generate(asked, sampling, keys=keys)
        except torch.OutOfMemoryError as error:
            # Smaller micro-batches, which a run without memory is otherwise started again with, change nothing here.
            raise GenerateError(
                f"memory was short while answers were written: {str(error).partition('.')[0]}; write a smaller "
                "`rollout.max_rows`, the answers that a rank writes at once, or a smaller `rollout.max_new_tokens`"
            ) from error
        return found

    def _answer(self, prompt: Prompt, found: Completion) -> Answer:
        tokens = found.tokens[:-1] if found.tokens[-1] in self._stop.tokens else found.tokens
        text = cut(self._decode(tokens), self._stop.texts)
        return Answer(prompt, text, found.finish_reason == "stop")

    def accuracy(self, answers: Sequence[Answer]) -> float | None:
        """The share that is right, of those that can be checked; None where none can."""
        found = [self._correct(each.prompt.text, each.text, each.prompt.right) for each in answers]
        known = [each for each in found if each is not None]
        return sum(known) / len(known) if known else None
