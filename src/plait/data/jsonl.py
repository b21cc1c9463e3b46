"""One JSON object a line: whole texts, or prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.config import as_utf8, parse_json
from plait.data.text import Document, find_files, hash_files, open_file
from plait.errors import DataError


@dataclass(frozen=True, slots=True)
class JsonlSource:
    """JSON lines. Either `text_key`, or `prompt_key` and `completion_key`.

    A prompt is given, not learned: only the completion is. The two are put together as they are, so a
    separator, if there is to be one, belongs to one of them. Blank lines are skipped.
    """

    path: str
    text_key: str | None = None
    prompt_key: str | None = None
    completion_key: str | None = None

    def __post_init__(self) -> None:
        pair = (self.prompt_key, self.completion_key)
        if (None in pair) if self.text_key is None else (pair != (None, None)):
            raise DataError(
                f"{self.path}: text_key {self.text_key!r}, prompt_key {self.prompt_key!r}, completion_key "
                f"{self.completion_key!r}: give either text_key, or prompt_key and completion_key"
            )

    @property
    def has_prompts(self) -> bool:
        """Whether a part of each document is given and not learned."""
        return self.prompt_key is not None

    def fingerprint(self) -> str:
        """A hash of everything that the documents are made of."""
        keys = json.dumps([self.text_key, self.prompt_key, self.completion_key])
        return f"{keys} {hash_files(find_files(self.path))}"

    def documents(self) -> Iterator[Document]:
        """The documents; a line that cannot be used is an error that names it."""
        for path in find_files(self.path):
            with open_file(path) as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield self._document(_parse(line, where), where)

    def _document(self, record: dict[str, Any], where: str) -> Document:
        if self.text_key is not None:
            return "", _string(record, self.text_key, where)
        assert self.prompt_key is not None
        assert self.completion_key is not None
        return _string(record, self.prompt_key, where), _string(record, self.completion_key, where)


def read_object(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong with it."""
    try:
        record = parse_json(line)
    except UnicodeDecodeError:
        return f"not UTF-8 text: {as_utf8(line)}"
    except ValueError as error:
        return f"not JSON: {error}"
    return record if isinstance(record, dict) else f"expected an object, found a {type(record).__name__}"


def _parse(line: bytes, where: str) -> dict[str, Any]:
    record = read_object(line)
    if isinstance(record, str):
        raise DataError(f"{where}: {record}")
    return record


def _string(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise DataError(f"{where}: no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is of type {type(value).__name__}, expected a string")
    return value
