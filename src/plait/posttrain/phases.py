"""Pipelines (`plait pipeline`): several phases (pretraining, SFT, reward model, DPO, PPO, GRPO), run in order.

A *step* of a pipeline is one run of one phase, with its own folder. This module reads the description of a pipeline,
sets in each step what follows from earlier steps (weights, adapter, tokenizer, reward model), checks all steps before
the first one starts, and runs those that are not complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError

from plait.checkpoint import CheckpointFolder, saved_at
from plait.config import (
    ONLINE,
    PHASES,
    ExampleData,
    GptConfig,
    HFConfig,
    LlamaConfig,
    Many,
    MoeConfig,
    Parsed,
    PathText,
    PosttrainConfig,
    RunConfig,
    Section,
    TaskData,
    check,
    check_complete,
    explain_section,
    missing_paths,
    missing_start_paths,
    parse,
    read,
    read_json_object,
    resolve_batch,
    resolve_layout,
    rows,
    show,
    start_paths,
    text_sources,
    to_yaml,
)
from plait.data import tokenizer_path
from plait.errors import ConfigError, DataError, ModelError, PlaitError, Problem, in_one_line
from plait.launch import STOPPED_CODES
from plait.models import build_model
from plait.monitor import EventKind, History, events_path, format_clock, history, read_events, write_report
from plait.posttrain.data.prepare import longest
from plait.posttrain.data.records import EmptyError, IncompleteError, UnlearnedError, examples_in, read_rows
from plait.posttrain.data.tasks import make_task
from plait.posttrain.data.template import NAME, read_tokenizer
from plait.posttrain.models import make_model
from plait.trainer import STOPPED

WRITES = ("train", "sft", "dpo", "ppo", "grpo")
"""Phases whose result is a language model."""


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """One step of a pipeline, with its complete run description."""

    number: int
    phase: str
    parsed: Parsed
    after: tuple[PhaseStep, ...]
    """The earlier steps whose folders its run description names."""
    home: str
    """The `work_dir` in its own description; the pipeline may have set another one, which is `folder`."""
    chosen: bool = True
    """Whether it is to be run; otherwise only its results are used."""

    @property
    def config(self) -> RunConfig:
        """Its run description."""
        return self.parsed.config

    @property
    def folder(self) -> Path:
        """The folder of its run: checkpoints, log, report."""
        return Path(self.config.work_dir)


def taken_over(phase: str, parsed: Parsed, earlier: Sequence[PhaseStep]) -> Iterator[str]:
    """Yield overrides (`key=value`) that follow from earlier steps, for keys that the description does not set.

    These are the policy's weights, adapter and tokenizer, and the reward model of PPO.
    """
    if phase == "train":
        return
    config, origins = parsed.config, parsed.origins
    policy = next((step for step in reversed(earlier) if step.phase in WRITES), None)
    reward_model = next((step for step in reversed(earlier) if step.phase == "reward"), None)
    if policy is not None and not _said(origins, "posttrain.start") and not _has_own_start(phase, config, policy):
        yield from _begin_with(policy, config, origins)
    if (
        phase == "ppo"
        and reward_model is not None
        and not (config.ppo and (config.ppo.reward_model or config.ppo.reward))
    ):
        yield f"ppo.reward_model={reward_model.folder}"
    yield from _moved(config, earlier)


def _moved(config: RunConfig, earlier: Sequence[PhaseStep]) -> Iterator[str]:
    """Yield overrides for paths inside the `work_dir` of an earlier step that the pipeline put in another folder."""
    for key, path in start_paths(config).items():
        for step in earlier:
            if _inside(path, step.home) and Path(step.home).absolute() != step.folder.absolute():
                yield f"{key}={step.folder / Path(path).absolute().relative_to(Path(step.home).absolute())}"


def _inside(path: str | Path, folder: str | Path) -> bool:
    return Path(path).absolute().is_relative_to(Path(folder).absolute())


def _begin_with(policy: PhaseStep, config: RunConfig, origins: Mapping[str, str]) -> Iterator[str]:
    made = policy.config
    if _only_adapter(made) and config.lora is not None:
        # The checkpoint of that step has only the adapter. This step starts from the same base, with that adapter.
        start = made.posttrain.start if made.posttrain else None
        if start is not None:
            yield f"posttrain.start={start}"
        if not _said(origins, "lora.adapter"):
            yield f"lora.adapter={policy.folder / 'adapter'}"
    else:
        yield f"posttrain.start={policy.folder}"
    if text_sources("data", made.data) and not _said(origins, "posttrain.tokenizer"):
        yield f"posttrain.tokenizer={tokenizer_path(made.data)}"


def _only_adapter(config: RunConfig) -> bool:
    """Whether the checkpoints of a run have only the adapter and not the whole model."""
    return config.lora is not None and config.lora.only and config.checkpoint.trainable_only


def unusable(step: PhaseStep, config: RunConfig) -> str | None:
    """Return why a later step with this description cannot start from the checkpoint of `step`; None if it can."""
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


def _has_own_start(phase: str, config: RunConfig, policy: PhaseStep) -> bool:
    """Whether a reward model does not start from the policy: its `model.path` is another one."""
    if phase != "reward" or not isinstance(config.model, HFConfig):
        return False
    theirs = policy.config.model
    return not isinstance(theirs, HFConfig) or config.model.path != theirs.path


def read_by(config: RunConfig, earlier: Sequence[PhaseStep]) -> tuple[PhaseStep, ...]:
    """Return the earlier steps whose folders a run description names."""
    named = start_paths(config).values()
    return tuple(step for step in earlier if any(_inside(path, step.folder) for path in named))


def _said(origins: Mapping[str, str], path: str) -> bool:
    return origins.get(path, "default") != "default"


# The description of a pipeline: a file with `steps`, or one run description per step.
#
# It is not a section of a run description, for the reason in [Note: a search is not a section of a run],
# `tune/config.py`.


COMMANDS = ("train", *PHASES)
"""The phases that a step can have; each is a command of `plait`."""

OUTPUT = "runs/pipeline"
"""Default of the folder that contains the folders of the steps."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "posttrain": {"max_len": 512, "data_split": "2,4,4"},
        "batch": {"micro": 4},
        "optim": {"lr": 1e-5},
        "schedule": {"type": "CosineAnnealingLR"},
        "train": {"max_epochs": 1},
    }
)
"""Settings of a step that is chosen by number (`--step`), so without a run description. Without data, the generated
task is used."""


