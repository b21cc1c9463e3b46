"""The tokenizer of a phase: from a file, from a folder, or of single characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plait.config import read_json_object
from plait.data import END, TextTokenizer, train_tokenizer
from plait.errors import DataError

NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
"""Where a Hugging Face folder says which token is the end."""


class ChatTokenizer(TextTokenizer):
    """A tokenizer that also knows which texts are tokens of their own."""

    def __init__(self, backend: Any, origin: str, named_end: str | None = None) -> None:
        super().__init__(backend, origin, named_end)
        self._named_end = named_end

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`, and beside it what the end is called where that cannot be seen from it."""
        super().save(path)
        if self._named_end is not None:
            settings = json.dumps({"eos_token": self._named_end}, ensure_ascii=False, indent=2)
            Path(path).with_name(SETTINGS).write_text(settings + "\n", encoding="utf-8")

    def token_id(self, text: str) -> int | None:
        """The token that a text is; None where it is none."""
        found: int | None = self.backend.token_to_id(text)
        return found

    @property
    def controls(self) -> tuple[str, ...]:
        """The texts of control tokens, which are no such tokens where somebody writes them."""
        return tuple(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its number."""
        found: dict[str, int] = self.backend.get_vocab()
        return found


def read_tokenizer(path: str | Path) -> ChatTokenizer:
    """Read a `tokenizer.json`, given itself or the folder that it lies in."""
    from tokenizers import Tokenizer

    place = Path(path)
    file = place / NAME if place.is_dir() else place
    if not file.is_file():
        raise DataError(f"tokenizer {str(path)!r}: there is no {file.name if place.is_dir() else 'such file'}")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a tokenizer.json: {error}") from error
    return ChatTokenizer(backend, str(file), _named_end(file.with_name(SETTINGS)))


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a tokenizer; none where the file is not there."""
    return read_json_object(file, DataError) if file.is_file() else {}


def _named_end(settings: Path) -> str | None:
    """The end token of a tokenizer's settings: a text, or an object with it."""
    found = read_settings(settings).get("eos_token")
    word = found.get("content") if isinstance(found, dict) else found
    if word is not None and not isinstance(word, str):
        raise DataError(f"{settings} has the eos_token {found!r:.80}, expected a token")
    return word


class CharacterTokenizer(ChatTokenizer):
    """One token a character. A character that it does not know is an error; the library would leave it out."""

    def unknown_in(self, text: str) -> str | None:
        """None: it is an error as soon as it is encoded."""
        return None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        tokens = super().encode(text)
        if len(tokens) != len(text):
            strange = sorted({character for character in text if self.token_id(character) is None})
            raise DataError(f"the characters {''.join(strange)!r} are not in the vocabulary of the made-up task")
        return tokens


def character_tokenizer(alphabet: str, marks: Sequence[str] = ()) -> ChatTokenizer:
    """One token for each character, and the end token first; `marks` are tokens too."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {END: 0, **{character: index for index, character in enumerate(sorted(set(alphabet)), start=1)}}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END, *marks])
    return CharacterTokenizer(backend, "characters")


def trained_tokenizer(texts: Iterable[str], vocab_size: int, marks: Sequence[str] = ()) -> ChatTokenizer:
    """A byte-level BPE of these texts with so many tokens, `marks` among them; the same texts give the same one."""
    from tokenizers import Tokenizer

    with TemporaryDirectory() as folder:
        file = Path(folder) / NAME
        train_tokenizer(texts, vocab_size - len(marks)).save(file)
        backend: Any = Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(marks))
    return ChatTokenizer(backend, "trained tokenizer")
