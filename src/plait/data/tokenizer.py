"""Tokenizers: loading, training, encoding and decoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.config import SMALLEST_BPE, lone_surrogate
from plait.errors import DataError

END = "<|endoftext|>"
"""The end token of a document, in tokenizers that are trained here."""

KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""End tokens of other tokenizers, in the order in which they are looked up."""

SPECIAL_NAMES = {"pad": ("<pad>", "[PAD]", END), "mask": ("<mask>", "[MASK]")}
"""The names of the special tokens that objectives use, in the order in which they are looked up. GPT-2 and Whisper pad
with their end token."""
SENTINEL = "<extra_id_{}>"
"""The name of T5's sentinel tokens."""


_WHITE = "\u0120\u010a\u0109\u010d\u2581"
"""How byte-level and SentencePiece vocabularies write a space, a new line, a tab and a carriage return."""
_SPACE = "\u2581"
"""The character that many tokenizers use for a space, and put before a text."""


class TextTokenizer:
    """A tokenizer of the `tokenizers` library with the methods that training and sampling need."""

    def __init__(self, backend: Any, origin: str, named_end: str | None = None) -> None:
        """`named_end` is the name of the end token; by default the first of the known ones."""
        candidates = (backend.token_to_id(name) for name in ((named_end,) if named_end else KNOWN_ENDS))
        end = next((token for token in candidates if token is not None), None)
        if end is None:
            raise DataError(
                f"{origin}: the tokenizer has no token for the end of a document; add "
                + (f"{named_end!r}, which its settings name" if named_end else f"one of {', '.join(KNOWN_ENDS)}")
            )
        backend.no_truncation()
        backend.no_padding()
        self.begin, self.after = _around(backend)
        """The tokens that the tokenizer itself puts before a text (BOS, where it has one), and after it."""
        self._origin = origin
        # A text that happens to contain "<|endoftext|>" must not end a document.
        backend.encode_special_tokens = True
        self.backend = backend
        self._characters: dict[str, bool] = {}
        """The characters seen so far, and whether they have a token."""
        self.end: int = end
        """The token that ends a document."""

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary, with added tokens."""
        # Ids may have gaps, and an embedding needs a row for the highest one.
        highest: int = max(self.backend.get_vocab().values())
        return highest + 1

    @property
    def digest(self) -> str:
        """A hash of the tokenizer's whole definition."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        try:
            tokens: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # the library's error for text that is not valid UTF-8
            raise DataError(f"{lone_surrogate(text) or error}; leave it out") from error
        return tokens

    def encode_many(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of many texts, computed on all cores."""
        for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def unknown_in(self, text: str) -> str | None:
        """Return the first character of a text, other than a space, that has no token but perhaps the unknown token."""
        if self._knows_all:
            return None
        if type(self.backend.model).__name__ not in ("BPE", "Unigram"):  # other models split text into words first
            encoding = self.backend.encode(text, add_special_tokens=False)
            positions = (
                at for token, (at, _) in zip(encoding.ids, encoding.offsets, strict=True) if token in self._unknown
            )
            return next((text[at] for at in positions), None)
        # One by one: after a dropped character the library reports wrong offsets.
        for character in set(text) - self._characters.keys():
            encoding = self.backend.encode(character, add_special_tokens=False)
            known = (
                text for token, text in zip(encoding.ids, encoding.tokens, strict=True) if token not in self._unknown
            )
            self._characters[character] = character.isspace() or any(text.strip(_SPACE) for text in known)
        return next((character for character in text if not self._characters[character]), None)

    def lost_in(self, text: str) -> str | None:
        """Return the first character of a text that the tokenizer would drop; None if it drops none."""
        return None if self._unknown else self.unknown_in(text)

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """The ids of the unknown token; empty if there is none."""
        names = (getattr(self.backend.model, "unk_token", None) or "<unk>", "<unk>", "[UNK]")
        return frozenset(token for name in names if (token := self.backend.token_to_id(name)) is not None)

    @cached_property
    def _knows_all(self) -> bool:
        """Whether it has a token for every byte."""
        strange = "\u6f22\u0378\U0001f9ff"
        tokens = self.backend.encode(strange, add_special_tokens=False).ids
        return self.decode(tokens).strip() == strange

    def decode(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of some tokens."""
        text: str = self.backend.decode(list(tokens), skip_special_tokens=not keep_special)
        return text

    def named(self, name: str) -> int:
        """Return the id of the `pad` or `mask` token; raise a `DataError` if there is none."""
        known = SPECIAL_NAMES[name]
        token: int | None = next((id_ for text in known if (id_ := self.backend.token_to_id(text)) is not None), None)
        if token is None:
            raise DataError(f"{self._origin}: the tokenizer has no {name} token; add {' or '.join(known[:2])}")
        return token

    def sentinels(self, count: int) -> list[int]:
        """Return the ids of the first sentinel tokens; raise a `DataError` if there are fewer."""
        tokens = [self.backend.token_to_id(SENTINEL.format(number)) for number in range(count)]
        if None in tokens:
            raise DataError(
                f"{self._origin}: the tokenizer has {tokens.index(None)} sentinel tokens ({SENTINEL.format(0)}, …), "
                f"and a row may have {count} hidden spans; add them, make seq_len smaller or mean_span_length larger"
            )
        return tokens

    def ordinary_tokens(self) -> NDArray[np.int64]:
        """Return the ids of all tokens that are not special."""
        added = self.backend.get_added_tokens_decoder()
        special = {token for token, how in added.items() if how.special}
        ids = sorted(set(self.backend.get_vocab().values()) - special)
        return np.array(ids, dtype=np.int64)

    def word_beginnings(self) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
        """Return a function from tokens to whether each begins a word.

        Words are what the tokenizer marks: pieces with `##` continue a word (WordPiece); those with a space in front
        begin one (byte-level BPE, SentencePiece), and so does what follows white space.
        """
        vocab = self.backend.get_vocab()
        begins, blank = (np.zeros(self.vocab_size, dtype=bool) for _ in range(2))
        pieces = any(text.startswith("##") for text in vocab)
        for text, token in vocab.items():
            begins[token] = not text.startswith("##") if pieces else text[:1] in _WHITE
            blank[token] = not pieces and all(character in _WHITE for character in text)

        def of(tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
            starts = begins[tokens]
            starts[1:] |= blank[tokens[:-1]]
            return starts

        return of

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token with this text, which decoding skips; None if there is none."""
        token: int | None = self.backend.token_to_id(text)
        return token if token is not None and not self.decode([token]) else None

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json`."""
        self.backend.save(str(path))


def _around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that are put before a text, and those after it."""
    plain, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    if not plain:
        return (), ()
    offsets = (at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain)
    first = next(offsets, None)
    return ((), ()) if first is None else (tuple(whole[:first]), tuple(whole[first + len(plain) :]))


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Return the tokenizer of a `tokenizer.json`; raise a `DataError` if it cannot be read."""
    from tokenizers import Tokenizer

    if Path(path).is_dir():
        raise DataError(f"tokenizer {path} is a folder: give the tokenizer.json in it")
    if not Path(path).is_file():
        raise DataError(f"tokenizer {path} does not exist: give a tokenizer.json, or leave it out to train one")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    return TextTokenizer(backend, str(path))


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> TextTokenizer:
    """Return a byte-level BPE tokenizer trained on texts. The same texts and size give the same tokenizer.

    `special` are the names of special tokens besides the end token; they have the ids after it.

    A small text may not have enough pairs to reach `vocab_size`; the vocabulary is then smaller.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_BPE + len(special):
        least = SMALLEST_BPE + len(special)
        raise DataError(f"vocab_size {vocab_size} is too small for a byte-level BPE: at least {least}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, "trained tokenizer")