class StepConfig(Section):
    """One step of a pipeline."""

    phase: Literal["train", "sft", "reward", "dpo", "ppo", "grpo"]
    """The command that runs it."""
    config: PathText | None = None
    """Its run description, seen from the folder of this file. Absent: `settings` say all."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """On top of the run description, with the same keys."""


class PhasesConfig(Section):
    """A file that describes a pipeline."""

    output_dir: PathText = OUTPUT
    """Folder above those of the steps, for steps whose description has no `work_dir`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """What all steps have in common, below their own settings and above their files."""
    steps: Many[StepConfig]
    """In the order in which they run."""


@dataclass(frozen=True, slots=True)
class PhaseDescription:
    """One step as the user describes it."""

    phase: str
    source: str | Mapping[str, Any]
    """The path of a run description, or its content."""
    settings: tuple[str, ...] = ()
    """Overrides (`key=value`) of the run description; later ones win."""
    chosen: bool = True
    """Whether it is to be run; otherwise later steps only use its results."""

    @property
    def name(self) -> str:
        """The name of the step in messages."""
        return Path(self.source).name if isinstance(self.source, str) else f"step {self.phase}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pipeline as the user describes it: all steps, and the folder that contains their folders."""

    steps: tuple[PhaseDescription, ...]
    output_dir: str = OUTPUT
    moved: bool = False
    """Whether `output_dir` applies to all steps; otherwise only to those whose description has no `work_dir`."""


