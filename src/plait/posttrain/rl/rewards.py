"""Rewards of answers, from a Python function or from a reward model."""

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

# Outputs of a model for many rows: each rank computes some rows, and every rank gets the outputs of all.


def ask(
    engine: NativeEngine,
    lengths: Tensor,
    inputs: Callable[[Sequence[int]], Mapping[str, Tensor]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    rows: int,
) -> dict[str, Tensor]:
    """Return outputs of a model for all rows, by name, computed without gradients and in evaluation mode.

    `wanted` has the names of the outputs, each with its shape for one row. `lengths` are the lengths of the rows, and
    `inputs` makes a micro-batch of at most `rows` of them. Outputs are fp32 on the host, and zero beyond the width of
    the micro-batch. A collective: every rank must call it with the same rows, and every rank gets all outputs.
    """
    world, count = engine.world, len(lengths)
    outputs = {name: torch.zeros(count, *shape) for name, shape in wanted.items()}
    ranks = world.layout.data_parallel
    order = lengths.argsort(stable=True).tolist()  # rows of similar lengths share a micro-batch
    share = order[world.data_rank :: ranks]
    for first in range(0, len(order[::ranks]), rows):
        mine = share[first : first + rows]
        chosen = mine or order[:1]  # a rank without rows still takes part in the collectives of the model
        said = engine.evaluate_micro_batch(MicroBatch(inputs(chosen), len(mine))).outputs
        if said is None:  # another rank along `tp` returns the same outputs
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
"""The reward of an answer that has none."""


class Answer(NamedTuple):
    """One answer to score."""

    prompt: Prompt
    text: str
    finished: bool
    """Whether the model ended it, and not the limit of tokens."""


class Scorer(ABC):
    """Computes a reward for each answer."""

    @abstractmethod
    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the reward of each answer, the same on every rank. A collective: every rank passes all answers."""


class FunctionScorer(Scorer):
    """Computes rewards with a function of (prompt, answer, right answer); each rank calls it for some answers."""

    def __init__(
        self, name: str, function: Check, world: World, *, bad: str, log: Callable[[str], None] = print
    ) -> None:
        self._name, self._function, self._world = name, function, world
        self._refuses, self._log = bad == "error", log
        self._warned = False

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the rewards; an answer for which the function fails has the reward NaN.

        Failures are gathered before any rank raises, so that all ranks raise the same error (`bad_reward: error`).
        With `bad_reward: skip` only the first failure is logged.
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
            if value is None:  # the function gives no reward on purpose
                return NONE, None
            reward = as_reward(value)
        except Exception as error:  # all ranks must reach the gather, whatever a user's function raises
            return NONE, f"raised {type(error).__name__}: {error} {where}"
        if not math.isfinite(reward):
            return NONE, f"gave {value!r} {where}"
        return reward, None


def as_reward(value: Any) -> float:
    """Return the value of a reward function as a float; True and False are 1 and 0.

    Raise a `TypeError` for text, even if it consists of digits.
    """
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is of type {type(value).__name__}, expected a number")
    return float(value)


class ModelScorer(Scorer):
    """Computes rewards with a reward model, using the template of the run."""

    def __init__(self, engine: NativeEngine, template: Template, pad: int, *, rows: int, longest: int) -> None:
        self._engine, self._template, self._pad = engine, template, pad
        self._rows, self._longest = rows, longest

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the value at the last token of each conversation; NaN if it exceeds the greatest length."""
        rows = [self._row(answer) for answer in answers]
        # Encoding the text again may give more tokens than were generated. A cut answer would get another reward, so an
        # answer that does not fit gets none.
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
        return torch.tensor(self._template.unfinished(said)[: self._longest])  # without an end token


class Rules(Scorer):
    """Applies the rewards that the section `rollout` sets for empty and unfinished answers; scores the others."""

    def __init__(self, scorer: Scorer, rollout: RolloutConfig) -> None:
        self._scorer, self._rollout = scorer, rollout

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the set rewards, and those of the scorer for all other answers."""
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
"""Import paths of the factories of Plait's own reward functions; each makes a function from the data sources."""


def find_function(config: RunConfig) -> tuple[str, Check]:
    """Return the name and the reward function of a run: the named one, or for GRPO the one that its data imply.

    Raise a `ConfigError` if there is none.
    """
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
