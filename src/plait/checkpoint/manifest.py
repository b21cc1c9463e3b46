"""The two JSON files of a checkpoint: `index.json`, where each tensor lies, and `manifest.json`, written last."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.checkpoint.pieces import Piece
from plait.checkpoint.tensorfile import BLOCK, DTYPES, Slot, digest
from plait.config import parse_json
from plait.errors import CheckpointError

# `index.json`: the position of every tensor.


INDEX_NAME = "index.json"


class StoredPiece(NamedTuple):
    """One piece of a tensor, in one file."""

    file: str
    begin: int
    """Byte of the file at which it starts."""
    start: tuple[int, ...]
    """Index of the piece's first element in the whole tensor."""
    shape: tuple[int, ...]
    digests: tuple[str, ...]
    """The digest of each block of `tensorfile.BLOCK` bytes."""


class TensorRecord(NamedTuple):
    """A tensor's global shape, and the pieces that it is stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Every tensor of a checkpoint."""

    tensors: Mapping[str, TensorRecord]

    @classmethod
    def of(cls, written: Iterable[tuple[Piece, StoredPiece]]) -> Index:
        """Build the index from what all ranks wrote."""
        about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        pieces: dict[str, list[StoredPiece]] = {}
        for piece, stored in written:
            about[piece.name] = piece.dtype, piece.whole
            pieces.setdefault(piece.name, []).append(stored)
        return cls(
            {
                name: TensorRecord(*about[name], tuple(sorted(pieces[name], key=attrgetter("start"))))
                for name in sorted(about)
            }
        )

    def text(self) -> str:
        """Return the content of the file."""
        content = {
            name: {
                "dtype": str(record.dtype).removeprefix("torch."),
                "shape": record.shape,
                "pieces": [piece._asdict() for piece in record.pieces],
            }
            for name, record in self.tensors.items()
        }
        return json.dumps({"tensors": content}, separators=(",", ":"))

    @classmethod
    def parse(cls, content: bytes, sizes: Mapping[str, int]) -> Index:
        """Return the index in the file's content, or raise `ValueError` if it is malformed.

        `sizes` are those of the other files. The pieces of each tensor must cover it exactly, and each piece must lie
        within one of the files: see [Note: pieces that do not fit together].
        """
        match parse_json(content):
            case {"tensors": dict(tensors)}:
                return cls({name: _record(name, fields, sizes) for name, fields in tensors.items()})
        raise ValueError("expected an object with `tensors`")

    def slots(self) -> dict[str, dict[str, Slot]]:
        """Return for each file what its header must contain: the positions of its pieces, by their names there."""
        slots: dict[str, dict[str, Slot]] = {}
        for name, record in self.tensors.items():
            for stored in record.pieces:
                piece = Piece(name, record.dtype, record.shape, stored.start, stored.shape)
                slot = Slot(record.dtype, stored.shape, stored.begin, piece.bytes)
                slots.setdefault(stored.file, {})[piece.key] = slot
        return slots


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def _record(name: str, fields: Any, sizes: Mapping[str, int]) -> TensorRecord:
    match fields:
        case {"dtype": str(dtype_name), "shape": [*shape], "pieces": [*pieces]} if (
            dtype_name in _DTYPES and _are_lengths(shape)
        ):
            dtype, whole = _DTYPES[dtype_name], tuple(shape)
        case _:
            raise ValueError(f"{name} is described by {fields!r:.80}, expected dtype, shape and pieces")
    if math.prod(max(length, 1) for length in whole) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{name} has the shape {whole}, which is too large for any memory")
    record = TensorRecord(dtype, whole, tuple(_stored(name, piece, dtype, whole, sizes) for piece in pieces))
    if reason := coverage_problem(
        [(piece.start, piece.shape) for piece in record.pieces if 0 not in piece.shape], whole
    ):
        raise ValueError(f"the pieces of {name} do not cover its shape {whole}: {reason}")
    return record


