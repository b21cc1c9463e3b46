"""From the section `posttrain` to the data of a phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.config.model import HFConfig
from plait.config.online import ONLINE
from plait.config.posttrain import ExampleData, PosttrainConfig, SftConfig, TaskData
from plait.config.run import RunConfig
from plait.errors import ConfigError, DataError, Problem
from plait.posttrain.data.datasets import AnswerRows, PadAnswers, PadPairs, PairRows, Row
from plait.posttrain.data.prompts import Prompt
from plait.posttrain.data.records import EmptyError, Example, IncompleteError, examples_in
from plait.posttrain.data.rows import read_rows
from plait.posttrain.data.split import split
from plait.posttrain.data.tasks import make_task
from plait.posttrain.data.template import Template, Tokens, make_template
from plait.posttrain.data.tokenizer import (
    NAME,
    ChatTokenizer,
    character_tokenizer,
    read_tokenizer,
    trained_tokenizer,
)

_TRAINED_SIZE = 4096
"""Of a tokenizer that is trained here for a model that does not say how many tokens it knows."""


@dataclass
class Account:
    """How many examples there were, and why some were left out."""

    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """For each reason, the first place where it was met."""

    def leave_out(self, reason: str, where: str, *, refuse: bool, key: str, detail: str = "") -> None:
        """Count one, or refuse it."""
        said = f"{reason} ({detail})" if detail else reason
        if refuse:
            raise DataError(f"{where}: {said}; set posttrain.{key}: skip to leave such examples out")
        self.left_out[reason] += 1
        self.first.setdefault(reason, f"{where}{f': {detail}' if detail else ''}")

    def __str__(self) -> str:
        lost = sum(self.left_out.values())
        reasons = [f"{count} {why}, first {self.first[why]}" for why, count in sorted(self.left_out.items())]
        return f"{self.kept} examples" + (f", {lost} left out: {'; '.join(reasons)}" if lost else "")


@dataclass(frozen=True)
class PhaseData:
    """What a phase trains and validates on, and how its tokens are to be read."""

    train: Any
    val: Any
    """None where nothing is kept for validation."""
    collate: Any
    tokenizer: ChatTokenizer
    template: Template
    account: Account
    examples: tuple[Sequence[Example], Sequence[Example]]
    """Those for training and for validation, before any was left out for its length."""


def prepare_data(config: RunConfig) -> PhaseData:
    """Read, split and tokenize the examples of `config.phase`."""
    section, phase = config.posttrain or PosttrainConfig(), config.phase
    assert phase is not None
    account = Account()
    pairs, online = phase in ("reward", "dpo"), phase in ONLINE
    wanted = {"pairs": pairs, "answered": not online}
    examples = list(_examples(section.data, section, account, **wanted))
    if not examples:
        raise DataError(f"no example is left of posttrain.data: {account}")
    held = 0.0 if section.val_data else section.val_fraction
    parts = split(examples, phase, data_split=section.data_split, val_fraction=held)
    if section.val_data:
        parts = parts[0], list(_examples(section.val_data, section, account, **wanted))
    folder = _folder(config, section)
    tokenizer = _tokenizer(config, section, folder, examples)
    _check_vocabulary(config, tokenizer)
    template = make_template(section.template, tokenizer, folder, trust_code=config.trust_code)
    limit = longest(config)
    made: list[Any]
    collate: Any = None
    if online:
        made = [list(_prompts(part, template, limit, section, account)) for part in parts]
    elif pairs:
        judged = phase == "reward"
        made = [PairRows(list(_pairs(part, template, limit, section, account, judged=judged))) for part in parts]
        collate = PadPairs(tokenizer.end, rewards=judged)
    else:
        packing = (config.sft or SftConfig()).packing
        rows = [list(_rows(part, template, limit, section, account)) for part in parts]
        made = [AnswerRows(part, seq_len=limit, packing=packing, pad=tokenizer.end) for part in rows]
        collate = PadAnswers(tokenizer.end)
    train, val = made
    if len(train) == 0:
        raise DataError(f"no example is left to train on: {account}")
    return PhaseData(train, val if len(val) else None, collate, tokenizer, template, account, parts)


def prepare_rows(sources: Sequence[ExampleData], config: RunConfig, data: PhaseData) -> list[Row]:
    """Answers of further examples as rows, in the tokens of a phase's data; what cannot be used counts there."""
    section = config.posttrain or PosttrainConfig()
    examples = list(_examples(sources, section, data.account, pairs=False, answered=True))
    return list(_rows(examples, data.template, longest(config), section, data.account))


def _examples(
    sources: Sequence[ExampleData], section: PosttrainConfig, account: Account, *, pairs: bool, answered: bool
) -> Iterator[Example]:
    for source in sources:
        if isinstance(source, TaskData):
            yield from make_task(source).examples(source.samples, source.wrongs if pairs else 1)
            continue
        for where, row in read_rows(source.path):
            try:
                if isinstance(row, str):
                    raise IncompleteError(row)
                yield from examples_in(row, source, where, pairs=pairs, answered=answered)
            except IncompleteError as error:
                refuse = section.incomplete == "error"
                account.leave_out("incomplete", where, refuse=refuse, key="incomplete", detail=str(error))
            except EmptyError as error:
                account.leave_out("empty", where, refuse=section.empty == "error", key="empty", detail=str(error))


