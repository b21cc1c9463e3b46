"""Generated tasks: questions with answers that can be checked, so that all phases can run without a download.

A task is a numbered list of distinct questions. Samples are taken in the order of a permutation of the numbers, so any
number of samples is spread evenly over all questions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from plait.config import ExampleData, Gsm8kData, TaskData
from plait.data import SampleOrder, splitmix64
from plait.errors import ConfigError, Problem
from plait.posttrain.data.records import ChatMessage, Example

_ORDER_SEED = 2024
"""The same for every run, so that phases which split a task between them agree on the questions."""


class Task(ABC):
    """A numbered list of questions, with right and wrong answers to each."""

    alphabet: str
    """All characters of questions and answers."""
    count: int
    """The number of different questions."""

    @abstractmethod
    def question(self, number: int) -> tuple[str, str]:
        """Return a question and its answer."""

    @abstractmethod
    def wrong(self, number: int, which: int = 0) -> str:
        """Return a wrong answer; different values of `which` give different mistakes."""

    @abstractmethod
    def solve(self, question: str) -> str | None:
        """Return the right answer; None if this is not a question of the task."""

    def reward(self, question: str, answer: str) -> float:
        """Return 1 for the right answer, 0 for any other."""
        right = self.solve(question)
        return float(right is not None and answer.strip() == right)

    def credit(self, question: str, answer: str) -> float:
        """Return a partial reward from 0 to 1: half the share of right characters, plus 0.5 if all are right."""
        right, given = self.solve(question), answer.strip()
        if right is None:
            return 0.0
        same = sum(one == other for one, other in zip(right, given, strict=False))
        return 0.5 * same / max(len(right), len(given)) + 0.5 * (given == right)

    def examples(self, samples: int, wrongs: int = 1) -> list[Example]:
        """Return examples of `samples` questions; each question occurs `wrongs` times, with different wrong answers."""
        if samples > self.count:
            message = f"{samples}, but there are only {self.count} different questions of this size"
            raise ConfigError(Problem("posttrain.data.samples", message, "Ask for fewer, or raise `size`."))
        examples = []
        order = SampleOrder(self.count, _ORDER_SEED, shuffle=True)
        for index, number in enumerate(order.indices(0, 0, samples).tolist()):
            question, answer = self.question(number)
            messages = (ChatMessage("user", question), ChatMessage("assistant", answer))
            examples += [Example(messages, self.wrong(number, which), f"question {index}") for which in range(wrongs)]
        return examples


class Arithmetic(Task):
    """`17+25=` and `17-25=`, with numbers of at most `digits` digits."""

    alphabet = "0123456789+-="

    def __init__(self, digits: int) -> None:
        self._limit = 10**digits
        self.count = 2 * self._limit**2

    def question(self, number: int) -> tuple[str, str]:
        """Return a sum or a difference, and its result."""
        rest, second = divmod(number, self._limit)
        sign, first = divmod(rest, self._limit)
        text = f"{first}{'+-'[sign]}{second}="
        return text, str(first - second if sign else first + second)

    def wrong(self, number: int, which: int = 0) -> str:
        """Return the result plus or minus 1 to 9."""
        noise = _noise(number + which * self.count)
        off = 1 + noise % 9
        return str(int(self.question(number)[1]) + (off if noise & 16 else -off))

    def solve(self, question: str) -> str | None:
        """Return the result; None if this is not such a question."""
        body = question.strip()
        for sign in "+-":
            first, operator, second = body.removesuffix("=").partition(sign)
            if body.endswith("=") and operator and first.isdecimal() and second.isdecimal():
                return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
        return None


class Sorting(Task):
    """`dbca=`, whose answer is the same letters sorted."""

    alphabet = "abcdefghij="

    def __init__(self, size: int) -> None:
        self._length = 2 * size
        self.count = 10**self._length

    def question(self, number: int) -> tuple[str, str]:
        """Return letters from a to j, and the same letters sorted."""
        letters = "".join(self.alphabet[int(digit)] for digit in f"{number:0{self._length}d}")
        return f"{letters}=", "".join(sorted(letters))

    def wrong(self, number: int, which: int = 0) -> str:
        """Return an answer with a mistake of the kind `which % 8`, so that a reward model sees all kinds.

        0: two neighbours are swapped. 1: a letter is replaced. 2, 3, 4: a letter is replaced by any one, a near one or
        one of the answer, and the result is sorted. 5: cut off. 6: too long. 7: not sorted. From `which` 8 on the
        answer has two mistakes.
        """
        mistakes = 8
        right, noise = self.question(number)[1], _noise(number + which * self.count)
        base = right if which < mistakes else self.wrong(number, noise % mistakes)
        at, other = noise // 8 % len(base), noise // 512 % 10
        near = min(max(self.alphabet.index(base[at]) + (1 if noise & 1 else -1), 0), 9)
        match which % mistakes:
            case 0:
                swaps = [position for position in range(len(base) - 1) if base[position] != base[position + 1]] or [0]
                position = swaps[noise % len(swaps)]
                mistaken = base[:position] + base[position : position + 2][::-1] + base[position + 2 :]
            case 1:
                mistaken = _with(base, at, self.alphabet[other])
            case 2:
                mistaken = "".join(sorted(_with(base, at, self.alphabet[other])))
            case 3:
                mistaken = "".join(sorted(_with(base, at, self.alphabet[near])))
            case 4:
                mistaken = "".join(sorted(_with(base, at, base[other % len(base)])))
            case 5:
                mistaken = base[:at]
            case 6:
                mistaken = base[: at + 1] + base[at:] if noise & 1 else base + base[at:]
            case _:
                mistaken = self.question(number)[0].removesuffix("=") if which == mistakes - 1 else base[::-1]
        return mistaken if mistaken and mistaken != right else _another(right)

    def solve(self, question: str) -> str | None:
        """Return the letters sorted; None if this is not such a question."""
        body = question.strip()
        letters = body.removesuffix("=")
        known = body.endswith("=") and letters and set(letters) <= set(self.alphabet[:-1])
        return "".join(sorted(letters)) if known else None


def make_task(config: TaskData) -> Task:
    """Return the task that a section describes."""
    return Arithmetic(config.size) if config.name == "arithmetic" else Sorting(config.size)


def _with(letters: str, at: int, letter: str) -> str:
    return letters[:at] + letter + letters[at + 1 :]


def _another(letters: str) -> str:
    """Return the letters with another last one."""
    return letters[:-1] + ("a" if letters[-1] != "a" else "b")


def _noise(number: int) -> int:
    return int(splitmix64(np.array([number + 1], dtype=np.uint64))[0])


# Prompts for a model that generates answers, and functions that score these.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that a model answers."""

    tokens: tuple[int, ...]
    messages: tuple[ChatMessage, ...]
    right: str
    """The right answer, from the example; empty if it has none."""

    @property
    def text(self) -> str:
        """The content of the last message, which is the question."""
        return self.messages[-1].content


