"""Text datasets: documents from files, and their tokens in a cache."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

from plait.atomic_write import staging_path
from plait.config import (
    DenoisingObjective,
    JsonlData,
    MaskedObjective,
    SpanCorruptionObjective,
    TextData,
    as_utf8,
    parse_json,
)
from plait.data.tokenizer import END, SENTINEL, TextTokenizer, load_tokenizer, train_tokenizer
from plait.data.tokens import TokenWriter
from plait.errors import DataError

STDLIB = "stdlib"
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are skipped: packages, tests, and generated tables."""

Document = tuple[str, str]
"""The prompt, which is not trained on, and the text that is; plain text has an empty prompt."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """Text files. Each is one document, or several with `<|endoftext|>` between them.

    `path` is a file, a folder (every file below it that is not hidden), a glob, or `stdlib`: the sources
    of the standard library of the Python that runs this, without tests and tables. `limit_mb` keeps the first
    files, in the order of their names, that together are no larger.
    """

    path: str
    limit_mb: float | None = None

    has_prompts = False

    def files(self) -> list[Path]:
        """Return the files, always in the same order."""
        files = _stdlib() if self.path == STDLIB else find_files(self.path)
        return files if self.limit_mb is None else self._first(files, self.limit_mb)

    def fingerprint(self) -> str:
        """Return a hash of the files' contents, which determine the documents."""
        return hash_files(self.files())

    def documents(self) -> Iterator[Document]:
        """Yield the documents, except empty ones."""
        for path in self.files():
            for text in self._read(path).split(END):
                if text.strip():
                    yield "", text

    def _first(self, files: list[Path], limit_mb: float) -> list[Path]:
        kept, left = [], limit_mb * 1e6
        for path in files:
            left -= path.stat().st_size
            if left < 0:
                break
            kept.append(path)
        if not kept:
            raise DataError(f"limit_mb {limit_mb} is less than the first file, {files[0]}: make it larger")
        return kept

    def _read(self, path: Path) -> str:
        try:
            if self.path == STDLIB:
                with tokenize.open(path) as source:
                    return source.read()
            return path.read_text(encoding="utf-8-sig")  # without a byte order mark
        except SyntaxError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}; give another path") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            remedy = f"{as_utf8(error.object)}, or name the text files with a glob"
            raise DataError(f"{path} is not UTF-8 text (byte {error.start}): {remedy}") from error


def find_files(path: str) -> list[Path]:
    """Return the files of a file name, a folder or a glob, sorted."""
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        below = (p for p in root.rglob("*") if not any(name.startswith(".") for name in p.relative_to(root).parts))
        files = sorted(p for p in below if p.is_file())
    else:
        files = sorted(p for p in map(Path, glob.glob(str(root), recursive=True)) if p.is_file())
    if not files:
        what = "has no files in it" if root.is_dir() else "does not exist, and matches nothing as a glob"
        raise DataError(f"{path} {what}; give a file, a folder, a glob")
    return files


def hash_files(files: list[Path]) -> str:
    """Return a hash of the contents of some files."""
    whole = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a data file for reading in this context; an `OSError` in it becomes a `DataError` that names the file."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT]  # `os.walk` does not enter the removed ones
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"this Python has no sources of its standard library in {root}; give another path")
    return sorted(files)


# One JSON object per line: texts, or prompts with completions.


@dataclass(frozen=True, slots=True)
class JsonlSource:
    """JSON lines. Either `text_key`, or `prompt_key` and `completion_key`.

    Only the completion is learned, not the prompt. The two are concatenated as they are, so a separator has
    to be part of one of them. Blank lines are skipped.
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
        """Whether each document has a prompt, which is not learned."""
        return self.prompt_key is not None

    def fingerprint(self) -> str:
        """Return a hash of the keys and of the files' contents, which determine the documents."""
        keys = json.dumps([self.text_key, self.prompt_key, self.completion_key])
        return f"{keys} {hash_files(find_files(self.path))}"

    def documents(self) -> Iterator[Document]:
        """Yield the documents; an invalid line is an error that names it."""
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
    """Return the JSON object of a line, or what is wrong with it."""
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


# The cache: folders that are written once, and then only read, by any number of processes.


