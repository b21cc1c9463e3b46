"""JSON lines with labels: texts with their classes, images with their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import ImageTextData, TextClassificationData, listed
from plait.data.images import square_image
from plait.data.objectives import padded_labels
from plait.data.text import find_files, open_file, read_object
from plait.data.tokenizer import TextTokenizer, load_tokenizer
from plait.errors import DataError

GROUP = 4096
"""The number of texts whose lengths are checked at once."""


class JsonRows:
    """The objects of JSON lines files, read when asked for; only their offsets are kept in memory."""

    def __init__(self, path: str) -> None:
        self.files = find_files(path)
        offsets = []
        for number, file in enumerate(self.files):
            with open_file(file) as lines:
                at = 0
                for line in lines:
                    if line.strip():
                        offsets.append((number, at))
                    at += len(line)
        if not offsets:
            raise DataError(f"{path} has no lines; give a file with one JSON object per line")
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, at = self._offsets[index].tolist()
        with open_file(self.files[file]) as lines:
            lines.seek(at)
            record = read_object(lines.readline())
        if isinstance(record, str):
            raise DataError(f"{self.where(index)}: {record}")
        return record

    def text(self, index: int, key: str) -> str:
        """Return the text under a key of a row."""
        value = self.value(index, key)
        if not isinstance(value, str):
            raise DataError(f"{self.where(index)}: {key!r} is of type {type(value).__name__}, expected a text")
        return value

    def value(self, index: int, key: str) -> Any:
        """Return what a row has under a key."""
        record = self[index]
        if key not in record:
            raise DataError(f"{self.where(index)}: no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
        return record[key]

    def file(self, index: int, name: Any) -> Path:
        """Return the file that a row names, relative to the file of the row."""
        if not isinstance(name, str):
            raise DataError(f"{self.where(index)}: {name!r} is of type {type(name).__name__}, expected a file name")
        path = self.files[int(self._offsets[index][0])].parent / Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"{self.where(index)}: {name} does not exist in {path.parent}")
        return path

    def where(self, index: int) -> str:
        """Return the file and number of a row, for messages."""
        file = int(self._offsets[index][0])
        return f"{self.files[file]}, row {index - int(np.searchsorted(self._offsets[:, 0], file)) + 1}"


class EncodedTexts:
    """Texts of rows as tokens with the tokenizer's special tokens, padded to one length."""

    def __init__(self, tokenizer: TextTokenizer, seq_len: int, *, truncate: bool, pairs: bool = False) -> None:
        self._backend = tokenizer.backend
        self.seq_len = seq_len
        self.pad = tokenizer.named("pad")
        if truncate:
            self._backend.enable_truncation(seq_len)
        self._truncate = truncate
        self._type_ids = pairs and any(self._backend.encode("a", "a").type_ids)
        """Whether the tokenizer marks the second text, as BERT's does."""

    def check(self, texts: Iterable[str | tuple[str, str]], path: str) -> None:
        """Raise a `DataError` if a text is longer than a row."""
        if self._truncate:
            return
        count = longer = longest = 0
        source = iter(texts)
        while group := list(islice(source, GROUP)):
            lengths = np.array([len(encoding.ids) for encoding in self._backend.encode_batch_fast(group)])
            count, longer = count + len(group), longer + int((lengths > self.seq_len).sum())
            longest = max(longest, int(lengths.max()))
        if longer:
            raise DataError(
                f"{path}: {longer} of {count} texts have more than {self.seq_len} tokens; write seq_len: {longest}, or "
                "truncate: true to cut them"
            )

    def __call__(self, text: str, pair: str | None = None) -> dict[str, Tensor]:
        """Return the row of a text, or of two."""
        encoding = self._backend.encode(text) if pair is None else self._backend.encode(text, pair)
        length = len(encoding.ids)
        ids = np.full(self.seq_len, self.pad, dtype=np.int64)
        ids[:length] = encoding.ids
        row = {"input_ids": torch.from_numpy(ids), "attention_mask": (torch.arange(self.seq_len) < length).long()}
        if self._type_ids:
            types = np.zeros(self.seq_len, dtype=np.int64)
            types[:length] = encoding.type_ids
            row["token_type_ids"] = torch.from_numpy(types)
        return row

    def labels(self, text: str, *, without: tuple[int, ...] = ()) -> Tensor:
        """Return a text as labels of a decoder; the tokens `without` are left out where the text begins with them."""
        ids = self._backend.encode(text).ids
        first = len(without) if tuple(ids[: len(without)]) == without else 0
        return padded_labels(np.array(ids[first:], dtype=np.int64), self.seq_len)


