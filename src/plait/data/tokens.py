"""Token files: written once, read by memory map.

A token file is four files with one stem:

    corpus.bin        the tokens of all documents, one after another, uint16 or uint32, little-endian
    corpus.docs.bin   where each document starts, and where the last one ends, int64
    corpus.mask.bin   optional: one byte per token, 1 where the token is learned, 0 where it belongs to a prompt
    corpus.json       describes the others; written last, so without it the token file does not exist
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from plait.config import parse_json
from plait.errors import DataError

VERSION = 1
OFFSET = np.dtype("<i8")
MASK = np.dtype("u1")


@dataclass(frozen=True, slots=True)
class TokenMeta:
    """The content of a token file's `.json`."""

    version: int
    dtype: str
    count: int
    """The number of tokens."""
    documents: int
    vocab_size: int
    tokenizer: str
    """Hash of the tokenizer, or empty if it is not known."""
    masked: bool


class TokenWriter:
    """Writes a token file document by document, under temporary names; `close` renames its files.

    As a context manager it is closed at the end, or discarded if the block raises.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, tokenizer: str = "", masked: bool = False) -> None:
        self._names = _names(path, masked=masked)
        self._meta = _stem(path).with_name(_stem(path).name + ".json")
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._masked = masked
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._count = 0
        self.documents = 0
        """Documents written so far."""
        self._meta.parent.mkdir(parents=True, exist_ok=True)
        # A random suffix, so that two writers of one file never share a temporary one.
        self._suffix = f".{uuid.uuid4().hex}.tmp"
        self._files = {suffix: _temporary(name, self._suffix).open("wb") for suffix, name in self._names.items()}
        self._files["docs"].write(OFFSET.type(0).tobytes())

    def add(self, tokens: Sequence[int] | NDArray[Any], mask: Sequence[int] | NDArray[Any] | None = None) -> None:
        """Append one document; one without tokens is skipped."""
        values = np.asarray(tokens, dtype=np.int64)
        if values.size == 0:
            return
        if values.min() < 0 or values.max() >= self._vocab_size:
            raise DataError(
                f"{self._meta.stem}: a token is {values.max() if values.min() >= 0 else values.min()}, "
                f"outside the vocabulary of {self._vocab_size}"
            )
        if self._masked:
            assert mask is not None, "a masked token file needs a mask for every document"
            assert len(mask) == len(values), "one mask value per token"
            self._files["mask"].write(np.asarray(mask, dtype=MASK).tobytes())
        self._files["bin"].write(values.astype(self._dtype).tobytes())
        self._count += values.size
        self.documents += 1
        self._files["docs"].write(OFFSET.type(self._count).tobytes())

    def close(self) -> TokenMeta:
        """Sync the files to disk and rename them; return the description."""
        meta = TokenMeta(
            version=VERSION,
            dtype=self._dtype.newbyteorder("=").name,
            count=self._count,
            documents=self.documents,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            masked=self._masked,
        )
        for file in self._files.values():
            _sync(file)
        # Without its meta file a token file does not exist: it is removed first and written last.
        self._meta.unlink(missing_ok=True)
        for name in self._names.values():
            _temporary(name, self._suffix).replace(name)
        meta_file = _temporary(self._meta, self._suffix)
        with meta_file.open("wb") as file:
            file.write(json.dumps(asdict(meta), indent=1).encode())
            _sync(file)
        meta_file.replace(self._meta)
        return meta

    def discard(self) -> None:
        """Remove the temporary files."""
        for suffix, name in self._names.items():
            self._files[suffix].close()
            _temporary(name, self._suffix).unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is None:
            self.close()
        else:
            self.discard()


class TokenFile:
    """A token file, checked against its description and memory-mapped."""

    def __init__(self, path: str | Path) -> None:
        self.path = _stem(path)
        self.meta = _read_meta(self.path.with_name(self.path.name + ".json"))
        names = _names(self.path, masked=self.meta.masked)
        self.tokens = _map(names["bin"], np.dtype(self.meta.dtype).newbyteorder("<"), self.meta.count)
        self.offsets = _map(names["docs"], OFFSET, self.meta.documents + 1)
        """The start of each document, then the end of the last one."""
        self.mask = _map(names["mask"], MASK, self.meta.count) if self.meta.masked else None
        if np.any(self.offsets[1:] < self.offsets[:-1]):
            raise DataError(f"{names['docs']}: a document ends before it begins: the file is damaged, write it again")
        if self.offsets[0] != 0 or self.offsets[-1] != self.meta.count:
            raise DataError(
                f"{names['docs']}: documents go from {self.offsets[0]} to {self.offsets[-1]}, "
                f"expected 0 to {self.meta.count}: the file is damaged, write it again"
            )

    def __len__(self) -> int:
        return self.meta.count

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of one document."""
        start, stop = self.offsets[index : index + 2]
        return self.tokens[start:stop]

    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path]]:
        # A worker process maps the file again; pickling the arrays would copy them.
        return TokenFile, (self.path,)


def _stem(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".json") else path


def _names(path: str | Path, *, masked: bool) -> dict[str, Path]:
    stem = _stem(path)
    suffixes = {"bin": ".bin", "docs": ".docs.bin"} | ({"mask": ".mask.bin"} if masked else {})
    return {key: stem.with_name(stem.name + suffix) for key, suffix in suffixes.items()}


def _temporary(name: Path, suffix: str) -> Path:
    return name.with_name("." + name.name + suffix)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _read_meta(path: Path) -> TokenMeta:
    try:
        meta = TokenMeta(**parse_json(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: no token file was (completely) written there") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not the description of a token file: {error}") from error
    numbers = (meta.count, meta.documents, meta.vocab_size)
    typed = isinstance(meta.tokenizer, str) and isinstance(meta.masked, bool)
    if not typed or not all(type(number) is int and number >= 0 for number in numbers):
        raise DataError(f"{path} is not the description of a token file: {meta}")
    if meta.version != VERSION:
        raise DataError(f"{path}: version {meta.version}, expected {VERSION}: write the token file again")
    if meta.dtype not in ("uint16", "uint32"):
        raise DataError(f"{path}: dtype {meta.dtype!r}, expected uint16 or uint32")
    return meta


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    expected = count * dtype.itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"{path} is missing: expected {expected} bytes") from None
    if size != expected:
        raise DataError(
            f"{path}: expected {expected} bytes ({count} × {dtype.name}), found {size}: "
            "the file is damaged or belongs to another one, write it again"
        )
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    # A plain view of the map: indexing `memmap` itself costs several times more.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