def cached(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `root/name`; if it does not exist, `build` writes it.

    It is built under a temporary name and renamed, so it is always complete. Several processes may build it at the
    same time: the first to finish renames its folder, and the others use that one, whose content is equal because the
    name is a hash of what determines it. Raise a `DataError` if the folder cannot be written.
    """
    entry = root / name
    try:
        if entry.is_dir():
            return entry
        with staging_path(entry) as staging:
            staging.mkdir()
            build(staging)
            staging.rename(entry)
    except OSError as error:
        if isinstance(error, PermissionError) or not entry.is_dir():
            reason = error.strerror or str(error)
            raise DataError(
                f"tokens cannot be cached in {root}: {reason}; name another folder as `data.cache`"
            ) from error
    return entry


# Tokenizing text sources into token files, which are cached.


RECIPE = 1
"""The version of how a corpus is made. It is part of the cache key, so that older ones are not used."""

SENTINELS = 100
"""The number of sentinel tokens of a tokenizer that is trained for span corruption, as in T5."""

GROUP_CHARS = 4_000_000
"""The number of characters tokenized at once: enough to use all cores, few enough for memory."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A tokenized source: its token file and its tokenizer."""

    folder: Path

    @property
    def tokens(self) -> Path:
        """The stem of the token file."""
        return self.folder / "tokens"

    @property
    def tokenizer(self) -> Path:
        """The `tokenizer.json`."""
        return self.folder / "tokenizer.json"


def prepare_corpus(config: TextData | JsonlData, tokenizer: str | Path | None = None) -> Corpus:
    """Return a tokenized source, from the cache if it is there.

    `tokenizer` is used where the config names none: validation text must be tokenized by the tokenizer of
    the training text. Without either, a tokenizer is trained on the source itself.
    """
    source = _source(config)
    given = config.tokenizer or tokenizer
    if given is not None and not Path(given).is_file():
        load_tokenizer(given)  # raises an error that says what is wrong
    special = _special_tokens(config)
    how = (
        " ".join([f"trained {config.vocab_size}", *special]) if given is None else f"given {hash_files([Path(given)])}"
    )
    what = f"{RECIPE} {type(source).__name__} {source.fingerprint()} {how}"
    name = f"{config.type}-{hashlib.sha256(what.encode()).hexdigest()[:32]}"

    def build(folder: Path) -> None:
        corpus = Corpus(folder)
        if given is None:
            made = train_tokenizer(chain.from_iterable(source.documents()), config.vocab_size, special)
        else:
            made = load_tokenizer(given)
        made.save(corpus.tokenizer)
        documents = _whole(source.documents(), made, config.path)
        if write_documents(corpus.tokens, documents, made, masked=source.has_prompts) == 0:
            raise DataError(f"{config.path} contains no text; give a file or folder that does")
        if not any(text for _, text in source.documents()):
            what = "completion" if source.has_prompts else "text"
            raise DataError(f"{config.path}: every {what} is empty, so there is nothing to learn")

    cache = Path.home() / ".cache" / "plait" if config.cache is None else Path(config.cache).expanduser()
    return Corpus(cached(cache, name, build))


def write_documents(path: Path, documents: Iterable[Document], tokenizer: TextTokenizer, *, masked: bool) -> int:
    """Write documents to a token file, each followed by the end token; return the number of documents."""
    tokens = TokenWriter(path, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.digest, masked=masked)
    with tokens:
        for group in _groups(documents):
            given = tokenizer.encode_many([prompt for prompt, _ in group])
            learned = tokenizer.encode_many([text for _, text in group])
            for prompt, text in zip(given, learned, strict=True):
                tokens.add(
                    [*prompt, *text, tokenizer.end],
                    [0] * len(prompt) + [1] * (len(text) + 1) if masked else None,
                )
    return tokens.documents


def _whole(documents: Iterable[Document], tokenizer: TextTokenizer, path: str) -> Iterator[Document]:
    """Yield the documents; raise a `DataError` for a character that the tokenizer would drop."""
    for number, document in enumerate(documents, start=1):
        for lost in filter(None, map(tokenizer.lost_in, document)):
            raise DataError(
                f"{path}, document {number}: the tokenizer has no token for {lost!r} and would drop it; use a "
                "byte-level tokenizer, or one with an unknown token"
            )
        yield document


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document[0]) + len(document[1])
        if size >= GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _special_tokens(config: TextData | JsonlData) -> list[str]:
    """Return the special tokens besides the end token that a tokenizer which is trained needs for the objective."""
    match config.objective:
        case MaskedObjective() | DenoisingObjective():
            return ["<pad>", "<mask>"]
        case SpanCorruptionObjective():
            return ["<pad>", *(SENTINEL.format(number) for number in range(SENTINELS))]
        case None:
            return []
        case _:
            return ["<pad>"]


def _source(config: TextData | JsonlData) -> TextSource | JsonlSource:
    if isinstance(config, TextData):
        return TextSource(config.path, config.limit_mb)
    return JsonlSource(config.path, config.text_key, config.prompt_key, config.completion_key)
