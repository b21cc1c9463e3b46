"""Read, split and tokenize the data of a phase, as the section `posttrain` describes them.

A *row* is an entry of a data file; an *example* is a conversation that was read from a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from plait.checkpoint import read_description
from plait.config import (
    ONLINE,
    ExampleData,
    HFConfig,
    PosttrainConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    TaskData,
    no_examples,
)
from plait.errors import ConfigError, DataError, Problem
from plait.generate import CONTEXT_KEYS
from plait.posttrain.data.datasets import AnswerRows, ExampleRow, PadAnswers, PadPairs, PairRows
from plait.posttrain.data.records import (
    EmptyError,
    Example,
    IncompleteError,
    UnlearnedError,
    examples_in,
    read_rows,
    split,
)
from plait.posttrain.data.tasks import Prompt, make_task
from plait.posttrain.data.template import (
    NAME,
    ChatTokenizer,
    ChatTokens,
    Template,
    UnwritableError,
    character_tokenizer,
    make_template,
    read_tokenizer,
    trained_tokenizer,
)

_TRAINED_SIZE = 4096
"""The vocabulary size of a tokenizer that is trained for a model without a declared vocabulary size."""


@dataclass
class RowReport:
    """Counts of the rows: how many are used, why others were left out, and what is unusual about them."""

    rows: int = 0
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    """Remarks about rows that are used."""
    first: dict[str, str] = field(default_factory=dict)
    """For each reason and remark, the place of the first row."""
    unread: Counter[str] = field(default_factory=Counter)
    """Keys of rows that are not used, with the number of rows that have them."""
    prompts: Counter[int] = field(default_factory=Counter)
    """How often each prompt occurs, by the hash of its text."""
    examples: Counter[int] = field(default_factory=Counter)
    """How often each example occurs, by the hash of its texts."""

    def leave_out(self, reason: str, where: str, *, refuse: bool, key: str, detail: str = "") -> None:
        """Count an example that is left out; or, with `refuse`, raise a `DataError` that names the setting `key`."""
        said = f"{reason} ({detail})" if detail else reason
        if refuse:
            raise DataError(f"{where}: {said}; set posttrain.{key}: skip to leave such examples out")
        self.left_out[reason] += 1
        self.first.setdefault(reason, f"{where}{f': {detail}' if detail else ''}")

    def count(self, what: str, where: str) -> None:
        """Count a remark about an example that is used."""
        self.noted[what] += 1
        self.first.setdefault(what, where)

    def meet(self, example: Example) -> None:
        """Count an example, whether or not it will be used."""
        self.prompts[hash(example.prompt_text)] += 1
        answers = tuple(message.content for message in example.messages if message.role == "assistant")
        self.examples[hash((example.prompt_text, answers, example.rejected))] += 1
        self.unread.update(example.unread)

    @property
    def is_unusual(self) -> bool:
        """Whether the report should be a warning: examples were left out or remarked on, or keys of turns not used."""
        return bool(self.left_out or self.noted or any("[]" in key for key in self.unread))

    def __str__(self) -> str:
        lost, twice = sum(self.left_out.values()), sum(count - 1 for count in self.examples.values())
        lines = [f"{self.rows} rows: {len(self.prompts)} distinct prompts, {self.kept} examples kept"]
        lines += [f"{twice} of them repeat another one"] if twice else []
        lines += [f"{lost} left out: {self._said(self.left_out)}"] if lost else []
        lines += [self._said(self.noted)] if self.noted else []
        keys = ", ".join(f"{key!r} in {count} rows" for key, count in self.unread.items())
        return "; ".join([*lines, *([f"keys not used: {keys}"] if keys else [])])

    def _said(self, counts: Counter[str]) -> str:
        return "; ".join(f"{count} {why}, first {self.first[why]}" for why, count in sorted(counts.items()))


@dataclass(frozen=True)
class PhaseData:
    """The data sets of a phase, with their tokenizer and template."""

    train: Any
    val: Any
    """None without validation data."""
    collate: Any
    tokenizer: ChatTokenizer
    template: Template
    folder: Path | None
    """The file or folder from which the tokenizer was read; None if it was trained or generated."""
    report: RowReport
    examples: tuple[Sequence[Example], Sequence[Example]]
    """The examples for training and for validation, including those left out later, for example for their length."""


def prepare_data(config: RunConfig) -> PhaseData:
    """Read, split and tokenize the examples of `config.phase`; return its data.

    Raise a `DataError` if no example is left to train on.
    """
    section, phase = config.posttrain or PosttrainConfig(), config.phase
    assert phase is not None
    if not section.data:
        raise ConfigError(no_examples())
    report = RowReport()
    pairs, online = phase in ("reward", "dpo"), phase in ONLINE
    wanted = {"pairs": pairs, "answered": not online}
    examples = list(_examples(section.data, section, report, **wanted))
    if not examples:
        raise DataError(f"no example is left of posttrain.data: {report}")
    held = 0.0 if section.val_data else section.val_fraction
    subsets = split(examples, phase, data_split=section.data_split, val_fraction=held)
    if section.val_data:
        trained = {example.prompt_text for example in subsets[0]}
        subsets = subsets[0], list(_examples(section.val_data, section, report, **wanted))
        for example in subsets[1]:
            if example.prompt_text in trained:
                report.count("prompts of posttrain.val_data are trained on", example.where)
    folder = _folder(config, section)
    tokenizer = _tokenizer(config, section, folder, examples)
    _check_vocabulary(config, tokenizer)
    _check_same_tokens(config, section, tokenizer, folder)
    template = make_template(section.template, tokenizer, folder, trust_code=config.trust_code)
    limit = longest(config)
    _report_texts((*subsets[0], *subsets[1]), tokenizer, report)
    made: list[Any]
    collate: Any = None
    if online:
        max_new = (config.rollout or RolloutConfig()).max_new_tokens
        made = [list(_prompts(subset, template, limit, max_new, section, report)) for subset in subsets]
    elif pairs:
        judged = phase == "reward"
        made = [PairRows(list(_pairs(subset, template, limit, section, report, judged=judged))) for subset in subsets]
        collate = PadPairs(tokenizer.end, rewards=judged)
    else:
        packing = (config.sft or SftConfig()).packing
        rows = [list(_rows(subset, template, limit, section, report)) for subset in subsets]
        made = [AnswerRows(subset, seq_len=limit, packing=packing, pad=tokenizer.end) for subset in rows]
        collate = PadAnswers(tokenizer.end)
    train, val = made
    if len(train) == 0:
        raise DataError(f"no example is left to train on: {report}")
    return PhaseData(train, val if len(val) else None, collate, tokenizer, template, folder, report, subsets)


def prepare_rows(sources: Sequence[ExampleData], config: RunConfig, data: PhaseData) -> list[ExampleRow]:
    """Return tokenized examples of other sources, with the tokenizer and template of `data`.

    Examples that cannot be used are counted in `data.report`.
    """
    section = config.posttrain or PosttrainConfig()
    examples = list(_examples(sources, section, data.report, pairs=False, answered=True))
    return list(_rows(examples, data.template, longest(config), section, data.report))


def _examples(
    sources: Sequence[ExampleData], section: PosttrainConfig, report: RowReport, *, pairs: bool, answered: bool
) -> Iterator[Example]:
    for source in sources:
        for example in _read(source, section, report, pairs=pairs, answered=answered):
            report.meet(example)
            yield example


def _read(
    source: ExampleData, section: PosttrainConfig, report: RowReport, *, pairs: bool, answered: bool
) -> Iterator[Example]:
    if isinstance(source, TaskData):
        report.rows += source.samples
        yield from make_task(source).examples(source.samples, source.wrongs if pairs else 1)
        return
    for where, row in read_rows(source.path):
        report.rows += 1
        try:
            if isinstance(row, str):
                raise IncompleteError(row)
            yield from examples_in(row, source, where, pairs=pairs, answered=answered)
        except IncompleteError as error:
            refuse = section.incomplete == "error"
            report.leave_out("incomplete", where, refuse=refuse, key="incomplete", detail=str(error))
        except EmptyError as error:
            report.leave_out("empty", where, refuse=section.empty == "error", key="empty", detail=str(error))
        except UnlearnedError as error:
            report.leave_out("not to be learned", where, refuse=False, key="", detail=str(error))


Written = TypeVar("Written")


def _written(
    examples: Sequence[Example], write: Callable[[Example], Written], section: PosttrainConfig, report: RowReport
) -> Iterator[tuple[Example, Written]]:
    """Yield examples with their tokens; one that the template cannot write is left out as incomplete."""
    for example in examples:
        try:
            yield example, write(example)
        except UnwritableError as error:
            refuse = section.incomplete == "error"
            report.leave_out("incomplete", example.where, refuse=refuse, key="incomplete", detail=str(error))


def _rows(
    examples: Sequence[Example], template: Template, limit: int, section: PosttrainConfig, report: RowReport
) -> Iterator[ExampleRow]:
    for example, tokens in _written(examples, lambda e: template.conversation(e.messages), section, report):
        row = _fitting(tokens, template, example, limit, section, report)
        if row is None:
            continue
        if not row.has_targets:
            refuse, detail = section.empty == "error", "no token of its answers is learned"
            report.leave_out("empty", example.where, refuse=refuse, key="empty", detail=detail)
            continue
        report.kept += 1
        yield row


def _prompts(
    examples: Sequence[Example],
    template: Template,
    limit: int,
    max_new: int,
    section: PosttrainConfig,
    report: RowReport,
) -> Iterator[Prompt]:
    for example, tokens in _written(examples, lambda e: template.prompt(e.prompt), section, report):
        if len(tokens) >= limit:
            detail = f"{len(tokens)} tokens, and at least one more must fit into {limit}"
            reason, refuse = "with a prompt longer than max_len", section.too_long == "error"
            report.leave_out(reason, example.where, refuse=refuse, key="too_long", detail=detail)
            continue
        if len(tokens) + max_new > limit:
            report.count("prompts leave less room than rollout.max_new_tokens within max_len", example.where)
        report.kept += 1
        yield Prompt(tuple(tokens), example.prompt, example.messages[-1].content)


def _pairs(
    examples: Sequence[Example],
    template: Template,
    limit: int,
    section: PosttrainConfig,
    report: RowReport,
    *,
    judged: bool,
) -> Iterator[tuple[ExampleRow, ExampleRow]]:
    def write(example: Example) -> list[ChatTokens]:
        return [template.conversation(messages) for messages in example.pair]

    make = ExampleRow.judged if judged else ExampleRow
    for example, both in _written(examples, write, section, report):
        longer = max(both, key=lambda tokens: len(tokens.ids))
        if _fitting(longer, template, example, limit, section, report, whole=judged) is None:
            continue
        chosen, rejected = (make(tokens) for tokens in both)
        detail = None
        if both[0].ids == both[1].ids:
            detail = "the chosen and the rejected answer are the same tokens"
        elif not judged and not (chosen.has_targets and rejected.has_targets):
            detail = "no token of an answer is learned"
        if detail is not None:
            report.leave_out("empty", example.where, refuse=section.empty == "error", key="empty", detail=detail)
            continue
        report.kept += 1
        yield chosen, rejected


def _report_texts(examples: Sequence[Example], tokenizer: ChatTokenizer, report: RowReport) -> None:
    """Count examples with the text of a control token, or with characters that the tokenizer does not know."""
    controls = re.compile("|".join(map(re.escape, tokenizer.controls)) or "(?!)")
    for example in examples:
        texts = [*(message.content for message in example.messages), example.rejected or ""]
        if (match := next(filter(None, map(controls.search, texts)), None)) is not None:
            report.count("with the text of a control token, encoded as plain text", f"{example.where}: {match[0]!r}")
        if (unknown := next(filter(None, map(tokenizer.unknown_in, texts)), None)) is not None:
            report.count("with characters that the tokenizer does not know", f"{example.where}: {unknown!r}")


def _fitting(
    tokens: ChatTokens,
    template: Template,
    example: Example,
    limit: int,
    section: PosttrainConfig,
    report: RowReport,
    *,
    whole: bool = False,
) -> ExampleRow | None:
    length = len(tokens.ids) if whole else len(tokens.ids) - 1  # the last token is only a label
    if length <= limit:
        return ExampleRow(tokens)
    prompt = len(template.prompt(example.prompt))
    reason = "with a prompt longer than max_len" if prompt >= limit else "longer than max_len"
    detail = f"{length} tokens, at most {limit}"
    report.leave_out(reason, example.where, refuse=section.too_long == "error", key="too_long", detail=detail)
    return None


def longest(config: RunConfig) -> int:
    """Return the greatest number of tokens of a prompt with its answer: `posttrain.max_len`, or `model.seq_len`.

    Raise a `ConfigError` if there is neither, or if it exceeds the model's context.
    """
    section = config.posttrain or PosttrainConfig()
    described: Any = config.model
    known = getattr(described, "seq_len", None)
    if section.max_len is None and known is None:
        raise ConfigError(Problem("posttrain.max_len", "there is none, and the model names no seq_len", "Write one."))
    if section.max_len is not None and known is not None and section.max_len > known:
        message = f"{section.max_len} is longer than `model.seq_len`, {known}"
        raise ConfigError(Problem("posttrain.max_len", message, "Make it shorter, or the model's sequences longer."))
    if section.max_len is not None and isinstance(described, HFConfig):
        declared = next((length for key in CONTEXT_KEYS if (length := _description(described).get(key))), None)
        if declared is not None and section.max_len > declared:
            message = f"{section.max_len} is longer than the model is made for, {declared} (its config.json)"
            raise ConfigError(Problem("posttrain.max_len", message, f"Write {declared} or less."))
    limit = section.max_len or known
    assert limit is not None
    return int(limit)


def _folder(config: RunConfig, section: PosttrainConfig) -> Path | None:
    """Return the file or folder of the tokenizer; None if one has to be trained or generated."""
    if section.tokenizer is not None:
        return Path(section.tokenizer)
    if isinstance(config.model, HFConfig) and config.model.path is not None:
        return Path(config.model.path)
    start = None if section.start is None else Path(section.start).absolute()
    near = () if start is None else (start, *start.parents[:2])
    return next((folder for folder in near if (folder / NAME).is_file()), None)


def _tokenizer(
    config: RunConfig, section: PosttrainConfig, folder: Path | None, examples: Sequence[Example]
) -> ChatTokenizer:
    if folder is not None:
        return read_tokenizer(folder)
    template = section.template
    marks = (template.start, template.end) if template.kind == "marked" else ()
    if all(isinstance(source, TaskData) for source in section.data):
        alphabet = "".join(make_task(source).alphabet for source in section.data if isinstance(source, TaskData))
        roles = f"{template.system}{template.user}{template.assistant}\n" if marks else ""
        return character_tokenizer(alphabet + roles, marks)
    texts = (message.content for example in examples for message in example.messages)
    return trained_tokenizer(texts, _vocabulary(config) or _TRAINED_SIZE, marks)


def _check_same_tokens(
    config: RunConfig, section: PosttrainConfig, tokenizer: ChatTokenizer, folder: Path | None
) -> None:
    """Raise a `DataError` if token ids differ from those with which the initial weights were trained."""
    tokenizers = {"posttrain.start": None if section.start is None else tokenizer_beside(section.start)}
    if isinstance(config.model, HFConfig) and config.model.path is not None:
        tokenizer_file = Path(config.model.path) / NAME
        tokenizers["model.path"] = tokenizer_file if tokenizer_file.is_file() else None
    for key, file in tokenizers.items():
        if file is not None and (folder is None or file.parent.resolve() != folder.resolve()):
            check_same_tokens(key, file, tokenizer)


def tokenizer_beside(source: str | Path) -> Path | None:
    """Return the `tokenizer.json` of a run, of one of its checkpoints, or of a Hugging Face folder; or None."""
    path = Path(source).absolute()
    return next((folder / NAME for folder in (path, *path.parents[:2]) if (folder / NAME).is_file()), None)


def check_same_tokens(key: str, file: Path, tokenizer: ChatTokenizer) -> None:
    """Raise a `DataError` if a token of `file`, the tokenizer of the weights `key`, has another id here."""
    known = tokenizer.vocabulary
    for token, number in sorted(read_tokenizer(file).vocabulary.items(), key=itemgetter(1)):
        if known.get(token) != number:
            there = f"the number {known[token]}" if token in known else "no number"
            raise DataError(
                f"{key}: the weights know the token {token!r} as {number} ({file}), and it has {there} in "
                "the tokenizer of this run; name theirs as posttrain.tokenizer, or one that only adds tokens to it"
            )


def _description(model: HFConfig) -> dict[str, Any]:
    """Return the model's `config.json` with the overrides of `model.config`; without a local folder, only these."""
    folder = None if model.path is None else Path(model.path)
    inner = (read_description(folder) if folder is not None and folder.is_dir() else None) or {}
    return {**inner, **inner.get("text_config", {}), **(model.config or {})}


def _vocabulary(config: RunConfig) -> int | None:
    described: Any = config.model
    inner = _description(described) if isinstance(described, HFConfig) else {}
    size = getattr(described, "vocab_size", inner.get("vocab_size"))
    return size if isinstance(size, int) else None


def _check_vocabulary(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    known = _vocabulary(config)
    if known is not None and tokenizer.vocab_size > known:
        if isinstance(config.model, HFConfig) and config.model.path is not None:
            raise DataError(
                f"posttrain.tokenizer: the tokenizer has {tokenizer.vocab_size} tokens, and the model in "
                f"{config.model.path} has embeddings for {known}; name the tokenizer that the model was trained with"
            )
        message = f"{known}, but the tokenizer has {tokenizer.vocab_size} tokens"
        key = "model.config.vocab_size" if isinstance(config.model, HFConfig) else "model.vocab_size"
        raise ConfigError(Problem(key, message, f"Write `{key}: {tokenizer.vocab_size}`."))
