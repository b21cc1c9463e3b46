"""What a step takes over from those before it: weights, adapter, tokenizer, and the judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.config import HFConfig, Parsed, RunConfig, starts_of, texts
from plait.data import tokenizer_path

WRITES = ("train", "sft", "dpo", "ppo", "grpo")
"""Phases whose result is a language model."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, described to the last setting."""

    number: int
    phase: str
    parsed: Parsed
    after: tuple[Step, ...]
    """The steps whose results it reads."""
    home: str
    """The folder that its own description names, wherever the pipeline has put it."""
    chosen: bool = True

    @property
    def config(self) -> RunConfig:
        """Its run description."""
        return self.parsed.config

    @property
    def folder(self) -> Path:
        """Where its result lies."""
        return Path(self.config.work_dir)


def taken_over(phase: str, parsed: Parsed, earlier: Sequence[Step]) -> Iterator[str]:
    """Settings that follow from earlier steps; what the description says itself stands."""
    if phase == "train":
        return
    config, origins = parsed.config, parsed.origins
    writer = next((step for step in reversed(earlier) if step.phase in WRITES), None)
    judge = next((step for step in reversed(earlier) if step.phase == "reward"), None)
    if writer is not None and not _said(origins, "posttrain.start") and not _own_judge(phase, config, writer):
        yield from _begin_with(writer, config, origins)
    if phase == "ppo" and judge is not None and not (config.ppo and (config.ppo.reward_model or config.ppo.reward)):
        yield f"ppo.reward_model={judge.folder}"
    yield from _moved(config, earlier)


def _moved(config: RunConfig, earlier: Sequence[Step]) -> Iterator[str]:
    """A description that names the folder of another one means that step, also where it lies elsewhere now."""
    for key, path in starts_of(config).items():
        for step in earlier:
            if _inside(path, step.home) and Path(step.home).absolute() != step.folder.absolute():
                yield f"{key}={step.folder / Path(path).absolute().relative_to(Path(step.home).absolute())}"


def _inside(path: str | Path, folder: str | Path) -> bool:
    return Path(path).absolute().is_relative_to(Path(folder).absolute())


def _begin_with(writer: Step, config: RunConfig, origins: Mapping[str, str]) -> Iterator[str]:
    made = writer.config
    if _only_adapter(made) and config.lora is not None:
        # Its checkpoint is no model. The next step begins where it began, with its adapter.
        start = made.posttrain.start if made.posttrain else None
        if start is not None:
            yield f"posttrain.start={start}"
        if not _said(origins, "lora.adapter"):
            yield f"lora.adapter={writer.folder / 'adapter'}"
    else:
        yield f"posttrain.start={writer.folder}"
    if texts("data", made.data) and not _said(origins, "posttrain.tokenizer"):
        yield f"posttrain.tokenizer={tokenizer_path(made.data)}"


def _only_adapter(config: RunConfig) -> bool:
    """Whether a checkpoint is a part of its model. Where everything is trained, it is whole."""
    return config.lora is not None and config.lora.only and config.checkpoint.trainable_only


def unusable(step: Step, config: RunConfig) -> str | None:
    """Why a later step cannot begin with what a step keeps; None where it can."""
    if not step.config.checkpoint.last:
        return f"{step.phase} writes no checkpoint at its end: leave out its `checkpoint.last: false`"
    if _only_adapter(step.config) and (config.lora is None or step.phase == "reward"):
        more = "" if step.phase == "reward" else ", or add `lora` here"
        return f"{step.phase} keeps only its adapter: leave out its `checkpoint.trainable_only`{more}"
    if _only_adapter(step.config) and step.config.lora is not None and step.config.lora.also:
        return (
            f"{step.phase} passes on only its adapter, without `lora.also`: leave out its `checkpoint.trainable_only`"
        )
    return None


def _own_judge(phase: str, config: RunConfig, writer: Step) -> bool:
    """A reward model of another kind has weights of its own."""
    if phase != "reward" or not isinstance(config.model, HFConfig):
        return False
    theirs = writer.config.model
    return not isinstance(theirs, HFConfig) or config.model.path != theirs.path


def read_by(config: RunConfig, earlier: Sequence[Step]) -> tuple[Step, ...]:
    """The earlier steps whose folders a description names."""
    named = starts_of(config).values()
    return tuple(step for step in earlier if any(_inside(path, step.folder) for path in named))


def _said(origins: Mapping[str, str], path: str) -> bool:
    return origins.get(path, "default") != "default"
