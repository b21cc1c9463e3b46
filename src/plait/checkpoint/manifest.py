"""What a checkpoint says about itself: `manifest.json`, written last."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder without a manifest is no checkpoint; one with it is complete."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    tensors: dict[str, dict[str, Any]]
    """Name → global shape and dtype."""
    state: dict[str, Any]
    """Everything that is no tensor: counters, schedule, data position, hook state, config."""
    versions: dict[str, str]
    saved_at: float
    """Seconds since 1970: of two checkpoints the later one is the newer, whatever their steps."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it with a checksum of its own, and make sure that it is on the disk."""
        content = json.loads(json.dumps(asdict(self)))  # as a reader will see it: texts as keys, lists for tuples
        path = folder / NAME
        with path.open("w") as file:
            json.dump({**content, "crc32": _crc(content)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder."""
    path = folder / NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}: no such folder")
    if not path.exists():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {NAME}, which is written last")
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {raw['format']}, this version of Plait reads format {FORMAT}")
        if raw.pop("crc32") != _crc(raw):
            raise ValueError("its checksum differs")
        files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
        return Manifest(files=files, **raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove {folder}, "
            "and `checkpoint.resume: auto` goes on from the one before it"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def saved_at(folder: Path) -> float:
    """When a checkpoint was saved; of a damaged one, what its file system says."""
    path = folder / NAME
    try:
        return float(json.loads(path.read_text())["saved_at"])
    except (ValueError, KeyError, TypeError):
        return path.stat().st_mtime


def _crc(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checksum(path: Path) -> FileRecord:
    """Size and CRC-32 of a file, read back from the disk."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileRecord(size, crc)
