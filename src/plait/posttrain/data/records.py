"""From rows of a file to examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.config.posttrain import FileData, Gsm8kData

ROLES = ("system", "user", "assistant")
_ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant"}
ANSWER_KEYS = ("response", "answer", "completion", "output")
"""Where an answer is looked for, when nothing is said; the better one of a pair may be it too."""
MESSAGES_KEYS = ("messages", "conversations")
"""The same of conversations."""


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
    if row.get("tools"):
        raise IncompleteError("'tools' are described, which no template here writes down")
    messages = _conversation(row, config, _answer_keys(config, pairs=pairs), answered=answered)
    rejected = None
    if pairs:
        worse = _answered(row, config.rejected_key, messages[:-1])
        if worse[:-1] != messages[:-1]:
            raise IncompleteError(f"{config.rejected_key!r} answers another conversation than the better answer")
        rejected = worse[-1].content
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
    named = MESSAGES_KEYS if config.messages_key is None else (config.messages_key,)
    if (whole := _first(row, named)) is not None:
        messages = _messages(row[whole], whole)
        if messages and messages[-1].role != "assistant" and not answered:
            return (*messages, Message("assistant", ""))
        return _ending_with_an_answer(messages, whole)
    key = _first(row, keys)
    implied = key is not None and not isinstance(row[key], str)  # the prompt may be the beginning of the answer's list
    before = _prompt(row, config, implied=implied)
    if key is not None:
        return _answered(row, key, before)
    if not answered:
        return (*before, Message("assistant", ""))
    raise IncompleteError(f"no answer under {' or '.join(map(repr, keys))}; it has {_keys(row)}")


def _prompt(row: Mapping[str, Any], config: FileData, *, implied: bool) -> tuple[Message, ...]:
    """What comes before the answer: text, messages, or an instruction with its input as Alpaca has it."""
    if config.prompt_key is None and row.get("prompt") is None:
        if row.get("instruction") is not None:
            parts = [_text(row, key) for key in ("instruction", "input") if row.get(key)]
            return (Message("user", "\n\n".join(parts)),)
        if implied:
            return ()
    key = config.prompt_key or "prompt"
    prompt = _field(row, key)
    return (Message("user", prompt),) if isinstance(prompt, str) else _messages(prompt, key)


def _answered(row: Mapping[str, Any], key: str, before: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with its answer: a text, the turns that follow, or the whole conversation once more."""
    value = _field(row, key)
    if isinstance(value, str):
        return (*before, Message("assistant", value))
    messages = _ending_with_an_answer(_messages(value, key), key)
    if messages[0].role == "assistant":
        return (*before, *messages)
    told = 1 if messages[0].role == "system" and before[:1] != messages[:1] else 0
    if messages[told : told + len(before)] != before:
        raise IncompleteError(f"{key!r} is a conversation that does not begin with the prompt")
    return messages


def _ending_with_an_answer(messages: tuple[Message, ...], key: str) -> tuple[Message, ...]:
    if not messages or messages[-1].role != "assistant":
        raise IncompleteError(f"{key!r} does not end with a message of the assistant")
    return messages


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
        found.append(_message(entry, key))
    return tuple(found)


def _message(entry: Mapping[str, Any], key: str) -> Message:
    """One turn, with the words of OpenAI or of ShareGPT."""
    if entry.get("tool_calls") or entry.get("function_call"):
        raise IncompleteError(f"{key!r} has calls of tools, which no template here writes down")
    if entry.get("role") is None and entry.get("from") is not None:
        role, content = _text(entry, "from"), _text(entry, "value")
        role = _ROLES_OF_SHAREGPT.get(role, role)
    else:
        role, content = _text(entry, "role"), _content(entry)
    if role not in ROLES:
        raise IncompleteError(f"{key!r} has the role {role!r}; there are {', '.join(ROLES)}")
    return Message(role, content)


def _content(entry: Mapping[str, Any]) -> str:
    """A text, or a list of parts that are texts."""
    parts = _field(entry, "content")
    if not isinstance(parts, Sequence) or isinstance(parts, str | bytes):
        return _text(entry, "content")
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise IncompleteError(f"'content' has a part of type {kind!r}; only text can be read")
    return "".join(_text(part, "text") for part in parts)


def _first(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if row.get(key) is not None), None)


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
