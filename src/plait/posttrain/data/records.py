"""From rows of a file to examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.config.posttrain import FileData, Gsm8kData

ROLES = ("system", "user", "assistant")
ANSWER_KEYS = ("response", "answer", "completion")
"""Where an answer is looked for, when nothing is said; the better one of a pair may be it too."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one side says."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with an answer, perhaps with a worse answer to compare it with."""

    messages: tuple[Message, ...]
    rejected: str | None
    where: str
    """Where it came from, for messages."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What comes before the last answer."""
        return self.messages[:-1]

    @property
    def prompt_text(self) -> str:
        """All of the prompt in one piece; the same text means the same prompt."""
        return "\x1e".join(f"{message.role}\x1f{message.content}" for message in self.prompt)


class IncompleteError(Exception):
    """A row that lacks a field, or has one of the wrong type."""


class EmptyError(Exception):
    """A row that has nothing to learn: no answer, or no prompt."""


def examples_in(
    row: Mapping[str, Any], config: FileData | Gsm8kData, where: str, *, pairs: bool, answered: bool = True
) -> Iterator[Example]:
    """The examples of one row: one, or of graded solutions as many as there are pairs.

    Where they need not be `answered`, a row may be a prompt alone; its answer is then an empty text.
    """
    if isinstance(config, Gsm8kData):
        yield from _of_gsm8k(row, where, pairs=pairs)
        return
    messages = _conversation(row, config, _answer_keys(config, pairs=pairs), answered=answered)
    rejected = _answer(row, config.rejected_key) if pairs else None
    found = Example(messages, rejected, where)
    _refuse_empty(found, answered=answered)
    yield found


def _answer_keys(config: FileData, *, pairs: bool) -> tuple[str, ...]:
    """Where the answer may be, the likeliest first; of pairs the better one."""
    named = (config.chosen_key if pairs else None) or config.answer_key
    if named is not None:
        return (named,)
    chosen = config.chosen_key or "chosen"
    return (chosen, *ANSWER_KEYS) if pairs else (*ANSWER_KEYS, chosen)


def _conversation(
    row: Mapping[str, Any], config: FileData, keys: Sequence[str], *, answered: bool
) -> tuple[Message, ...]:
    if config.messages_key in row and row[config.messages_key] is not None:
        messages = _messages(row[config.messages_key], config.messages_key)
        if messages and messages[-1].role != "assistant" and not answered:
            return (*messages, Message("assistant", ""))
        if not messages or messages[-1].role != "assistant":
            raise IncompleteError(f"{config.messages_key!r} does not end with a message of the assistant")
        return messages
    prompt = _field(row, config.prompt_key)
    before = (Message("user", prompt),) if isinstance(prompt, str) else _messages(prompt, config.prompt_key)
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None and not answered:
        return (*before, Message("assistant", ""))
    if key is None:
        raise IncompleteError(f"no answer under {' or '.join(map(repr, keys))}; it has {_keys(row)}")
    return (*before, Message("assistant", _answer(row, key)))


def _answer(row: Mapping[str, Any], key: str) -> str:
    """A text, or the last of a list of messages."""
    value = _field(row, key)
    if isinstance(value, str):
        return value
    messages = _messages(value, key)
    if not messages:
        raise IncompleteError(f"{key!r} is an empty list")
    return messages[-1].content


def _of_gsm8k(row: Mapping[str, Any], where: str, *, pairs: bool) -> Iterator[Example]:
    question = Message("user", _text(row, "question"))
    graded = [value for value in row.values() if isinstance(value, Mapping) and "is_correct" in value]
    if not graded:
        if pairs:
            raise IncompleteError(f"no graded solutions, which pairs are made of; it has {_keys(row)}")
        found = Example((question, Message("assistant", _text(row, "answer"))), None, where)
        _refuse_empty(found)
        yield found
        return
    right = [_text(value, "solution") for value in graded if value["is_correct"] is True]
    wrong = [_text(value, "solution") for value in graded if value["is_correct"] is False]
    for good in right:
        for bad in wrong if pairs else [None]:
            found = Example((question, Message("assistant", good)), bad, where)
            _refuse_empty(found)
            yield found


def _refuse_empty(example: Example, *, answered: bool = True) -> None:
    answers = [m.content for m in example.messages if m.role == "assistant"] if answered else []
    answers += [] if example.rejected is None else [example.rejected]
    if not all(answer.strip() for answer in answers):
        raise EmptyError("an answer is empty")
    if not any(message.content.strip() for message in example.prompt):
        raise EmptyError("the prompt is empty")
    if example.rejected is not None and example.rejected == example.messages[-1].content:
        raise EmptyError("the chosen and the rejected answer are the same")


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise IncompleteError(f"{key!r} is of type {type(value).__name__}, expected text or a list of messages")
    found = []
    for entry in value:
        if not isinstance(entry, Mapping):
            raise IncompleteError(f"{key!r} holds a {type(entry).__name__}, expected messages with role and content")
        role, content = _text(entry, "role"), _text(entry, "content")
        if role not in ROLES:
            raise IncompleteError(f"{key!r} has the role {role!r}; there are {', '.join(ROLES)}")
        found.append(Message(role, content))
    return tuple(found)


def _field(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise IncompleteError(f"no {key!r}; it has {_keys(row)}")
    return row[key]


def _text(row: Mapping[str, Any], key: str) -> str:
    value = _field(row, key)
    if not isinstance(value, str):
        raise IncompleteError(f"{key!r} is of type {type(value).__name__}, expected text")
    return value


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "nothing"
