"""What a pipeline is asked for: a file of its own, a run description for each step, or words of `train.py`.

It is no section of a run description, for the reason in [Note: why a search is no section of a run], `tune/config.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError

from plait.config import PHASES, Many, PathText, Section, explain_section, read
from plait.errors import ConfigError, Problem
from plait.posttrain.steps import PHASES as NUMBERED
from plait.posttrain.steps import Steps

COMMANDS = ("train", *PHASES)
"""What a step can be; each is a command of `plait`."""

OUTPUT = "runs/pipeline"
"""Folder above the steps' own, where nothing else is said."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "posttrain": {"max_len": 512, "data_split": "2,4,4"},
        "batch": {"micro": 4},
        "optim": {"lr": 1e-5},
        "schedule": {"type": "CosineAnnealingLR"},
        "train": {"max_epochs": 1},
    }
)
"""A step that is asked for by number alone; the made-up task, where no data are named."""


class StepConfig(Section):
    """One step of a pipeline."""

    phase: Literal["train", "sft", "reward", "dpo", "ppo", "grpo"]
    """The command that runs it."""
    config: PathText | None = None
    """Its run description, seen from the folder of this file. Absent: `settings` say all."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """On top of the run description, with the same keys."""


class PipelineConfig(Section):
    """A file that describes a pipeline."""

    output_dir: PathText = OUTPUT
    """Folder above those of the steps, for steps whose description has no `work_dir`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """What all steps have in common, below their own settings and above their files."""
    steps: Many[StepConfig]
    """In the order in which they run."""


@dataclass(frozen=True, slots=True)
class Described:
    """A step as it was asked for."""

    phase: str
    source: str | Mapping[str, Any]
    """A file, or what one would hold."""
    settings: tuple[str, ...] = ()
    """Overrides, in order."""
    chosen: bool = True
    """Whether it is to run; otherwise it only tells the others where its result is."""

    @property
    def name(self) -> str:
        """For messages."""
        return Path(self.source).name if isinstance(self.source, str) else f"step {self.phase}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """All steps, and the folder above theirs."""

    steps: tuple[Described, ...]
    output_dir: str = OUTPUT
    moved: bool = False
    """Whether `output_dir` is for all steps, and not only for those that name no folder."""


def from_files(files: Sequence[str]) -> Wanted:
    """A file with `steps`, or a run description for each step."""
    if len(files) == 1 and "steps" in (content := read(files[0])):
        return _of_config(make_pipeline_config(content, origin=Path(files[0]).name), Path(files[0]).parent)
    return Wanted(tuple(Described(phase_of(file), file) for file in files))


def from_words(steps: Steps) -> Wanted:
    """The three steps that numbers stand for."""
    if steps.actor_model is None:
        message = "neither run descriptions nor a model are given"
        raise ConfigError(Problem("--actor-model", message, "Give files, or the folder of a model."))
    return Wanted(tuple(Described(phase, DEFAULTS) for phase in NUMBERED.values()), steps.output_dir)


def with_words(wanted: Wanted, steps: Steps, given: Sequence[str]) -> Wanted:
    """Put words of `train.py` over the steps; `given` are those that were said."""
    numbers = {number for number, phase in NUMBERED.items() if phase in steps.phases}
    found = []
    for number, step in enumerate(wanted.steps, start=1):
        # Where a step begins is decided once all are known.
        settings = [each for each in steps.settings(step.phase) if not each.startswith(("work_dir=", "posttrain."))]
        chosen = str(number) in numbers if "step" in given else True
        found.append(replace(step, settings=(*step.settings, *settings), chosen=chosen))
    moved = "output_dir" in given
    return Wanted(tuple(found), steps.output_dir if moved else wanted.output_dir, moved)


def phase_of(file: str) -> str:
    """Which phase a run description is of: as it says, by its sections, or by its name."""
    content = read(file)
    if isinstance(said := content.get("phase"), str):
        return said
    sections = [phase for phase in PHASES if phase in content]
    stem = Path(file).stem
    named = [phase for phase in COMMANDS if phase in stem.replace("-", "_").split("_")]
    found = named if len(named) == 1 else sections
    if len(found) == 1:
        return found[0]
    if "data" in content and not sections:
        return "train"
    reason = f"it has the sections {', '.join(sections)}" if sections else "neither its keys nor its name say"
    raise ConfigError(Problem(file, f"which phase is it? {reason}", f"Add `phase:`, one of {', '.join(PHASES)}."))


def make_pipeline_config(content: Mapping[str, Any], *, origin: str = "") -> PipelineConfig:
    """A `PipelineConfig`; what is wrong with it is a `ConfigError` with every problem."""
    try:
        found = PipelineConfig.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigError(explain_section(error, PipelineConfig, "the pipeline", origin)) from None
    if not found.steps:
        raise ConfigError(Problem("steps", "there are none", "Write one, such as `{phase: sft}`.", origin))
    return found


def _of_config(config: PipelineConfig, folder: Path) -> Wanted:
    steps = []
    for step in config.steps:
        source: str | Mapping[str, Any] = {} if step.config is None else str(folder / step.config)
        settings = (*as_overrides(config.settings), *as_overrides(step.settings))
        steps.append(Described(step.phase, source, settings))
    return Wanted(tuple(steps), config.output_dir)


def as_overrides(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """`{"optim": {"lr": 1}}` and `{"optim.lr": 1}` as `optim.lr=1`; a `type` first, since others depend on it."""
    for key, value in sorted(settings.items(), key=lambda item: item[0] != "type"):
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from as_overrides(value, f"{path}.")
        else:
            yield f"{path}={json.dumps(value)}"
