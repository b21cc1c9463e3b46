"""Read rows of data files, and convert them to examples.

[Note: no key of a row is passed over]
Each key of a row is handled in one of three ways: it is read; or it asks for something unsupported, and the row is an
error; or it is counted as not used, and the run logs that when it starts (`Example.unread`). A value None means that
the key is absent, because Parquet and `datasets` fill missing keys with None.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.config import FileData, Gsm8kData, parse_json, split_shares
from plait.data import find_files, open_file, read_object
from plait.errors import DataError, MissingExtraError

ROLES = ("system", "user", "assistant")
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Role names of ShareGPT, and OpenAI's newer name for `system`."""
ANSWER_KEYS = ("response", "answer", "completion", "output")
"""Default keys of the answer; also of the chosen answer of a pair, after `chosen`."""
MESSAGES_KEYS = ("messages", "conversations")
"""Default keys of a conversation."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SWITCHES = ("train", "training", "loss")
"""Keys of axolotl and ms-swift for whether a turn is trained on; OpenAI's key is `weight`."""
_REFUSED_OF_ROWS = {
    "tools": "are described, which no template here writes down",
    "functions": "are described, which no template here writes down",
    "images": "belong to the row, and only text can be read",
    "image": "belongs to the row, and only text can be read",
    "videos": "belong to the row, and only text can be read",
    "audios": "belong to the row, and only text can be read",
    "chat_template_kwargs": "are given, and the chat template is used with its defaults",
}
"""Keys that change the meaning of a row and are not supported, each with the rest of the error message."""
_REFUSED_OF_TURNS = {
    "tool_calls": "has calls of tools, which no template here writes down",
    "function_call": "has calls of tools, which no template here writes down",
    "tool_call_id": "has results of tools, which no template here writes down",
    "images": "has images, and only text can be read",
    "audio": "has sound, and only text can be read",
    "refusal": "has a refusal beside its content, which no template here writes down",
    "train_detail": "has train_detail, and a turn is learned whole or not at all",
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    reasoning: str | None = None
    """The assistant's reasoning before the answer: `reasoning_content`."""
    learned: bool = field(default=True, compare=False)
    """False for an answer that the data exclude from training."""


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with an answer; in a pair, also a rejected answer."""

    messages: tuple[ChatMessage, ...]
    rejected: str | None
    where: str
    """File and line, for messages."""
    rejected_reasoning: str | None = None
    unread: tuple[str, ...] = ()
    """Keys of the row that are not used; those of its turns as `messages[].key`."""

    @property
    def prompt(self) -> tuple[ChatMessage, ...]:
        """The messages before the last answer."""
        return self.messages[:-1]

    @property
    def prompt_text(self) -> str:
        """The prompt as one text; equal texts mean equal prompts."""
        return "\x1e".join(f"{message.role}\x1f{message.content}" for message in self.prompt)

    @property
    def pair(self) -> tuple[tuple[ChatMessage, ...], tuple[ChatMessage, ...]]:
        """The conversation with the chosen and with the rejected answer; earlier answers are not trained on."""
        assert self.rejected is not None
        before = tuple(replace(message, learned=False) for message in self.prompt)
        worse = ChatMessage("assistant", self.rejected, self.rejected_reasoning)
        return (*before, self.messages[-1]), (*before, worse)


class IncompleteError(Exception):
    """A row that lacks a field, has one of the wrong type, or asks for something that is not supported."""


class EmptyError(Exception):
    """A row that cannot be trained on: its answer or its prompt is empty, or both answers are equal."""


class UnlearnedError(Exception):
    """A row that the data exclude from training (weight 0)."""


class _Fields:
    """A row or a turn (an entry of its conversation); records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()
        self._below: dict[str, None] = {}
        """Unread keys of turns, as `messages[].key`; the values are not used."""

    def has(self, key: str) -> bool:
        """Whether a key has a value other than None."""
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:
        """Return a value, or None; mark the key as read."""
        self._read.add(key)
        return self._values.get(key)

    def take(self, key: str) -> Any:
        """Return a value; raise an `IncompleteError` if there is none."""
        if not self.has(key):
            raise IncompleteError(f"no {key!r}; it has {self.names}")
        return self.get(key)

    def text(self, key: str) -> str:
        """Return a text; raise an `IncompleteError` if there is none."""
        value = self.take(key)
        if not isinstance(value, str):
            raise IncompleteError(f"{key!r} is of type {type(value).__name__}, expected text")
        return value

    def first(self, keys: Sequence[str]) -> str | None:
        """Return the first of these keys that has a value; None if none has."""
        return next((key for key in keys if self.has(key)), None)

    def refuse(self, refused: Mapping[str, str], name: str | None = None) -> None:
        """Raise an `IncompleteError` if an unsupported key has a value; `name`: the key of a turn's conversation."""
        for key, why in refused.items():
            if self.get(key):
                raise IncompleteError(f"{(name or key)!r} {why}")

    def below(self, key: str, turn: _Fields) -> None:
        """Add the unread keys of a turn of the conversation `key` to those of the row."""
        self._below.update(dict.fromkeys(f"{key}[].{name}" for name in turn.unread))

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys with a value that were not read."""
        return (*(key for key in self._values if key not in self._read and self.has(key)), *self._below)

    @property
    def names(self) -> str:
        """All keys as text, for messages."""
        return ", ".join(map(repr, self._values)) or "nothing"


def examples_in(
    row: Mapping[str, Any], config: FileData | Gsm8kData, where: str, *, pairs: bool, answered: bool = True
) -> Iterator[Example]:
    """Yield the examples of one row: one, or several if a row of GSM8K has graded solutions.

    With `pairs` they have a rejected answer. Unless `answered`, a row may be only a prompt; its answer is then empty.
    Raise an `IncompleteError`, `EmptyError` or `UnlearnedError` for a row that cannot be used.
    """
    if isinstance(config, Gsm8kData):
        yield from _of_gsm8k(row, where, pairs=pairs, answered=answered)
        return
    fields = _Fields(row)
    fields.refuse(_REFUSED_OF_ROWS)
    if not _learned(fields, ("train",)):
        raise UnlearnedError("the row has weight 0")
    messages = _conversation(fields, config, _answer_keys(config, pairs=pairs), answered=answered)
    rejected = None
    if pairs:
        if fields.get("margin") is not None:
            raise IncompleteError("'margin' is of this row alone; reward.margin sets one for all pairs")
        rejected = _answered(fields, config.rejected_key, messages[:-1])
        if rejected[:-1] != messages[:-1]:
            raise IncompleteError(
                f"{config.rejected_key!r} answers another conversation (of {len(rejected) - 1} messages) than the "
                f"better answer (of {len(messages) - 1})"
            )
        if not (messages[-1].learned and rejected[-1].learned):
            raise IncompleteError("an answer of the pair has weight 0, and a pair is compared whole or left out")
    elif answered and isinstance(row.get("label"), bool):
        raise IncompleteError("'label' says whether the answer is good, and unpaired preferences are not read")
    worse = None if rejected is None else rejected[-1]
    text, thoughts = (None, None) if worse is None else (worse.content, worse.reasoning)
    example = Example(messages, text, where, thoughts, fields.unread)
    _refuse_empty(example, answered=answered)
    if answered and not pairs and not any(m.learned for m in messages if m.role == "assistant"):
        raise UnlearnedError("every answer of the row has weight 0")
    yield example


def _learned(fields: _Fields, switches: Sequence[str]) -> bool:
    """Return whether a row or a turn is trained on, by its own keys."""
    learned = True
    for key in ("weight", *switches):
        value = fields.get(key)
        if value is None:
            continue
        if value not in (0, 1) or isinstance(value, str):
            raise IncompleteError(f"{key!r} is {value!r}; write 1 or true (learned), or 0 or false (not learned)")
        learned = learned and bool(value)
    return learned


def _answer_keys(config: FileData, *, pairs: bool) -> tuple[str, ...]:
    """Return the keys that may hold the answer (of pairs the chosen one), in the order in which they are tried."""
    named = (config.chosen_key if pairs else None) or config.answer_key
    if named is not None:
        return (named,)
    chosen = config.chosen_key or "chosen"
    return (chosen, *ANSWER_KEYS) if pairs else (*ANSWER_KEYS, chosen)


def _conversation(fields: _Fields, config: FileData, keys: Sequence[str], *, answered: bool) -> tuple[ChatMessage, ...]:
    named = MESSAGES_KEYS if config.messages_key is None else (config.messages_key,)
    if (whole := fields.first(named)) is not None:
        messages = _with_system(fields, _messages(fields, whole))
        if messages and messages[-1].role != "assistant" and not answered:
            return (*messages, ChatMessage("assistant", ""))
        return _ending_with_an_answer(messages, whole)
    key = fields.first(keys)
    implied = key is not None and not isinstance(fields.get(key), str)  # the list may begin with the prompt
    before = _with_system(fields, _prompt(fields, config, implied=implied))
    if key is not None:
        return _answered(fields, key, before)
    if not answered:
        return (*before, ChatMessage("assistant", ""))
    raise IncompleteError(f"no answer under {' or '.join(map(repr, keys))}; it has {fields.names}")


def _prompt(fields: _Fields, config: FileData, *, implied: bool) -> tuple[ChatMessage, ...]:
    """Return the prompt as messages, from a text, from messages, or from Alpaca's `instruction` and `input`.

    `implied`: the answer is a conversation, which may contain the prompt.
    """
    if config.prompt_key is None and not fields.has("prompt"):
        if fields.has("instruction"):
            texts = [fields.text("instruction"), *([fields.text("input")] if fields.get("input") else [])]
            return (*_history(fields), ChatMessage("user", "\n\n".join(texts)))
        if implied:
            return ()
    key = config.prompt_key or "prompt"
    prompt = fields.take(key)
    return (ChatMessage("user", prompt),) if isinstance(prompt, str) else _messages(fields, key)


def _history(fields: _Fields) -> Iterator[ChatMessage]:
    """Yield earlier questions and answers, from Alpaca's `history`."""
    for entry in fields.get("history") or ():
        if not isinstance(entry, Sequence) or len(entry) != 2 or not all(isinstance(item, str) for item in entry):
            raise IncompleteError(f"'history' holds {entry!r}, expected pairs of a question and its answer")
        yield ChatMessage("user", entry[0])
        yield ChatMessage("assistant", entry[1])


def _with_system(fields: _Fields, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return the messages after the row's own `system`, if it has one and they do not begin with it."""
    if not fields.get("system"):
        return messages
    system = ChatMessage("system", fields.text("system"))
    if messages[:1] == (system,):
        return messages
    if any(message.role == "system" for message in messages):
        raise IncompleteError("'system' says something else than the message of the system in the conversation")
    return (system, *messages)


def _answered(fields: _Fields, key: str, before: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return the messages of the prompt (`before`) with the answer under `key`.

    The answer is a text, a list of the messages after the prompt, or a list that repeats the prompt too.
    """
    value = fields.take(key)
    if isinstance(value, str):
        return (*before, ChatMessage("assistant", value))
    messages = _ending_with_an_answer(_messages(fields, key), key)
    if messages[0].role == "assistant":
        return (*before, *messages)
    start = 1 if messages[0].role == "system" and before[:1] != messages[:1] else 0
    if messages[start : start + len(before)] != before:
        raise IncompleteError(f"{key!r} is a conversation that does not begin with the prompt")
    return messages


def _ending_with_an_answer(messages: tuple[ChatMessage, ...], key: str) -> tuple[ChatMessage, ...]:
    if not messages or messages[-1].role != "assistant":
        raise IncompleteError(f"{key!r} does not end with a message of the assistant")
    return messages


def _of_gsm8k(row: Mapping[str, Any], where: str, *, pairs: bool, answered: bool) -> Iterator[Example]:
    fields = _Fields(row)
    question = ChatMessage("user", fields.text("question"))
    graded = [_Fields(value) for value in row.values() if isinstance(value, Mapping) and "is_correct" in value]
    if not graded:
        if pairs:
            raise IncompleteError(f"no graded solutions, which pairs are made of; it has {fields.names}")
        example = Example((question, ChatMessage("assistant", fields.text("answer"))), None, where)
        _refuse_empty(example)
        yield example
        return
    right = [value.text("solution") for value in graded if value.get("is_correct") is True]
    wrong = [value.text("solution") for value in graded if value.get("is_correct") is False]
    for good in right if answered else right[:1]:  # without answers, one example per prompt
        for bad in wrong if pairs else [None]:
            example = Example((question, ChatMessage("assistant", good)), bad, where)
            _refuse_empty(example)
            yield example


def _refuse_empty(example: Example, *, answered: bool = True) -> None:
    answers = [m.content for m in example.messages if m.role == "assistant" and m.learned] if answered else []
    answers += [] if example.rejected is None else [example.rejected]
    if not all(answer.strip() for answer in answers):
        raise EmptyError("an answer is empty")
    if not any(message.content.strip() for message in example.prompt):
        raise EmptyError("the prompt is empty")
    chosen = example.messages[-1]
    if (example.rejected, example.rejected_reasoning) == (chosen.content, chosen.reasoning):
        raise EmptyError("the chosen and the rejected answer are the same")


def _messages(fields: _Fields, key: str) -> tuple[ChatMessage, ...]:
    value = fields.take(key)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise IncompleteError(f"{key!r} is of type {type(value).__name__}, expected text or a list of messages")
    messages = []
    for entry in value:
        if not isinstance(entry, Mapping):
            raise IncompleteError(f"{key!r} holds a {type(entry).__name__}, expected messages with role and content")
        turn = _Fields(entry)
        messages.append(_message(turn, key))
        fields.below(key, turn)
    return tuple(messages)


def _message(turn: _Fields, key: str) -> ChatMessage:
    """Return the message of a turn, in the format of OpenAI or of ShareGPT."""
    turn.refuse(_REFUSED_OF_TURNS, key)
    if not turn.has("role") and turn.has("from"):
        role, content = turn.text("from"), turn.text("value")
    else:
        role, content = turn.text("role"), _content(turn)
    role = _OTHER_ROLES.get(role, role)
    if role not in ROLES:
        raise IncompleteError(f"{key!r} has the role {role!r}; there are {', '.join(ROLES)}")
    said = turn.first(("weight", *_SWITCHES))
    learned = _learned(turn, _SWITCHES)
    if role != "assistant" and said is not None and learned:
        raise IncompleteError(f"{key!r} wants a turn of the {role} learned ({said!r}); only the assistant's are")
    thoughts = turn.first(_REASONING_KEYS)
    reasoning = None if thoughts is None else turn.text(thoughts)
    if reasoning and role != "assistant":
        raise IncompleteError(f"{key!r} has {thoughts!r} on a turn of the {role}; only the assistant's may have it")
    return ChatMessage(role, content, reasoning or None, learned)


def _content(turn: _Fields) -> str:
    """Return the text of a turn's content, which is a text or a list of text parts."""
    content = turn.take("content")
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return turn.text("content")
    for item in content:
        item_type = item.get("type") if isinstance(item, Mapping) else type(item).__name__
        if item_type != "text":
            raise IncompleteError(f"'content' has a part of type {item_type!r}; only text can be read")
    return "".join(_Fields(item).text("text") for item in content)


# Rows of JSON files, Parquet files, and folders of `datasets.save_to_disk`.


_UNREADABLE = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".csv", ".tsv", ".arrow")
"""Suffixes of files that may have rows but cannot be read; they are an error, so that no rows are lost silently."""
_SPLIT = re.compile(r"(train|test|valid|val|dev|eval)(?:ation|ing|uation)?(?![a-z])", re.IGNORECASE)

Row = tuple[str, Mapping[str, Any] | str]
"""The file and line of a row, and the row; or, as text, what is wrong with it."""


def read_rows(path: str) -> Iterator[Row]:
    """Yield every row of a file or folder, in order; for a line that is not a JSON object, the reason as text."""
    source = Path(path)
    if not source.exists():
        raise DataError(f"{path} does not exist")
    if source.is_dir() and any((source / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _saved_dataset(source)
        return
    files = find_files(path) if source.is_dir() else [source]
    known = [file for file in files if file.suffix in (".jsonl", ".json", ".ndjson", ".parquet")]
    if not known:
        raise DataError(f"{path}: no .jsonl and no .parquet file, and no folder of datasets.save_to_disk")
    if other := next((file for file in files if file.suffix in _UNREADABLE), None):
        raise DataError(
            f"{path} holds {other.name} too, which cannot be read here; unpack or convert it, or move it out"
        )
    _refuse_mixed_splits(path, [file.name for file in known])
    for file in known:
        yield from _parquet(file) if file.suffix == ".parquet" else _lines(file)


def _lines(path: Path) -> Iterator[Row]:
    with open_file(path) as file:
        if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _list(path)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            yield where, read_object(line)


def _list(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that is one JSON list."""
    try:
        entries = parse_json(path.read_bytes(), allow_surrogates=True)  # `read_object` checks each entry
    except ValueError as error:  # also for text that is not UTF-8
        raise DataError(f"{path} begins as a list, and is not JSON: {error}") from error
    for number, entry in enumerate(entries, start=1):
        yield f"{path}, entry {number}", read_object(json.dumps(entry).encode())


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("pyarrow", f"reading {path.name}", "parquet") from error
    file = parquet.ParquetFile
    rows = _read_by_library(path, lambda: (row for batch in file(path).iter_batches() for row in batch.to_pylist()))
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _read_by_library(path: Path, read: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield what a library reads from a file; turn its exceptions into a `DataError` that names the file."""
    try:
        yield from read()
    except Exception as error:  # Arrow has a dozen exception classes
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); get it again") from error


def _saved_dataset(path: Path) -> Iterator[Row]:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("datasets", f"reading the folder {path.name}", "datasets") from error
    (loaded,) = _read_by_library(path, lambda: [datasets.load_from_disk(str(path))])
    splits = dict(loaded) if hasattr(loaded, "items") else {"": loaded}
    if len(splits) > 1:
        raise DataError(
            f"{path} has the splits {', '.join(splits)}: name one of them, such as {path / next(iter(splits))}"
        )
    for name, rows in splits.items():
        for number, row in enumerate(_read_by_library(path, rows.__iter__), start=1):
            yield f"{path}{f'/{name}' if name else ''}, row {number}", row


def _refuse_mixed_splits(path: str, names: list[str]) -> None:
    """Raise a `DataError` if the files belong to several splits: test data must not be trained on by accident."""
    splits = {match[1].lower(): name for name in names if (match := _SPLIT.match(name))}
    if len(splits) > 1:
        raise DataError(f"{path} holds several splits, such as {' and '.join(splits.values())}: name the files of one")


# Splitting the examples between phases (`data_split`), and those of a phase into training and validation.
#
# Examples with the same prompt stay together, so that no prompt is used both for training and for validation, nor by
# two phases. Prompts are ordered by a hash of their text, so the split depends on neither the seed nor the order of
# files.


SHARE_OF_PHASE = {"sft": 0, "reward": 1, "dpo": 1, "ppo": 2, "grpo": 2}
"""Which of the three parts of `data_split` (SFT, preferences, prompts) a phase uses."""


def split(
    examples: Sequence[Example], phase: str, *, data_split: tuple[int, ...] | str | None, val_fraction: float
) -> tuple[list[Example], list[Example]]:
    """Return the examples of a phase for training and for validation; raise a `DataError` if its part is empty."""
    prompts = sorted({example.prompt_text for example in examples}, key=_hash)
    shares, share = split_shares(data_split), SHARE_OF_PHASE[phase]
    if sum(shares):
        bounds = [round(len(prompts) * sum(shares[:at]) / sum(shares)) for at in range(4)]
        prompts = prompts[bounds[share] : bounds[share + 1]]
        if not prompts:
            raise DataError(
                f"posttrain.data_split {data_split!r} leaves nothing for {phase}: share {share + 1} of three is empty"
            )
    held = min(round(len(prompts) * val_fraction), len(prompts) - 1) if len(prompts) > 1 else 0
    if val_fraction > 0 and held == 0 and len(prompts) > 1:
        held = 1
    kept, validating = set(prompts[held:]), set(prompts[:held])
    train = [example for example in examples if example.prompt_text in kept]
    return train, [example for example in examples if example.prompt_text in validating]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