class LabeledTexts(Dataset[dict[str, Tensor]]):
    """Texts, or pairs of texts, with a class, several classes, or a number."""

    def __init__(self, config: TextClassificationData, *, use: Any = None) -> None:
        self._config = config
        self._rows = JsonRows(config.path)
        tokenizer = load_tokenizer(config.tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self._texts = EncodedTexts(
            tokenizer, config.seq_len, truncate=config.truncate, pairs=config.pair_key is not None
        )
        self.seq_len = config.seq_len
        self.special_tokens = {"pad": self._texts.pad}
        self._numbers = {name: number for number, name in enumerate(config.classes)}
        first = self._rows.value(0, config.label_key)
        self._kind: type = list if isinstance(first, list) else float if isinstance(first, float) else int
        """What a label is: a list of classes, a number, or one class."""
        if self._kind is list and not config.classes:
            raise DataError(
                f"{self._rows.where(0)}: {config.label_key!r} is a list of classes, and their number is not known; "
                "write data.classes"
            )
        labels = [self._label(index) for index in range(len(self._rows))]
        highest = max((int(label) for label in labels if self._kind is int), default=0)
        self.num_labels = 1 if self._kind is float else len(config.classes) or highest + 1
        """The number of outputs that a model needs."""
        self._texts.check(self._all_texts(), config.path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self._texts(*self._text(index)), "labels": self._label(index)}

    def _text(self, index: int) -> tuple[str, ...]:
        keys = (self._config.text_key, self._config.pair_key)
        return tuple(self._rows.text(index, key) for key in keys if key is not None)

    def _all_texts(self) -> Iterator[Any]:
        for index in range(len(self._rows)):
            texts = self._text(index)
            yield texts[0] if len(texts) == 1 else texts

    def _label(self, index: int) -> Tensor:
        value = self._rows.value(index, self._config.label_key)
        if self._kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return torch.tensor(float(value))
        if self._kind is list and isinstance(value, list):
            chosen = torch.zeros(len(self._config.classes))
            chosen[[self._class(index, name) for name in value]] = 1.0
            return chosen
        if self._kind is int and not isinstance(value, list | float):
            return torch.tensor(self._class(index, value))
        raise DataError(
            f"{self._rows.where(index)}: {self._config.label_key!r} is {value!r}, and that of the first row is "
            f"{'a list of classes' if self._kind is list else 'a number' if self._kind is float else 'one class'}"
        )

    def _class(self, index: int, name: Any) -> int:
        classes = self._config.classes
        if isinstance(name, str) and name in self._numbers:
            return self._numbers[name]
        if type(name) is int and name >= 0 and (not classes or name < len(classes)):
            return name
        known = f"data.classes are {listed(list(classes))}" if classes else "without data.classes labels are numbers"
        raise DataError(f"{self._rows.where(index)}: {name!r} is not a class: {known}")


class ImageTexts(Dataset[dict[str, Tensor]]):
    """Images with a text about each."""

    def __init__(self, config: ImageTextData, *, use: Any = None) -> None:
        self._config = config
        self._rows = JsonRows(config.path)
        tokenizer = load_tokenizer(config.tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self._texts = EncodedTexts(tokenizer, config.seq_len, truncate=config.truncate)
        self.seq_len = config.seq_len
        for index in range(len(self._rows)):
            self._image(index)
        self._texts.check((self._rows.text(index, config.text_key) for index in range(len(self._rows))), config.path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config = self._config
        pixels = square_image(self._image(index), config.size, config.mean, config.std)
        return {**self._texts(self._rows.text(index, config.text_key)), "pixel_values": pixels}

    def _image(self, index: int) -> Path:
        return self._rows.file(index, self._rows.value(index, self._config.image_key))