def from_files(files: Sequence[str]) -> Wanted:
    """Return the pipeline that files describe: one file with `steps`, or one run description per step."""
    if len(files) == 1 and "steps" in (content := read(files[0])):
        return _of_config(make_pipeline_config(content, origin=Path(files[0]).name), Path(files[0]).parent)
    return Wanted(tuple(PhaseDescription(phase_of(file), file) for file in files))


def phase_of(file: str) -> str:
    """Return the phase of a run description: its key `phase`, or else what its file name or its sections imply.

    Raise a `ConfigError` if they imply none, or several.
    """
    content = read(file)
    if isinstance(said := content.get("phase"), str):
        return said
    sections = [phase for phase in PHASES if phase in content]
    stem = Path(file).stem
    named = [phase for phase in COMMANDS if phase in stem.replace("-", "_").split("_")]
    candidates = named if len(named) == 1 else sections
    if len(candidates) == 1:
        return candidates[0]
    if "data" in content and not sections:
        return "train"
    reason = f"it has the sections {', '.join(sections)}" if sections else "neither its keys nor its name say"
    raise ConfigError(Problem(file, f"which phase is it? {reason}", f"Add `phase:`, one of {', '.join(PHASES)}."))


def make_pipeline_config(content: Mapping[str, Any], *, origin: str = "") -> PhasesConfig:
    """Return the description of a pipeline; raise a `ConfigError` with all its problems."""
    try:
        phases = PhasesConfig.model_validate(dict(content))
    except ValidationError as error:
        raise ConfigError(explain_section(error, PhasesConfig, "the pipeline", origin)) from None
    if not phases.steps:
        raise ConfigError(Problem("steps", "empty", "Write one, such as `{phase: sft}`.", origin))
    return phases


def _of_config(config: PhasesConfig, folder: Path) -> Wanted:
    steps = []
    for step in config.steps:
        source: str | Mapping[str, Any] = {} if step.config is None else str(folder / step.config)
        settings = (*as_overrides(config.settings), *as_overrides(step.settings))
        steps.append(PhaseDescription(step.phase, source, settings))
    return Wanted(tuple(steps), config.output_dir)


def as_overrides(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield settings as overrides: `{"optim": {"lr": 1}}` and `{"optim.lr": 1}` both give `optim.lr=1`.

    A `type` comes first, because it determines which other keys exist.
    """
    for key, value in sorted(settings.items(), key=lambda item: item[0] != "type"):
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from as_overrides(value, f"{path}.")
        else:
            yield f"{path}={json.dumps(value)}"


# The state of a step (new, begun or complete), from the files in its folder; and whether that folder may be used.


DESCRIPTION = "step.yaml"
"""File in the folder of a step: the complete run description with which it was started."""

_FREE = frozenset({"strategy", "log", "plan", "device", "backend", "timeout_s", "checkpoint", "deterministic"})
"""Sections that may change when a step is started again: they do not change what is computed."""
_FREE_KEYS = frozenset({"batch.micro", "batch.accumulation", "train.stop_after"})
_CUT_SHORT = ("failed", "stopped at step", *STOPPED)
"""Prefixes of the reason in `report.json` if a run ended early and can be resumed."""


class PhaseState(StrEnum):
    """Whether a step has begun, and whether it is complete."""

    NEW = "new"
    BEGUN = "begun"
    COMPLETE = "complete"


def state_of(step: PhaseStep) -> PhaseState:
    """Return the state of a step, from the files in its folder."""
    if not (step.folder / DESCRIPTION).is_file():
        return PhaseState.NEW
    if newest(step.folder) is None or ending(step.folder) is None:
        return PhaseState.BEGUN
    return PhaseState.BEGUN if str(ending(step.folder)).startswith(_CUT_SHORT) else PhaseState.COMPLETE


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in the folder of a step; None if there is none."""
    return CheckpointFolder(folder / "checkpoints").newest()


def ending(folder: Path) -> str | None:
    """Return why the last run in a folder ended, from `report.json`; None without a report."""
    try:
        return str(read_json_object(folder / "report.json", DataError)["reason"])
    except (DataError, KeyError):
        return None


def problems_with(step: PhaseStep) -> Iterator[Problem]:
    """Yield the reasons why a step cannot use its folder."""
    where = f"step {step.number}, {step.phase}"
    if step.folder.exists() and not step.folder.is_dir():
        yield Problem("work_dir", f"{str(step.folder)!r} is not a folder", "Choose another one.", where)
        return
    made, written = newest(step.folder), step.folder / DESCRIPTION
    if made is None:  # no checkpoint is there that could be lost
        return
    remedy = "Choose another `--output-dir`, or move that folder away."
    if not written.is_file():
        yield Problem("work_dir", f"{str(step.folder)!r} holds a run that no pipeline started", remedy, where)
    elif differing := differences(written, step.config):
        message = f"{str(step.folder)!r} holds this step with other settings: {'; '.join(differing)}"
        yield Problem("work_dir", message, remedy, where)
    for before in step.after:
        began_with = newest(before.folder)
        if began_with is not None and saved_at(made) < saved_at(began_with):
            message = f"{str(step.folder)!r} is older than {str(before.folder)!r}, which it begins with"
            yield Problem("work_dir", message, "Move it away, and it is made anew.", where)


def differences(written: Path, config: RunConfig, most: int = 3) -> list[str]:
    """Return, as messages, the first `most` settings that differ from those with which a step was started."""
    try:
        old = dict(rows(parse(written).config))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    new = dict(rows(config))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not _free(key)]
    return [f"{key} was {show(old.get(key))} and is {show(new.get(key))}" for key in keys[:most]]


