"""Rows of JSON, of Parquet, and of folders that `datasets` saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.config import parse_json
from plait.data import find_files, open_file, read_object
from plait.errors import DataError, MissingExtraError

_UNREADABLE = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".csv", ".tsv", ".arrow")
"""Files that may hold rows, and are not read; to pass over one would lose them."""
_SPLIT = re.compile(r"(train|test|valid|val|dev|eval)(?:ation|ing|uation)?(?![a-z])", re.IGNORECASE)

Row = tuple[str, Mapping[str, Any] | str]
"""Where a row stands, and the row; or what is wrong with it."""


def read_rows(path: str) -> Iterator[Row]:
    """Every row of a file or folder, in order. A line that is no JSON object comes as the reason why not."""
    place = Path(path)
    if not place.exists():
        raise DataError(f"{path} does not exist")
    if place.is_dir() and any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        yield from _saved_dataset(place)
        return
    files = find_files(path) if place.is_dir() else [place]
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
    """The entries of a file that is one list."""
    try:
        entries = parse_json(path.read_bytes(), half_characters=True)  # each entry is looked at by itself
    except ValueError as error:  # also what is no UTF-8
        raise DataError(f"{path} begins as a list, and is not JSON: {error}") from error
    for number, entry in enumerate(entries, start=1):
        yield f"{path}, entry {number}", read_object(json.dumps(entry).encode())


def _parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("pyarrow", f"reading {path.name}", "parquet") from error
    file = parquet.ParquetFile
    rows = _read_by_library(path, lambda: (row for each in file(path).iter_batches() for row in each.to_pylist()))
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _read_by_library(path: Path, read: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """What a library reads from a file; whatever it raises is an error that names the file."""
    try:
        yield from read()
    except Exception as error:  # Arrow has a dozen kinds of its own
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); get it again") from error


def _saved_dataset(path: Path) -> Iterator[Row]:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("datasets", f"reading the folder {path.name}", "datasets") from error
    (found,) = _read_by_library(path, lambda: [datasets.load_from_disk(str(path))])
    parts = dict(found) if hasattr(found, "items") else {"": found}
    if len(parts) > 1:
        raise DataError(
            f"{path} has the splits {', '.join(parts)}: name one of them, such as {path / next(iter(parts))}"
        )
    for name, part in parts.items():
        for number, row in enumerate(_read_by_library(path, part.__iter__), start=1):
            yield f"{path}{f'/{name}' if name else ''}, row {number}", row


def _refuse_mixed_splits(path: str, names: list[str]) -> None:
    """What is kept for tests must not be learned because it lies in the same folder."""
    splits = {match[1].lower(): name for name in names if (match := _SPLIT.match(name))}
    if len(splits) > 1:
        raise DataError(f"{path} holds several splits, such as {' and '.join(splits.values())}: name the files of one")