def _stored(
    name: str, fields: Any, dtype: torch.dtype, whole: tuple[int, ...], sizes: Mapping[str, int]
) -> StoredPiece:
    match fields:
        case {
            "file": str(file),
            "begin": int(begin),
            "start": [*start],
            "shape": [*shape],
            "digests": [*digests],
        } if _are_lengths([begin, *start, *shape]) and all(isinstance(text, str) for text in digests):
            pass
        case _:
            raise ValueError(
                f"a piece of {name} is described by {fields!r:.80}, expected file, begin, start, shape and digests"
            )
    if len(start) != len(whole) or len(shape) != len(whole):
        raise ValueError(f"a piece of {name} starts at {start} with the shape {shape}, in a tensor of shape {whole}")
    if any(first + length > most for first, length, most in zip(start, shape, whole, strict=True)):
        raise ValueError(f"a piece of {name} from {start} with the shape {shape} leaves its shape {whole}")
    size = math.prod(shape) * dtype.itemsize
    if file not in sizes:
        raise ValueError(f"a piece of {name} lies in {file!r}, which is not a file of the checkpoint")
    if begin + size > sizes[file]:
        raise ValueError(f"a piece of {name} ends at byte {begin + size} of {file}, which has {sizes[file]}")
    if len(digests) != -(-size // BLOCK):
        raise ValueError(f"a piece of {name} has {len(digests)} digests, expected {-(-size // BLOCK)}")
    return StoredPiece(file, begin, tuple(start), tuple(shape), tuple(digests))


def _are_lengths(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


# [Note: pieces that do not fit together]
# Digests prove that bytes are what was written, not that they belong to this place of this tensor: an index whose
# pieces overlap, leave a gap or point at the bytes of another tensor would be loaded without an error. So the index is
# checked when it is read: every element of a tensor must be in exactly one piece. And when a file is opened, its own
# header must name the same tensors with the same shapes at the same bytes.
def coverage_problem(pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], whole: tuple[int, ...]) -> str | None:
    """Return why slices (first index, shape) do not cover a tensor exactly once; None if they do."""
    if 0 in whole:
        return None
    if not pieces:
        return "a part of it is in none"
    if not whole:
        return None if len(pieces) == 1 else f"{len(pieces)} of them overlap"
    cuts = sorted({0, whole[0], *(start[0] for start, _ in pieces), *(start[0] + shape[0] for start, shape in pieces)})
    number = {cut: at for at, cut in enumerate(cuts)}
    slabs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in cuts[1:]]
    excess = sum(math.prod(shape) for _, shape in pieces) - math.prod(whole)
    if excess:
        return f"{excess} elements are in several" if excess > 0 else f"{-excess} elements are in none"
    for start, shape in pieces:
        for at in range(number[start[0]], number[start[0] + shape[0]]):
            slabs[at].append((start[1:], shape[1:]))
    return next((reason for slab in slabs if (reason := coverage_problem(slab, whole[1:]))), None)


FORMAT = 2
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    bytes: int
    digest: str
    """The digest of a safetensors file's header (its blocks have their own), or of all bytes of any other file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`. A folder that has it is a complete checkpoint; one without it is ignored."""

    step: int
    world_size: int
    files: dict[str, FileRecord]
    state: dict[str, Any]
    """Everything other than tensors: counters, schedule, data position, hook state, config."""
    versions: dict[str, str]
    saved_at: float
    """Seconds since 1970, see `save_time`. The newest checkpoint is that with the latest time, not the highest step."""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """The total size of all files that it names."""
        return sum(record.bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write the manifest with a digest of its content, and sync it to the disk."""
        content = json.loads(json.dumps(asdict(self)))  # as a reader gets it: keys are strings, tuples are lists
        write_text(folder / MANIFEST_NAME, json.dumps({**content, "digest": _digest(content)}, indent=1))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its folder, its manifest and its index."""

    folder: Path
    manifest: Manifest
    index: Index


def is_outside(folder: Path, name: str) -> bool:
    """Whether a file of a folder is a link to another folder."""
    return (folder / name).resolve().parent != folder.resolve()


def is_complete(folder: Path) -> bool:
    """Return whether a folder has a manifest. Raise if the folder cannot be read, as its content is then unknown."""
    try:
        return (folder / MANIFEST_NAME).exists()
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}; let this user read it, or move it away"
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Raise `CheckpointError` if it is missing or damaged."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: no such folder")
    if not is_complete(folder):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MANIFEST_NAME}, which is written last"
        )
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
    """Return a checkpoint with its manifest and its index; tensors are not read."""
    manifest = read_manifest(folder)
    path = folder / INDEX_NAME
    if out := [name for name in (MANIFEST_NAME, INDEX_NAME) if is_outside(folder, name)]:
        raise CheckpointError(f"{folder / out[0]} is a link that leads out of the checkpoint; copy the file itself")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}\n{remedy(folder)}") from error
    if digest(content) != manifest.files[INDEX_NAME].digest:
        raise CheckpointError(f"{path} is damaged: its digest differs\n{remedy(folder)}")
    sizes = {name: record.bytes for name, record in manifest.files.items() if name != INDEX_NAME}
    try:
        return Checkpoint(folder, manifest, Index.parse(content, sizes))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}\n{remedy(folder)}") from error