def write_description(step: PhaseStep) -> Path:
    """Write the run description of a step into its folder; return the path."""
    path = step.folder / DESCRIPTION
    try:
        step.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(step.config), encoding="utf-8")
    except OSError as error:
        message = f"{str(step.folder)!r} cannot be written to: {error.strerror}"
        raise ConfigError(Problem("work_dir", message, "Choose another `--output-dir`.")) from error
    return path


def _free(key: str) -> bool:
    return key.partition(".")[0] in _FREE or key in _FREE_KEYS


# From the description of a pipeline to steps that can run: all steps are checked before the first process starts.


_SHOWN_DIFFERENCES = 3


def make_steps(wanted: Wanted, *, ranks: int, local_ranks: int) -> list[PhaseStep]:
    """Return all steps of a pipeline, checked; raise a `ConfigError` with all problems of all steps."""
    steps: list[PhaseStep] = []
    problems: list[Problem] = []
    for number, described in enumerate(wanted.steps, start=1):
        where = f"step {number}, {described.name}"
        with _Collecting(problems, where) as collecting:
            steps.append(_described(number, described, wanted, steps))
        if collecting.failed:
            continue
        step = steps[-1]
        for look in (_complete, _spread(ranks, local_ranks)):
            with _Collecting(problems, where):
                look(step)
        problems += [replace(problem, origin=where) for problem in (*_names(step), *_before(step))]
    problems += _shared_folders(steps)
    if len(steps) == len(wanted.steps) and not problems:
        problems += _of_models(steps)
        problems += [problem for step in steps if step.chosen for problem in problems_with(step)]
    if problems:
        raise ConfigError(problems)
    return steps


def _described(number: int, described: PhaseDescription, wanted: Wanted, earlier: Sequence[PhaseStep]) -> PhaseStep:
    phase = [] if described.phase == "train" else [f"phase={described.phase}"]
    settings = [*described.settings, *phase]
    parsed = parse(described.source, settings)
    if wanted.moved or parsed.origins.get("work_dir", "default") == "default":
        settings.append(f"work_dir={wanted.output_dir}/{described.phase}")
    settings += taken_over(described.phase, parsed, earlier)
    final, home = parse(described.source, settings), parsed.config.work_dir
    return PhaseStep(number, described.phase, final, read_by(final.config, earlier), home, described.chosen)