def _rows(
    examples: Sequence[Example], template: Template, limit: int, section: PosttrainConfig, account: Account
) -> Iterator[Row]:
    for example in examples:
        row = _fitting(template.conversation(example.messages), template, example, limit, section, account)
        if row is not None:
            account.kept += 1
            yield row


def _prompts(
    examples: Sequence[Example], template: Template, limit: int, section: PosttrainConfig, account: Account
) -> Iterator[Prompt]:
    seen: set[str] = set()
    for example in examples:
        tokens = template.prompt(example.prompt)
        if len(tokens) >= limit:
            detail = f"{len(tokens)} tokens, and at least one more must fit into {limit}"
            reason, refuse = "with a prompt longer than max_len", section.too_long == "error"
            account.leave_out(reason, example.where, refuse=refuse, key="too_long", detail=detail)
        elif example.prompt_text not in seen:  # one that has several answers is asked once
            seen.add(example.prompt_text)
            account.kept += 1
            yield Prompt(tuple(tokens), example.prompt, example.messages[-1].content)


def _pairs(
    examples: Sequence[Example],
    template: Template,
    limit: int,
    section: PosttrainConfig,
    account: Account,
    *,
    judged: bool,
) -> Iterator[tuple[Row, Row]]:
    for example in examples:
        assert example.rejected is not None
        worse = (*example.prompt, type(example.messages[-1])("assistant", example.rejected))
        both = [template.conversation(messages) for messages in (example.messages, worse)]
        longer = max(both, key=lambda tokens: len(tokens.ids))
        if _fitting(longer, template, example, limit, section, account, whole=judged) is not None:
            account.kept += 1
            # Of earlier answers nothing is to be preferred: only the last ones differ.
            prompt = len(template.prompt(example.prompt))
            make = Row.judged if judged else Row
            chosen, rejected = (make(_only_last(tokens, prompt)) for tokens in both)
            yield chosen, rejected


def _only_last(tokens: Tokens, prompt: int) -> Tokens:
    return Tokens(tokens.ids, [learned and at >= prompt for at, learned in enumerate(tokens.learned)])


def _fitting(
    tokens: Tokens,
    template: Template,
    example: Example,
    limit: int,
    section: PosttrainConfig,
    account: Account,
    *,
    whole: bool = False,
) -> Row | None:
    length = len(tokens.ids) if whole else len(tokens.ids) - 1  # the last one is only learned
    if length <= limit:
        return Row(tokens)
    prompt = len(template.prompt(example.prompt))
    reason = "with a prompt longer than max_len" if prompt >= limit else "longer than max_len"
    detail = f"{length} tokens, at most {limit}"
    account.leave_out(reason, example.where, refuse=section.too_long == "error", key="too_long", detail=detail)
    return None


def longest(config: RunConfig) -> int:
    """Tokens of a prompt with its answer at most."""
    section = config.posttrain or PosttrainConfig()
    described: Any = config.model
    known = getattr(described, "seq_len", None)
    if section.max_len is None and known is None:
        raise ConfigError(Problem("posttrain.max_len", "there is none, and the model names no seq_len", "Write one."))
    if section.max_len is not None and known is not None and section.max_len > known:
        message = f"{section.max_len} is longer than `model.seq_len`, {known}"
        raise ConfigError(Problem("posttrain.max_len", message, "Make it shorter, or the model's sequences longer."))
    found = section.max_len or known
    assert found is not None
    return int(found)


def _folder(config: RunConfig, section: PosttrainConfig) -> Path | None:
    """Where a tokenizer lies, where it is found without being made."""
    if section.tokenizer is not None:
        return Path(section.tokenizer)
    if isinstance(config.model, HFConfig) and config.model.path is not None:
        return Path(config.model.path)
    start = None if section.start is None else Path(section.start).absolute()
    near = () if start is None else (start, *start.parents[:2])
    return next((place for place in near if (place / NAME).is_file()), None)


def _tokenizer(
    config: RunConfig, section: PosttrainConfig, folder: Path | None, examples: Sequence[Example]
) -> ChatTokenizer:
    if folder is not None:
        return read_tokenizer(folder)
    words = section.template
    marks = (words.start, words.end) if words.kind == "marked" else ()
    if all(isinstance(source, TaskData) for source in section.data):
        alphabet = "".join(make_task(source).alphabet for source in section.data if isinstance(source, TaskData))
        roles = f"{words.system}{words.user}{words.assistant}\n" if marks else ""
        return character_tokenizer(alphabet + roles, marks)
    texts = (message.content for example in examples for message in example.messages)
    return trained_tokenizer(texts, _vocabulary(config) or _TRAINED_SIZE, marks)


def _vocabulary(config: RunConfig) -> int | None:
    described: Any = config.model
    size = getattr(described, "vocab_size", (getattr(described, "config", None) or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _check_vocabulary(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    known = _vocabulary(config)
    if known is not None and tokenizer.vocab_size > known:
        message = f"{known}, but the tokenizer has {tokenizer.vocab_size} tokens"
        raise ConfigError(Problem("model.vocab_size", message, f"Write `model.vocab_size: {tokenizer.vocab_size}`."))
