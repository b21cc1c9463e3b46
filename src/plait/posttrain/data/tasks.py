"""Made-up questions with answers that can be checked: all of post-training runs on them, with nothing to fetch.

A task is a numbered list of questions, all of them different. Which numbers are taken is a permutation, so any number
of samples is spread evenly over all questions.
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
"""The same for every run: phases that split a task between them must mean the same questions."""


class Task(ABC):
    """Questions by number, with a right answer and a wrong one."""

    alphabet: str
    """Every character that a question or an answer may have."""
    count: int
    """How many different questions there are."""

    @abstractmethod
    def question(self, number: int) -> tuple[str, str]:
        """A question and its answer."""

    @abstractmethod
    def wrong(self, number: int, which: int = 0) -> str:
        """An answer that is not right; there are many, of which `which` says one."""

    @abstractmethod
    def solve(self, question: str) -> str | None:
        """The right answer; None if it is not a question of this task."""

    def reward(self, question: str, answer: str) -> float:
        """One for the right answer, zero for any other."""
        right = self.solve(question)
        return float(right is not None and answer.strip() == right)

    def credit(self, question: str, answer: str) -> float:
        """From zero to one: half for the share of places that are right, half for all of it."""
        right, given = self.solve(question), answer.strip()
        if right is None:
            return 0.0
        same = sum(one == other for one, other in zip(right, given, strict=False))
        return 0.5 * same / max(len(right), len(given)) + 0.5 * (given == right)

    def examples(self, samples: int, wrongs: int = 1) -> list[Example]:
        """So many questions with their right answers, as often as there are to be wrong ones beside them."""
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
    """`17+25=` and `17-25=`, with numbers of up to so many digits."""

    alphabet = "0123456789+-="

    def __init__(self, digits: int) -> None:
        self._limit = 10**digits
        self.count = 2 * self._limit**2

    def question(self, number: int) -> tuple[str, str]:
        """A sum or a difference."""
        rest, second = divmod(number, self._limit)
        sign, first = divmod(rest, self._limit)
        text = f"{first}{'+-'[sign]}{second}="
        return text, str(first - second if sign else first + second)

    def wrong(self, number: int, which: int = 0) -> str:
        """Off by one to nine, in either direction."""
        noise = _noise(number + which * self.count)
        off = 1 + noise % 9
        return str(int(self.question(number)[1]) + (off if noise & 16 else -off))

    def solve(self, question: str) -> str | None:
        """The result, where the question is one."""
        body = question.strip()
        for sign in "+-":
            first, operator, second = body.removesuffix("=").partition(sign)
            if body.endswith("=") and operator and first.isdecimal() and second.isdecimal():
                return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
        return None


class Sorting(Task):
    """`dbca=`, answered by the same letters in order."""

    alphabet = "abcdefghij="

    def __init__(self, size: int) -> None:
        self._length = 2 * size
        self.count = 10**self._length

    def question(self, number: int) -> tuple[str, str]:
        """Letters from a to j."""
        letters = "".join(self.alphabet[int(digit)] for digit in f"{number:0{self._length}d}")
        return f"{letters}=", "".join(sorted(letters))

    def wrong(self, number: int, which: int = 0) -> str:
        """Eight kinds of mistake in turn, so that a judge which learns from them overlooks none of them.

        Two neighbours exchanged; a letter is another in its place, another, a near one, or one of the others once
        more, in order; cut off; too long; not sorted. From the ninth on there are two mistakes.
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
        """The letters in order, where there are any."""
        body = question.strip()
        letters = body.removesuffix("=")
        known = body.endswith("=") and letters and set(letters) <= set(self.alphabet[:-1])
        return "".join(sorted(letters)) if known else None


def make_task(config: TaskData) -> Task:
    """The task that a section names."""
    return Arithmetic(config.size) if config.name == "arithmetic" else Sorting(config.size)


def _with(letters: str, at: int, letter: str) -> str:
    return letters[:at] + letter + letters[at + 1 :]


def _another(letters: str) -> str:
    """The same with another last letter."""
    return letters[:-1] + ("a" if letters[-1] != "a" else "b")


def _noise(number: int) -> int:
    return int(splitmix64(np.array([number + 1], dtype=np.uint64))[0])


# Prompts for a model that answers itself, and what is known of right answers.


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked."""

    tokens: tuple[int, ...]
    messages: tuple[ChatMessage, ...]
    right: str
    """The answer of the example; empty where it has none."""

    @property
    def text(self) -> str:
        """The last thing that was said: the question."""
        return self.messages[-1].content


Check = Callable[[str, str, str], float | None]
"""From prompt, answer and right answer to a number; None where nothing can be said."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> str | None:
    """The number behind `####`, or the last one of a text."""
    marked = text.rpartition("####")[2]
    numbers = _NUMBER.findall(marked) or _NUMBER.findall(text)
    if not numbers:
        return None
    number: str = numbers[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def gsm8k_reward(prompt: str, answer: str, right: str) -> float | None:
    """One where the final number is right, zero where not; None where no number is known to be right."""
    wanted = final_number(right)
    return None if wanted is None else float(final_number(answer) == wanted)


def gsm8k_rewards(sources: Sequence[ExampleData]) -> Check:
    """The same as what makes one from the data; it needs to know nothing of them."""
    return gsm8k_reward


def task_reward(sources: Sequence[ExampleData]) -> Check:
    """How near an answer comes to the right one of the made-up task that its question belongs to."""
    tasks = [make_task(source) for source in sources if isinstance(source, TaskData)]

    def reward(prompt: str, answer: str, right: str) -> float | None:
        return next((task.credit(prompt, answer) for task in tasks if task.solve(prompt) is not None), None)

    return reward


def correctness(sources: Sequence[ExampleData]) -> Check:
    """One for a right answer and zero for a wrong one, where the data can be checked."""
    tasks = [make_task(source) for source in sources if isinstance(source, TaskData)]
    maths = any(isinstance(source, Gsm8kData) for source in sources)

    def check(prompt: str, answer: str, right: str) -> float | None:
        for task in tasks:
            if task.solve(prompt) is not None:
                return task.reward(prompt, answer)
        return gsm8k_reward(prompt, answer, right) if maths else None

    return check