def _complete(step: PhaseStep) -> None:
    parsed = step.parsed
    if step.phase == "train":
        check_complete(parsed, require_length=True)
        return
    check(parsed.config, has_val=True, require_length=True, origins=parsed.origins)
    if parsed.config.model is None:
        raise ConfigError(Problem("model", "there is none", "Add a section `model` with a `type`."))


def _spread(ranks: int, local_ranks: int) -> Callable[[PhaseStep], None]:
    def look(step: PhaseStep) -> None:
        strategy = step.config.strategy
        layout = resolve_layout(strategy, size=ranks, local_size=local_ranks)
        resolve_batch(step.config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)

    return look


def _names(step: PhaseStep) -> Iterator[Problem]:
    """Yield a problem for each file or folder that does not exist, unless an earlier step will write it."""
    if step.phase != "train":  # for `train`, `check_complete` has checked the paths
        yield from missing_paths(step.config)
    section = step.config.posttrain
    if section is None:
        return
    for role, sources in (("data", section.data), ("val_data", section.val_data)):
        for source in sources:
            problems: list[Problem] = []
            with _Collecting(problems, "", f"posttrain.{role}"):
                _look_into(source, section, step.phase)
            yield from problems
    made, named = [before.folder for before in step.after], start_paths(step.config)
    for problem in missing_start_paths(step.config):
        if not any(_is_inside(named[problem.path], folder) for folder in made):
            yield problem


def _look_into(source: ExampleData, section: PosttrainConfig, phase: str) -> None:
    """Raise an error if the first row of a source cannot be used in this phase, or the source cannot be read."""
    if isinstance(source, TaskData):
        make_task(source).examples(source.samples)
        return
    where, row = next(iter(read_rows(source.path)), (source.path, "no row at all"))
    try:
        if isinstance(row, str):
            raise IncompleteError(row)
        pairs, answered = phase in ("reward", "dpo"), phase not in ONLINE
        next(iter(examples_in(row, source, where, pairs=pairs, answered=answered)), None)
    except IncompleteError as error:
        if section.incomplete == "error":
            raise DataError(f"{where}: {error}") from error
    except (EmptyError, UnlearnedError):  # no problem here: counted in the report when the step runs
        pass


def _before(step: PhaseStep) -> Iterator[Problem]:
    """Yield a problem for each earlier step whose checkpoint this one cannot use, or that has none and is not run."""
    for before in step.after:
        if (reason := unusable(before, step.config)) is not None:
            yield Problem("posttrain.start", reason)
        if step.chosen and not before.chosen and newest(before.folder) is None:
            message = f"it begins with step {before.number}, {before.phase}, which is not asked for"
            remedy = f"It has no result in {str(before.folder)!r}; add {before.number} to `--step`."
            yield Problem("posttrain.start", message, remedy)


def _shared_folders(steps: Sequence[PhaseStep]) -> Iterator[Problem]:
    seen: dict[Path, PhaseStep] = {}
    for step in steps:
        first = seen.setdefault(step.folder.absolute(), step)
        if first is not step:
            message = f"{str(step.folder)!r} is the folder of step {first.number}, {first.phase}, too"
            yield Problem("work_dir", message, "Give each its own.", f"step {step.number}, {step.phase}")


def _of_models(steps: Sequence[PhaseStep]) -> Iterator[Problem]:
    """Yield a problem for each step that starts from weights of another model.

    Weights that an earlier step has yet to write are compared by the model that it describes.
    """
    for step in steps:
        if not step.chosen or state_of(step) is PhaseState.COMPLETE:
            continue
        where = f"step {step.number}, {step.phase}"
        problems: list[Problem] = []
        start = step.config.posttrain.start if step.config.posttrain else None
        maker = next((before for before in step.after if start is not None and _is_inside(start, before.folder)), None)
        with _Collecting(problems, where):
            if maker is not None and newest(maker.folder) is None:
                _same_shapes(step, maker)
            elif step.phase != "train" and all(newest(before.folder) is not None for before in step.after):
                with torch.device("meta"):
                    make_model(step.config)
            _check_reward_model(step)
        yield from problems


