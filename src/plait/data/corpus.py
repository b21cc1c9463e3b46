"""Text sources to token files, made once and kept in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from plait.config import JsonlData, TextData
from plait.data.cache import cache_root, cached
from plait.data.jsonl import JsonlSource
from plait.data.text import Document, TextSource, hash_files
from plait.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from plait.data.tokens import TokenWriter
from plait.errors import DataError

RECIPE = 1
"""Counts changes in how a corpus is made: an older one in the cache is then not taken for a new one."""

GROUP_CHARS = 4_000_000
"""Text that is tokenized at once: enough for all cores, little enough for memory."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A tokenized source: its token file and the tokenizer that made it."""

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
    """Tokenize a source, unless the cache has it.

    `tokenizer` stands in where the config names none: validation text of another source must be cut by
    the tokenizer of the training text. Without either, one is trained on the source itself.
    """
    source = _source(config)
    given = config.tokenizer or tokenizer
    if given is not None and not Path(given).is_file():
        load_tokenizer(given)  # says what is wrong with it
    how = f"trained {config.vocab_size}" if given is None else f"given {hash_files([Path(given)])}"
    what = f"{RECIPE} {type(source).__name__} {source.fingerprint()} {how}"
    name = f"{config.type}-{hashlib.sha256(what.encode()).hexdigest()[:32]}"

    def build(folder: Path) -> None:
        corpus = Corpus(folder)
        if given is None:
            made = train_tokenizer(chain.from_iterable(source.documents()), config.vocab_size)
        else:
            made = load_tokenizer(given)
        made.save(corpus.tokenizer)
        documents = _whole(source.documents(), made, config.path)
        if write_documents(corpus.tokens, documents, made, masked=source.has_prompts) == 0:
            raise DataError(f"{config.path} has no text in it; give a file or folder that has")
        if not any(text for _, text in source.documents()):
            what = "completion" if source.has_prompts else "text"
            raise DataError(f"{config.path}: every {what} is empty, so there is nothing to learn")

    return Corpus(cached(cache_root(config.cache), name, build))


def write_documents(path: Path, documents: Iterable[Document], tokenizer: TextTokenizer, *, masked: bool) -> int:
    """Tokenize documents into a token file, each with the end token behind it; how many there were."""
    writer = TokenWriter(path, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.digest, masked=masked)
    with writer:
        for group in _groups(documents):
            given = tokenizer.encode_many([prompt for prompt, _ in group])
            learned = tokenizer.encode_many([text for _, text in group])
            for prompt, text in zip(given, learned, strict=True):
                writer.add(
                    [*prompt, *text, tokenizer.end],
                    [0] * len(prompt) + [1] * (len(text) + 1) if masked else None,
                )
    return writer.documents


def _whole(documents: Iterable[Document], tokenizer: TextTokenizer, path: str) -> Iterator[Document]:
    """The documents; one with a character that would vanish between two tokens is an error."""
    for number, document in enumerate(documents, start=1):
        for lost in filter(None, map(tokenizer.lost_in, document)):
            raise DataError(
                f"{path}, document {number}: the tokenizer has no token for {lost!r} and would leave it out; give one "
                "that knows every byte, or one with a token for what is unknown"
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


def _source(config: TextData | JsonlData) -> TextSource | JsonlSource:
    if isinstance(config, TextData):
        return TextSource(config.path, config.limit_mb)
    return JsonlSource(config.path, config.text_key, config.prompt_key, config.completion_key)
