"""Plain text as documents: files, folders, globs, and Python's own standard library."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from plait.config import as_utf8
from plait.data.tokenizer import END
from plait.errors import DataError

STDLIB = "stdlib"
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
"""Folders of the standard library without sources of its own: packages, tests, and tables written by programs."""

Document = tuple[str, str]
"""What is given and what is to be learned; plain text has nothing given."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """Text files. Each is a document, or several with `<|endoftext|>` between them.

    `path` is a file, a folder (every file below it that is not hidden), a glob, or `stdlib`: the sources
    of the standard library of the Python that runs this, without tests and tables. `limit_mb` keeps the first
    files, in the order of their names, that together are no larger.
    """

    path: str
    limit_mb: float | None = None

    has_prompts = False

    def files(self) -> list[Path]:
        """The files, always in the same order."""
        found = _stdlib() if self.path == STDLIB else find_files(self.path)
        return found if self.limit_mb is None else self._first(found, self.limit_mb)

    def fingerprint(self) -> str:
        """A hash of everything that the documents are made of."""
        return hash_files(self.files())

    def documents(self) -> Iterator[Document]:
        """The documents, empty ones left out."""
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
            return path.read_text(encoding="utf-8-sig")  # a mark at the start, as some editors put it, is no text
        except SyntaxError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}; give another path") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            remedy = f"{as_utf8(error.object)}, or name the text files with a glob"
            raise DataError(f"{path} is not UTF-8 text (byte {error.start}): {remedy}") from error


def find_files(path: str) -> list[Path]:
    """The files that a file name, a folder or a glob stands for, sorted."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        below = (p for p in place.rglob("*") if not any(part.startswith(".") for part in p.relative_to(place).parts))
        found = sorted(p for p in below if p.is_file())
    else:
        found = sorted(p for p in map(Path, glob.glob(str(place), recursive=True)) if p.is_file())
    if not found:
        what = "has no files in it" if place.is_dir() else "does not exist, and matches nothing as a glob"
        raise DataError(f"{path} {what}; give a file, a folder, a glob")
    return found


def hash_files(files: list[Path]) -> str:
    """A hash of the contents of some files, one by one."""
    whole = hashlib.sha256()
    for path in files:
        with open_file(path) as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """A file of data. One that cannot be read, from its beginning or in the middle, is a `DataError` that names it."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT]  # not even entered
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"this Python has no sources of its standard library in {root}; give another path")
    return sorted(files)