def _check_reward_model(step: PhaseStep) -> None:
    """Raise a `ConfigError` if a reward model of an earlier step cannot read what the policy writes.

    It needs the same template, the same tokenizer and a context that is long enough.
    """
    reward = next((before for before in step.after if before.phase == "reward"), None)
    if step.phase != "ppo" or reward is None:
        return
    known, wanted = getattr(reward.config.model, "seq_len", None), longest(step.config)
    if isinstance(known, int) and known < wanted:
        message = f"sees {known} tokens, and answers here come with up to {wanted}"
        raise ConfigError(Problem("ppo.reward_model", message, f"Write `posttrain.max_len: {known}` here."))
    templates = [(run.config.posttrain or PosttrainConfig()).template for run in (step, reward)]
    if templates[0] != templates[1] and not any(
        template.kind == "auto" for template in templates
    ):  # `auto` is resolved when the tokenizer is read, and compared then
        message = f"is trained on conversations that step {reward.number}, reward, writes in another template"
        raise ConfigError(Problem("posttrain.template", message, "Write the same one for both."))
    models = [run.config.model for run in (step, reward)]
    folders = [Path(model.path) for model in models if isinstance(model, HFConfig) and model.path is not None]
    digests = {read_tokenizer(folder).digest for folder in folders if (folder / NAME).is_file()}
    if len(digests) > 1:
        message = f"reads other tokens than this model writes: the tokenizers in {folders[0]} and {folders[1]} differ"
        raise ConfigError(Problem("ppo.reward_model", message, "Name one tokenizer in both, as posttrain.tokenizer."))


def _same_shapes(step: PhaseStep, maker: PhaseStep) -> None:
    mine, theirs = _shapes(step.config), _shapes(maker.config)
    if mine is None or theirs is None:
        return
    differing = [
        f"{name}: {theirs.get(name, 'absent')} there, {mine.get(name, 'absent')} here"
        for name in {**theirs, **mine}
        if theirs.get(name) != mine.get(name)
    ]
    if differing:
        more = f"; and {len(differing) - _SHOWN_DIFFERENCES} more" if len(differing) > _SHOWN_DIFFERENCES else ""
        shown = "; ".join(differing[:_SHOWN_DIFFERENCES])
        message = f"is not that of step {maker.number}, {maker.phase}, which it begins with: {shown}{more}"
        raise ConfigError(Problem("model", message, "Describe the same model in both."))


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]] | None:
    """Return the names and shapes of the parameters; None for a model that cannot be built on `meta`."""
    model = config.model
    if not isinstance(model, GptConfig | LlamaConfig | MoeConfig | HFConfig):
        return None
    with torch.device("meta"):
        built = build_model(model, trust_code=config.trust_code)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def _is_inside(path: str, folder: Path) -> bool:
    return Path(path).absolute().is_relative_to(folder.absolute())


class _Collecting:
    """A context that adds an error raised in it to a list of problems, so that the other checks run too."""

    def __init__(self, problems: list[Problem], where: str, key: str = "posttrain") -> None:
        self._problems, self._where, self._key = problems, where, key
        self.failed = False

    def __enter__(self) -> _Collecting:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, PlaitError):
            return False
        self.failed = True
        if isinstance(error, ConfigError):
            self._problems += [replace(problem, origin=self._where) for problem in error.problems]
        else:
            path = "model" if isinstance(error, ModelError) else self._key
            self._problems.append(Problem(path, in_one_line(error), "", self._where))
        return True


# The result of each step: its state, its time and a few metrics.


_SHOWN_METRICS = {
    "reward": ("accuracy", "margin"),
    "dpo": ("accuracy", "margin"),
    "ppo": ("reward", "accuracy"),
    "grpo": ("reward", "accuracy"),
}
"""Metrics of the validation data that the table of results shows, in its order."""


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """A row of the table of results."""

    step: PhaseStep
    state: PhaseState
    figures: str
    seconds: float

    @property
    def time(self) -> str:
        """The time it took, over all attempts, as text."""
        return format_clock(self.seconds)


