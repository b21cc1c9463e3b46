"""Rows of JSON, of Parquet, and of folders that `datasets` saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from plait.config.files import parse_json
from plait.data.jsonl import read_object
from plait.data.text import open_file
from plait.errors import DataError, MissingExtraError

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
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    known = [file for file in files if file.suffix in (".jsonl", ".json", ".ndjson", ".parquet") and file.is_file()]
    if not known:
        raise DataError(f"{path}: no .jsonl and no .parquet file, and no folder of datasets.save_to_disk")
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
    parts = found.items() if hasattr(found, "items") else [("", found)]
    for name, part in parts:
        for number, row in enumerate(_read_by_library(path, part.__iter__), start=1):
            yield f"{path}{f'/{name}' if name else ''}, row {number}", row
