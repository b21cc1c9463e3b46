"""From answers to rewards: by a function in plain Python, or by a reward model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config import ExampleData, GrpoConfig, Gsm8kData, PosttrainConfig, RolloutConfig, RunConfig, TaskData
from plait.data import MicroBatch
from plait.distributed import World
from plait.engine import NativeEngine
from plait.errors import ConfigError, Problem, TrainingError
from plait.plugins import find, load_function
from plait.posttrain.data.datasets import stack
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.data.tasks import Check, Prompt
from plait.posttrain.data.template import Template
from plait.posttrain.rl.settings import Online

# What a model says to many rows, however it is spread: each rank asks for its share, and all know all of it.


def ask(
    engine: NativeEngine,
    lengths: Tensor,
    inputs: Callable[[Sequence[int]], Mapping[str, Tensor]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    rows: int,
) -> dict[str, Tensor]:
    """Outputs of a model for rows of these lengths, by name; `wanted` says which, and what a row's one is shaped like.

    Without gradients and in evaluation mode. `inputs` makes a micro-batch of some of the rows, `rows` at a time; what
    is wider than the micro-batch was stays zero. Every rank must ask for the same.
    """
    world, count = engine.world, len(lengths)
    outputs = {name: torch.zeros(count, *shape) for name, shape in wanted.items()}
    ranks = world.layout.data_parallel
    order = lengths.argsort(stable=True).tolist()  # rows of about the same length go together
    share = order[world.data_rank :: ranks]
    for first in range(0, len(order[::ranks]), rows):
        mine = share[first : first + rows]
        chosen = mine or order[:1]  # a rank without work helps those who share the model with it
        said = engine.evaluate_micro_batch(MicroBatch(inputs(chosen), len(mine))).outputs
        if said is None:  # others along `tp` say the same
            continue
        for name, whole in outputs.items():
            for row, values in zip(mine, said[name].float().cpu(), strict=False):
                if values.ndim:
                    whole[row, : len(values)] = values
                else:
                    whole[row] = values
    if world.everyone is not None:
        for whole in outputs.values():
            box = whole.to(world.device)
            dist.all_reduce(box, group=world.everyone)
            whole.copy_(box)
    return outputs


NONE = math.nan
"""The reward of an answer of which nothing is known."""


class Answer(NamedTuple):
    """One answer to judge."""

    prompt: Prompt
    text: str
    finished: bool
    """Whether it ended by itself."""


class Scorer(ABC):
    """Gives each answer a reward."""

    @abstractmethod
    def score(self, answers: Sequence[Answer]) -> list[float]:
        """The rewards, the same on every rank; every rank must ask for all of them."""


class FunctionScorer(Scorer):
    """A function of (prompt, answer, right answer). Ranks share the answers among them."""

    def __init__(
        self, name: str, function: Check, world: World, *, bad: str, log: Callable[[str], None] = print
    ) -> None:
        self._name, self._function, self._world = name, function, world
        self._refuses, self._log = bad == "error", log
        self._warned = False

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Call the function for this rank's share. What goes wrong is known to all ranks before any of them stops.

        Where none of them does, it is said the first time: a function that never works would go unnoticed for long.
        """
        rank, size = self._world.rank, self._world.size
        mine = [self._one(answer) for answer in answers[rank::size]]
        rewards = [NONE] * len(answers)
        failures: list[str] = []
        for shard, results in enumerate(self._world.gather(mine)):
            rewards[shard::size] = [reward for reward, _ in results]
            failures += [failure for _, failure in results if failure is not None]
        if failures:
            more = f"; of {len(answers)} answers {len(failures)} went wrong" if len(failures) > 1 else ""
            wrong = f"the reward function {self._name} {failures[0]}{more}"
            if self._refuses:
                raise TrainingError(f"{wrong}. Mend it, or set rollout.bad_reward: skip")
            if not self._warned and self._world.is_main:
                self._log(f"{wrong}. Such answers teach nothing; skipped_answers counts them from here on")
            self._warned = True
        return rewards

    def _one(self, answer: Answer) -> tuple[float, str | None]:
        where = f"for the prompt {answer.prompt.text!r} and the answer {answer.text!r}"
        try:
            value = self._function(answer.prompt.text, answer.text, answer.prompt.right)
            if value is None:  # it says itself that it does not know
                return NONE, None
            reward = as_reward(value)
        except Exception as error:  # whatever a user's function raises must not leave other ranks waiting
            return NONE, f"raised {type(error).__name__}: {error} {where}"
        if not math.isfinite(reward):
            return NONE, f"gave {value!r} {where}"
        return reward, None


