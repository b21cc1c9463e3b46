"""What a checkpoint says about itself: `manifest.json`, written last."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint import index
from plait.checkpoint.index import Index
from plait.checkpoint.tensorfile import digest
from plait.config import parse_json
from plait.errors import CheckpointError

FORMAT = 2
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    bytes: int
    digest: str
    """Of a file of tensors: of its head, for the blocks have their own. Of any other: of all of it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder without a manifest is no checkpoint; one with it is complete."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    state: dict[str, Any]
    """Everything that is no tensor: counters, schedule, data position, hook state, config."""
    versions: dict[str, str]
    saved_at: float
    """Seconds since 1970 (`moment_of_saving`): of two checkpoints the later one is the newer, whatever their steps."""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """The size of all files that it names."""
        return sum(record.bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it with a digest of its own, and make sure that it is on the disk."""
        content = json.loads(json.dumps(asdict(self)))  # as a reader will see it: texts as keys, lists for tuples
        write_text(folder / NAME, json.dumps({**content, "digest": _digest(content)}, indent=1))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: where it is, what it says about itself, and what lies where in it."""

    folder: Path
    manifest: Manifest
    index: Index


def leads_out(folder: Path, name: str) -> bool:
    """Whether a file of a folder is a link to somewhere else."""
    return (folder / name).resolve().parent != folder.resolve()


def is_complete(folder: Path) -> bool:
    """Whether a folder has a manifest. One that may not be looked into is an error, for nobody knows what it has."""
    try:
        return (folder / NAME).exists()
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be looked into: {error.strerror}; let this user read it, or move it away"
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder."""
    path = folder / NAME
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}: no such folder")
    if not is_complete(folder):
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {NAME}, which is written last")
    try:
        raw = parse_json(path.read_bytes())
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {raw['format']!r}, this version of Plait reads format {FORMAT}")
        if raw.pop("digest") != _digest(raw):
            raise ValueError("its digest differs")
        return _manifest(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})\n{remedy(folder)}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}\n{remedy(folder)}") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint says about itself; its tensors stay on the disk."""
    manifest = read_manifest(folder)
    path = folder / index.NAME
    if out := [name for name in (NAME, index.NAME) if leads_out(folder, name)]:
        raise CheckpointError(f"{folder / out[0]} is a link that leads out of the checkpoint; copy the file itself")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}\n{remedy(folder)}") from error
    if digest(content) != manifest.files[index.NAME].digest:
        raise CheckpointError(f"{path} is damaged: its digest differs\n{remedy(folder)}")
    sizes = {name: record.bytes for name, record in manifest.files.items() if name != index.NAME}
    try:
        return Checkpoint(folder, manifest, Index.parse(content, sizes))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}\n{remedy(folder)}") from error


def _manifest(raw: dict[str, Any]) -> Manifest:
    """From what was read. Raises `ValueError` where a field is not what it should be."""
    files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
    for name, record in files.items():
        if name in ("", ".", "..", NAME) or any(sign in name for sign in "/\\\0"):
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        if type(record.bytes) is not int or record.bytes < 0 or not isinstance(record.digest, str):
            raise ValueError(f"{name!r} is described by {record}, expected its size and its digest")
    if index.NAME not in files:
        raise ValueError(f"it does not list {index.NAME}")
    manifest = Manifest(files=files, **raw)
    for key, kind in _KINDS.items():
        if not isinstance(value := getattr(manifest, key), kind) or isinstance(value, bool):
            raise ValueError(f"{key} is {value!r:.80}, expected {kind.__name__}")
    if manifest.step < 0 or manifest.world_size < 1 or not math.isfinite(manifest.saved_at):
        raise ValueError(f"step {manifest.step}, world_size {manifest.world_size}, saved_at {manifest.saved_at}")
    for key, is_right in _STATE.items():
        if not is_right(value := _at(manifest.state, key)):
            raise ValueError(f"state.{key} is {value!r:.80}")
    return manifest


_KINDS: dict[str, type] = {"step": int, "world_size": int, "state": dict, "versions": dict, "saved_at": float}


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 62)


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (int, float)


def _is_section(value: Any) -> bool:
    return value is None or isinstance(value, dict)


_STATE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("engine", "engine.scaler", "engine.fp8", "hooks", "frozen"), _is_section),
    **dict.fromkeys(("config", "config.optim", "config.precision", "config.data"), _is_section),
    **dict.fromkeys(("engine.steps", "engine.skips_in_a_row", "epoch", "step_in_epoch", "batch_total"), _is_count),
    **dict.fromkeys(("engine.divisor", "best"), _is_number),
    "config.optim.type": lambda value: value is None or isinstance(value, str),
    "frozen.names": lambda value: value is None or (isinstance(value, list) and all(isinstance(n, str) for n in value)),
}
"""What every reader of a checkpoint takes for granted; each may be absent, and is then asked for by who needs it."""


def _at(state: dict[str, Any], key: str) -> Any:
    """The value under a dotted key; its sections were looked at before it."""
    *sections, name = key.split(".")
    for section in sections:
        state = state.get(section) or {}
    return state.get(name)


def saved_at(folder: Path) -> float:
    """When a checkpoint was saved; of one that is damaged or cannot be read, what its file system says."""
    path = folder / NAME
    try:
        return float(parse_json(path.read_bytes())["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return path.stat().st_mtime


def moment_of_saving(root: Path) -> float:
    """Now, but later than every checkpoint in the folder.

    A clock that was set back, or another host's, would otherwise make the new one the oldest, and the first to go.
    """
    last = max((saved_at(path.parent) for path in root.glob(f"step-*/{NAME}")), default=0.0)
    return max(time.time(), math.nextafter(last, math.inf))


def remedy(damaged: Path) -> str:
    """What to do about a damaged checkpoint: the newest of those saved before it is offered."""
    moment = saved_at(damaged) if is_complete(damaged) else float("inf")
    others = [path.parent for path in damaged.parent.glob(f"step-*/{NAME}") if path.parent != damaged]
    before = [path for path in others if not path.is_symlink() and saved_at(path) < moment]
    if not before:
        return "there is no checkpoint before it"
    return f"the one before it can go on: `checkpoint.resume: {max(before, key=saved_at)}`"


def write_text(path: Path, text: str) -> None:
    """Write a file, and make sure that it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
