"""Rewards outside of training, for given answers: from a reward model in a folder, or from a function."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from plait.checkpoint import Source, open_source
from plait.config import PosttrainConfig, RunConfig, TaskData, TemplateConfig, parse, parse_stored
from plait.distributed import open_world
from plait.errors import ConfigError, DataError, ModelError, Problem
from plait.posttrain.data.datasets import ExampleRow, stack
from plait.posttrain.data.prepare import prepare_data, tokenizer_beside
from plait.posttrain.data.records import ChatMessage
from plait.posttrain.data.tasks import Check
from plait.posttrain.data.template import Template, read_tokenizer, template_of_run
from plait.posttrain.models import make_value_model
from plait.posttrain.rl.actor import ScoringModel
from plait.posttrain.rl.rewards import as_reward, find_function
from plait.posttrain.rl.roles import described_in
from plait.posttrain.start import head_name

_ROWS = 16
"""The number of answers in one forward pass of a reward model."""


class Question(NamedTuple):
    """A prompt, and the right answer if one is known."""

    messages: tuple[ChatMessage, ...]
    right: str = ""

    @property
    def text(self) -> str:
        """The content of the last message."""
        return self.messages[-1].content


class ConversationScorer(ABC):
    """Computes a reward for each answer."""

    @abstractmethod
    def rewards(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """Return one number for each answer; NaN if it has no reward."""


class FunctionConversationScorer(ConversationScorer):
    """Computes rewards with a function of (prompt, answer, right answer). Its exceptions are not caught."""

    def __init__(self, function: Check) -> None:
        self._function = function

    def rewards(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """Return the function's value for each answer; NaN for None."""
        rewards = [
            self._function(question.text, answer, question.right)
            for question, answer in zip(questions, answers, strict=True)
        ]
        return [math.nan if reward is None else as_reward(reward) for reward in rewards]


class ModelConversationScorer(ConversationScorer):
    """Computes rewards with a reward model, using the template and tokenizer of its training."""

    def __init__(self, model: nn.Module, template: Template, pad: int, *, context: int | None) -> None:
        self._model, self._template, self._pad, self._context = model, template, pad, context

    def rewards(self, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
        """Return the value at the end of each conversation; NaN for one that exceeds the model's context."""
        rows = [self._row(*pair) for pair in zip(questions, answers, strict=True)]
        fitting = [at for at, row in enumerate(rows) if self._context is None or len(row) <= self._context]
        scores_of_rows = [math.nan] * len(rows)
        device = next(self._model.parameters()).device
        for first in range(0, len(fitting), _ROWS):
            chosen = fitting[first : first + _ROWS]
            ids = stack([rows[at] for at in chosen], self._pad).to(device)
            last = torch.tensor([len(rows[at]) - 1 for at in chosen], device=device)
            with torch.no_grad():
                scores = self._model(ids, last=last)["scores"].tolist()
            for at, score in zip(chosen, scores, strict=True):
                scores_of_rows[at] = score
        return scores_of_rows

    def _row(self, question: Question, answer: str) -> torch.Tensor:
        written = self._template.conversation((*question.messages, ChatMessage("assistant", answer)))
        return torch.from_numpy(ExampleRow.judged(written).ids).long()


def open_scorer(who: str, run: RunConfig | None = None, *, trust_code: bool = False) -> ConversationScorer:
    """Return the scorer that `who` names: the folder of a reward model, `task`, `gsm8k` or `package.module:name`.

    `run` is the run from which the questions come; `task` needs it, to know which task they are of. `trust_code` allows
    code that the folder brings.
    """
    if Path(who).exists():
        return _open_model(who, trust_code)
    if who not in ("task", "gsm8k") and ":" not in who:
        remedy = "Give the folder of a reward model, `task`, `gsm8k` or `package.module:function`."
        raise ConfigError(Problem("--reward", f"{who!r} is neither a folder nor a function", remedy))
    posttrain = (run.posttrain if run is not None else None) or PosttrainConfig()
    if who == "task" and not any(isinstance(source, TaskData) for source in posttrain.data):
        raise ConfigError(Problem("--reward", "task: the data is not a made-up task", "Name another judge."))
    grpo = parse({"phase": "grpo", "grpo": {"reward": who}, "posttrain": posttrain}).config
    try:
        return FunctionConversationScorer(find_function(grpo)[1])
    except ConfigError as error:
        raise ConfigError(Problem("--reward", error.problems[0].message, error.problems[0].remedy)) from error


def _open_model(path: str, trust_code: bool) -> ConversationScorer:
    with open_source(Path(path)) as source:
        config, source_type = _run_of(source, trust_code), source.kind
    if config is None and source_type != "hf":
        raise ModelError(f"{path} does not say what its model is like; `plait convert {path} NEW --to plait` may help")
    if config is not None and config.phase != "reward":
        command = config.phase or "train"
        raise ModelError(
            f"{path} is a run of `plait {command}`, whose model writes; `plait reward` makes one that judges"
        )
    world = open_world(parse({}).config)
    described = described_in(path, config or RunConfig(trust_code=trust_code))
    with world.device:
        model = make_value_model(described, path, lambda _: ScoringModel, trust_code=trust_code)
    head = f"model.{head_name(model)}.weight"
    with open_source(Path(path)) as source:
        if head not in source.entries or source.entries[head].shape[0] != 1:
            raise ModelError(f"{path} has no value head, as models of `plait reward` have: it cannot judge")
    section = (config.posttrain if config is not None else None) or PosttrainConfig()
    folder = Path(path).absolute()
    # Prefer the copy in the run's folder: the tokenizer that its description names may have changed since.
    kept = tokenizer_beside(path)
    named = [Path(file) for file in (section.tokenizer, getattr(described, "path", None)) if file is not None]
    sources = [*([] if kept is None else [kept.parent]), *named, folder]
    tokenizer = read_tokenizer(sources[0])
    template_config = section.template if config is not None else TemplateConfig()
    context = getattr(described, "seq_len", None)
    model.eval().requires_grad_(False)
    template = template_of_run(template_config, tokenizer, sources, trust_code=trust_code)
    return ModelConversationScorer(model, template, tokenizer.end, context=context)


def _run_of(source: Source, trust_code: bool = False) -> RunConfig | None:
    """Return the description, with the default `strategy`, of the run that wrote a checkpoint; None for others."""
    stored = source.state.get("config")
    if not stored:
        return None
    return parse_stored({**stored, "strategy": {}}, source.description, trust_code=trust_code)


def run_behind(path: str, *, trust_code: bool = False) -> RunConfig | None:
    """Return the description of the run whose folder or checkpoint this is; None for other folders."""
    with open_source(Path(path)) as source:
        return _run_of(source, trust_code)


def held_out(path: str, count: int, *, trust_code: bool = False) -> list[Question]:
    """Return the first `count` prompts of a run's validation data, which it was not trained on.

    Raise a `DataError` if there are none.
    """
    config = run_behind(path, trust_code=trust_code)
    if config is None or config.phase is None:
        raise DataError(f"{path} is not a run of a phase, so it kept no questions: give --prompts")
    examples = prepare_data(config).examples[1][:count]
    if not examples:
        raise DataError(f"{path} kept no questions for validation: give --prompts")
    return [Question(example.prompt, example.messages[-1].content) for example in examples]
