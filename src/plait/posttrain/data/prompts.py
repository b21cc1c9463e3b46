"""Prompts for a model that answers itself, and what is known of right answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.config import ExampleData, Gsm8kData, TaskData
from plait.posttrain.data.records import Message
from plait.posttrain.data.tasks import make_task


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked."""

    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
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
    found = _NUMBER.findall(marked) or _NUMBER.findall(text)
    if not found:
        return None
    number: str = found[-1].replace(",", "")
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