def outcome_of(step: PhaseStep) -> PhaseOutcome:
    """Return the result of a step so far."""
    path = events_path(step.folder, 0)
    story = history(read_events([path]) if path.is_file() else [])
    seconds = sum(segment.seconds for segment in story.segments)
    return PhaseOutcome(step, state_of(step), ", ".join(_figures(step.phase, story)), seconds)


def draw_report(step: PhaseStep) -> Path | None:
    """Write `report.html`, the page with the curves of a step, into its folder; return its path.

    None if the step has recorded no events.
    """
    records = sorted(step.folder.glob("events-rank*.jsonl"), key=lambda path: path != events_path(step.folder, 0))
    if not records:
        return None
    page = step.folder / "report.html"
    write_report(records, page, f"{step.number}. {step.phase}", folder=step.folder)
    return page


def _figures(phase: str, story: History) -> Iterator[str]:
    for key in _SHOWN_METRICS.get(phase, ()):
        if points := story.values(key, EventKind.VALIDATE) or story.values(key):
            first, last = points[0][1], points[-1][1]
            yield f"{key} {last:.3f}" if len(points) == 1 else f"{key} {first:.3f} → {last:.3f}"
    if phase in ("ppo", "grpo") and (kl := story.values("kl")):
        yield f"kl {kl[-1][1]:.3f}"
    if phase not in _SHOWN_METRICS and (losses := story.values("loss", EventKind.VALIDATE) or story.values("loss")):
        loss = losses[-1][1]
        yield f"loss {loss:.3f}, perplexity {math.exp(min(loss, 700.0)):.4g}"


def next_commands(steps: Sequence[PhaseStep]) -> list[str]:
    """Return commands to try next: chat with the last model, and compare its answers with the model it started from.

    Empty if no language model is complete.
    """
    written = [step for step in steps if step.phase in WRITES and state_of(step) is PhaseState.COMPLETE]
    if not written:
        return []
    last = written[-1]
    commands = [f"plait chat --path {last.folder}"]
    before = next((step for step in last.after if step.phase in WRITES), None)
    if before is not None:
        page = last.folder.parent / "side_by_side.html"
        commands.append(f"plait generate {last.folder} --against {before.folder} --held-out 20 --html {page}")
    return commands


# Runs the steps that are not complete, one after another.


Start = Callable[[list[str]], int]
"""Runs a command of `plait` on every rank, from its arguments without `plait`, and returns its exit code."""


def command_of(step: PhaseStep, description: Path) -> list[str]:
    """Return the command that starts a step, or resumes it if it has a checkpoint."""
    resume = [] if newest(step.folder) is None else ["checkpoint.resume=auto"]
    return [step.phase, str(description), *resume]


def run_steps(steps: Sequence[PhaseStep], start: Start, log: Callable[[str], None]) -> int:
    """Run the chosen steps that are not complete; return 0, or the exit code of the first that fails or is stopped.

    Whether a step is complete follows from the report that its own run wrote, so a pipeline that was killed can be
    started again, and continues with the step that it was at.
    """
    for step in steps:
        name = f"step {step.number} of {len(steps)}, {step.phase}"
        state = state_of(step)
        if not step.chosen:
            continue
        if state is PhaseState.COMPLETE:
            log(f"{name}: complete, in {step.folder}")
            continue
        log(f"{name}: {'resumes' if newest(step.folder) is not None else 'starts'} in {step.folder}")
        code = start(command_of(step, write_description(step)))
        if (page := draw_report(step)) is not None:
            log(f"{name}: {page}")
        if code in STOPPED_CODES:
            log(f"{name}: stopped; its results are in {step.folder}")
            return code
        if code != 0:
            log(f"{name}: failed with exit code {code}; its results are in {step.folder}")
            return code
        if state_of(step) is not PhaseState.COMPLETE:
            reason = ending(step.folder) or "no reason was recorded"
            log(f"{name}: ended early ({reason})")
            return 1
    return 0