def _manifest(raw: dict[str, Any]) -> Manifest:
    """Return the manifest in parsed JSON, or raise `ValueError` if a field is invalid."""
    files = {name: FileRecord(**record) for name, record in raw.pop("files").items()}
    for name, record in files.items():
        if name in ("", ".", "..", MANIFEST_NAME) or any(sign in name for sign in "/\\\0"):
            raise ValueError(f"{name!r} is not the name of a file in this folder")
        if type(record.bytes) is not int or record.bytes < 0 or not isinstance(record.digest, str):
            raise ValueError(f"{name!r} is described by {record}, expected its size and its digest")
    if INDEX_NAME not in files:
        raise ValueError(f"it does not list {INDEX_NAME}")
    manifest = Manifest(files=files, **raw)
    for key, expected_type in _FIELD_TYPES.items():
        if not isinstance(value := getattr(manifest, key), expected_type) or isinstance(value, bool):
            raise ValueError(f"{key} is {value!r:.80}, expected {expected_type.__name__}")
    if manifest.step < 0 or manifest.world_size < 1 or not math.isfinite(manifest.saved_at):
        raise ValueError(f"step {manifest.step}, world_size {manifest.world_size}, saved_at {manifest.saved_at}")
    for key, is_right in _STATE.items():
        if not is_right(value := _at(manifest.state, key)):
            raise ValueError(f"state.{key} is {value!r:.80}")
    return manifest


_FIELD_TYPES: dict[str, type] = {"step": int, "world_size": int, "state": dict, "versions": dict, "saved_at": float}


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
"""A check of the type of each key that readers use; absent keys are not checked here, but where they are needed."""


def _at(state: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key; the sections above it must have been checked."""
    *sections, name = key.split(".")
    for section in sections:
        state = state.get(section) or {}
    return state.get(name)


def saved_at(folder: Path) -> float:
    """Return when a checkpoint was saved, or the time of its manifest file if that is damaged or cannot be read."""
    path = folder / MANIFEST_NAME
    try:
        return float(parse_json(path.read_bytes())["saved_at"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return path.stat().st_mtime


def save_time(root: Path) -> float:
    """Return the time now, but later than that of every checkpoint in the folder.

    Otherwise, if the clock was set back or another host's clock is ahead, the new checkpoint would count as the oldest,
    and would be removed first.
    """
    last = max((saved_at(path.parent) for path in root.glob(f"step-*/{MANIFEST_NAME}")), default=0.0)
    return max(time.time(), math.nextafter(last, math.inf))


def remedy(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint: resume from the newest of those saved before it."""
    moment = saved_at(damaged) if is_complete(damaged) else float("inf")
    others = [path.parent for path in damaged.parent.glob(f"step-*/{MANIFEST_NAME}") if path.parent != damaged]
    before = [path for path in others if not path.is_symlink() and saved_at(path) < moment]
    if not before:
        return "no checkpoint precedes it"
    return f"resume from the one before it: `checkpoint.resume: {max(before, key=saved_at)}`"


def write_text(path: Path, text: str) -> None:
    """Write a file, and sync it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: dict[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())
