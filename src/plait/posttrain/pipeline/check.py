"""From what is asked for to steps that can run: everything is looked at before the first process starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from plait.config import (
    ONLINE,
    ExampleData,
    GptConfig,
    HFConfig,
    LlamaConfig,
    MoeConfig,
    PosttrainConfig,
    RunConfig,
    TaskData,
    check,
    check_complete,
    missing_paths,
    missing_starts,
    parse,
    resolve_batch,
    resolve_layout,
    starts_of,
)
from plait.errors import ConfigError, DataError, ModelError, PlaitError, Problem, in_one_line
from plait.models import build_model
from plait.posttrain.build import make_model
from plait.posttrain.data.prepare import longest
from plait.posttrain.data.records import EmptyError, IncompleteError, UnlearnedError, examples_in
from plait.posttrain.data.rows import read_rows
from plait.posttrain.data.tasks import make_task
from plait.posttrain.data.tokenizer import NAME, read_tokenizer
from plait.posttrain.pipeline.chain import Step, read_by, taken_over, unusable
from plait.posttrain.pipeline.describe import Described, Wanted
from plait.posttrain.pipeline.folder import State, newest, problems_with, state_of

_SHOWN = 3


def make_steps(wanted: Wanted, *, ranks: int, local_ranks: int) -> list[Step]:
    """Every step, complete and checked. Raises `ConfigError` with all problems of all steps."""
    steps: list[Step] = []
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
        problems += [replace(each, origin=where) for each in (*_names(step), *_before(step))]
    problems += _shared_folders(steps)
    if len(steps) == len(wanted.steps) and not problems:
        problems += _of_models(steps)
        problems += [each for step in steps if step.chosen for each in problems_with(step)]
    if problems:
        raise ConfigError(problems)
    return steps


def _described(number: int, described: Described, wanted: Wanted, earlier: Sequence[Step]) -> Step:
    phase = [] if described.phase == "train" else [f"phase={described.phase}"]
    settings = [*described.settings, *phase]
    parsed = parse(described.source, settings)
    if wanted.moved or parsed.origins.get("work_dir", "default") == "default":
        settings.append(f"work_dir={wanted.output_dir}/{described.phase}")
    settings += taken_over(described.phase, parsed, earlier)
    final, home = parse(described.source, settings), parsed.config.work_dir
    return Step(number, described.phase, final, read_by(final.config, earlier), home, described.chosen)


def _complete(step: Step) -> None:
    parsed = step.parsed
    if step.phase == "train":
        check_complete(parsed, require_length=True)
        return
    check(parsed.config, has_val=True, require_length=True, origins=parsed.origins)
    if parsed.config.model is None:
        raise ConfigError(Problem("model", "there is none", "Add a section `model` with a `type`."))


def _spread(ranks: int, local_ranks: int) -> Callable[[Step], None]:
    def look(step: Step) -> None:
        strategy = step.config.strategy
        layout = resolve_layout(strategy, size=ranks, local_size=local_ranks)
        resolve_batch(step.config.batch, layout.data_parallel, micro_batches=strategy.pipeline.micro_batches)

    return look


def _names(step: Step) -> Iterator[Problem]:
    """Files and folders that are named and not there; those that an earlier step will make do not count."""
    if step.phase != "train":  # of which more is looked at already
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
    made, named = [before.folder for before in step.after], starts_of(step.config)
    for problem in missing_starts(step.config):
        if not any(_inside(named[problem.path], folder) for folder in made):
            yield problem


def _look_into(source: ExampleData, section: PosttrainConfig, phase: str) -> None:
    """Whether a source has what it promises, as far as its first row tells."""
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
    except (EmptyError, UnlearnedError):  # counted when the step runs
        pass


def _before(step: Step) -> Iterator[Problem]:
    """What the steps that it begins with leave behind must be enough, and be there where they do not run."""
    for before in step.after:
        if (reason := unusable(before, step.config)) is not None:
            yield Problem("posttrain.start", reason)
        if step.chosen and not before.chosen and newest(before.folder) is None:
            message = f"it begins with step {before.number}, {before.phase}, which is not asked for"
            remedy = f"There is no result of it in {str(before.folder)!r}; add {before.number} to `--step`."
            yield Problem("posttrain.start", message, remedy)


def _shared_folders(steps: Sequence[Step]) -> Iterator[Problem]:
    seen: dict[Path, Step] = {}
    for step in steps:
        first = seen.setdefault(step.folder.absolute(), step)
        if first is not step:
            message = f"{str(step.folder)!r} is the folder of step {first.number}, {first.phase}, too"
            yield Problem("work_dir", message, "Give each its own.", f"step {step.number}, {step.phase}")


def _of_models(steps: Sequence[Step]) -> Iterator[Problem]:
    """Weights that a step begins with must be of its model: those that are there, and those that will be."""
    for step in steps:
        if not step.chosen or state_of(step) is State.COMPLETE:
            continue
        where = f"step {step.number}, {step.phase}"
        problems: list[Problem] = []
        start = step.config.posttrain.start if step.config.posttrain else None
        maker = next((each for each in step.after if start is not None and _inside(start, each.folder)), None)
        with _Collecting(problems, where):
            if maker is not None and newest(maker.folder) is None:
                _same_shapes(step, maker)
            elif step.phase != "train" and all(newest(each.folder) is not None for each in step.after):
                with torch.device("meta"):
                    make_model(step.config)
            _judge_fits(step)
        yield from problems


def _judge_fits(step: Step) -> None:
    """A reward model of an earlier step must read what the policy will write."""
    judge = next((each for each in step.after if each.phase == "reward"), None)
    if step.phase != "ppo" or judge is None:
        return
    known, wanted = getattr(judge.config.model, "seq_len", None), longest(step.config)
    if isinstance(known, int) and known < wanted:
        message = f"sees {known} tokens, and answers here come with up to {wanted}"
        raise ConfigError(Problem("ppo.reward_model", message, f"Write `posttrain.max_len: {known}` here."))
    words = [(each.config.posttrain or PosttrainConfig()).template for each in (step, judge)]
    if words[0] != words[1] and not any(each.kind == "auto" for each in words):  # what that is shows when they run
        message = f"is trained on conversations that step {judge.number}, reward, writes in another template"
        raise ConfigError(Problem("posttrain.template", message, "Write the same one for both."))
    models = [each.config.model for each in (step, judge)]
    folders = [Path(model.path) for model in models if isinstance(model, HFConfig) and model.path is not None]
    digests = {read_tokenizer(folder).digest for folder in folders if (folder / NAME).is_file()}
    if len(digests) > 1:
        message = f"reads other tokens than this model writes: the tokenizers in {folders[0]} and {folders[1]} differ"
        raise ConfigError(Problem("ppo.reward_model", message, "Name one tokenizer in both, as posttrain.tokenizer."))


def _same_shapes(step: Step, maker: Step) -> None:
    mine, theirs = _shapes(step.config), _shapes(maker.config)
    if mine is None or theirs is None:
        return
    differing = [
        f"{name}: {theirs.get(name, 'absent')} there, {mine.get(name, 'absent')} here"
        for name in {**theirs, **mine}
        if theirs.get(name) != mine.get(name)
    ]
    if differing:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        shown = "; ".join(differing[:_SHOWN])
        message = f"is not that of step {maker.number}, {maker.phase}, which it begins with: {shown}{more}"
        raise ConfigError(Problem("model", message, "Describe the same model in both."))


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the parameters; None for models that cannot be built without values."""
    model = config.model
    if not isinstance(model, GptConfig | LlamaConfig | MoeConfig | HFConfig):
        return None
    with torch.device("meta"):
        built = build_model(model, trust_code=config.trust_code)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def _inside(path: str, folder: Path) -> bool:
    return Path(path).absolute().is_relative_to(folder.absolute())


class _Collecting:
    """Keeps the problems of a step, so that the next one is looked at too."""

    def __init__(self, problems: list[Problem], where: str, key: str = "posttrain") -> None:
        self._problems, self._where, self._key = problems, where, key
        self.failed = False

    def __enter__(self) -> _Collecting:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, PlaitError):
            return False
        self.failed = True
        if isinstance(error, ConfigError):
            self._problems += [replace(each, origin=self._where) for each in error.problems]
        else:
            path = "model" if isinstance(error, ModelError) else self._key
            self._problems.append(Problem(path, in_one_line(error), "", self._where))
        return True