def as_reward(value: Any) -> float:
    """What a reward function returned as a number. A text is none, even of digits; True and False are 1 and 0."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is of type {type(value).__name__}, expected a number")
    return float(value)


class ModelScorer(Scorer):
    """A reward model, which sees answers as it saw them in training."""

    def __init__(self, engine: NativeEngine, template: Template, pad: int, *, rows: int, longest: int) -> None:
        self._engine, self._template, self._pad = engine, template, pad
        self._rows, self._longest = rows, longest

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """The number at the end of each answer."""
        rows = [self._row(answer) for answer in answers]
        # Text may become more tokens than it was written with, and one without its end is another answer.
        fits = [len(row) <= self._longest for row in rows]
        rows = [row[: self._longest] for row in rows]
        lengths = torch.tensor([len(row) for row in rows])
        outputs = ask(
            self._engine,
            lengths,
            lambda chosen: {
                "input_ids": stack([rows[index] for index in chosen], self._pad),
                "last": lengths[chosen] - 1,
            },
            {"scores": ()},
            rows=self._rows,
        )
        scores = outputs["scores"].tolist()
        return [score if fit and math.isfinite(score) else NONE for score, fit in zip(scores, fits, strict=True)]

    def _row(self, answer: Answer) -> torch.Tensor:
        said = (*answer.prompt.messages, ChatMessage("assistant", answer.text))
        if answer.finished:
            return torch.tensor(self._template.conversation(said).ids)
        return torch.tensor(self._template.unfinished(said)[: self._longest])  # it has no end to see


class Rules(Scorer):
    """What the run description says of answers that are empty or did not end, before anybody else is asked."""

    def __init__(self, scorer: Scorer, rollout: RolloutConfig) -> None:
        self._scorer, self._rollout = scorer, rollout

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """The set rewards, and the scorer's for all others."""
        rewards = [self._set(answer) for answer in answers]
        left = [index for index, reward in enumerate(rewards) if reward is None]
        asked = self._scorer.score([answers[index] for index in left]) if left else []
        given = dict(zip(left, asked, strict=True))
        return [given[index] if reward is None else reward for index, reward in enumerate(rewards)]

    def _set(self, answer: Answer) -> float | None:
        if not answer.text.strip() and self._rollout.empty_reward is not None:
            return self._rollout.empty_reward
        return None if answer.finished else self._rollout.unfinished_reward


REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "task": "plait.posttrain.data.tasks:task_reward",
        "gsm8k": "plait.posttrain.data.tasks:gsm8k_rewards",
    }
)
"""What makes each of Plait's own reward functions from the data; it comes in as a function of the user's own does."""


def find_function(config: RunConfig) -> tuple[str, Check]:
    """The reward function that a run description names, or that its data bring along."""
    method, phase = Online.of(config).method, config.phase
    sources = (config.posttrain or PosttrainConfig()).data
    name = method.reward
    if name is None and isinstance(method, GrpoConfig):
        name = _task_reward(sources)
    if name is None:
        remedy = "Write `package.module:function`, `task` or `gsm8k`."
        raise ConfigError(Problem(f"{phase}.reward", "there is none, and the data cannot be checked", remedy))
    key = f"{phase}.reward"
    if isinstance(name, str):
        return name, find("reward", REWARDS[name], key)(sources)
    return str(name.type), load_function(name, key, "prompt", "answer", "right answer")


def _task_reward(sources: Sequence[ExampleData]) -> Literal["task", "gsm8k"] | None:
    types = {type(source) for source in sources}
    return "task" if types == {TaskData} else "gsm8k" if types == {Gsm8kData} else None