Check = Callable[[str, str, str], float | None]
"""A function of prompt, answer and right answer that returns a number; None if it cannot score the answer."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> str | None:
    """Return the last number after `####`, or else the last one of the text; None without numbers."""
    marked = text.rpartition("####")[2]
    numbers = _NUMBER.findall(marked) or _NUMBER.findall(text)
    if not numbers:
        return None
    number: str = numbers[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def gsm8k_reward(prompt: str, answer: str, right: str) -> float | None:
    """Return 1 if the final number is right, else 0; None if the right answer has no number."""
    wanted = final_number(right)
    return None if wanted is None else float(final_number(answer) == wanted)


def gsm8k_rewards(sources: Sequence[ExampleData]) -> Check:
    """Return `gsm8k_reward`, whatever the sources: the factories of reward functions all get them."""
    return gsm8k_reward


def task_reward(sources: Sequence[ExampleData]) -> Check:
    """Return a reward function that gives partial credit (`Task.credit`) in the task that the question belongs to."""
    tasks = [make_task(source) for source in sources if isinstance(source, TaskData)]

    def reward(prompt: str, answer: str, right: str) -> float | None:
        return next((task.credit(prompt, answer) for task in tasks if task.solve(prompt) is not None), None)

    return reward


def correctness(sources: Sequence[ExampleData]) -> Check:
    """Return a function that gives 1 for a right answer and 0 for a wrong one; None if answers cannot be checked."""
    tasks = [make_task(source) for source in sources if isinstance(source, TaskData)]
    maths = any(isinstance(source, Gsm8kData) for source in sources)

    def check(prompt: str, answer: str, right: str) -> float | None:
        for task in tasks:
            if task.solve(prompt) is not None:
                return task.reward(prompt, answer)
        return gsm8k_reward(prompt, answer, right) if maths else None

    return check
