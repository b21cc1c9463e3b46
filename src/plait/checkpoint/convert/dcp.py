"""Folders of `torch.distributed.checkpoint`, as FSDP writes them: whole tensors, put together from their chunks."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.convert.files import refusal
from plait.checkpoint.convert.names import STEP_WORDS, engine_state, guessed_paths, plait_name, without_wrapper
from plait.checkpoint.convert.source import Entry, Source
from plait.checkpoint.convert.unpickle import Record, unpickle
from plait.errors import CheckpointError

METADATA = ".metadata"

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
}
"""Everything that torch's writer puts into `.metadata`; their contents are read, the classes are not loaded."""


class _Index(Record):
    """A key of the table of chunks: the name of a tensor, and where in it a chunk begins."""

    fqn: str = ""
    offset: Sequence[int] | None = None  # left out of the file where it is none

    def _key(self) -> tuple[str, tuple[int, ...] | None]:
        return self.fqn, None if self.offset is None else tuple(self.offset)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self._key() == other._key()


def _known(module: str, name: str) -> Any:
    if name in _CLASSES.get(module, ()):
        return Record
    if (module, name) == (f"{_DCP}.metadata", "MetadataIndex"):
        return _Index
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    others = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): Record,
        ("collections", "OrderedDict"): dict,
        ("pathlib", "PosixPath"): Record,
        ("pathlib", "WindowsPath"): Record,
        ("pathlib._local", "PosixPath"): Record,
        ("pathlib._local", "WindowsPath"): Record,
    }
    return others.get((module, name))


class DcpSource(Source):
    """A checkpoint of `torch.distributed.checkpoint`: model and optimizer under the names that torch gives them.

    The folders that Plait itself wrote before it had a format of its own are of this kind too.
    """

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        self.path = path
        found = unpickle(path / METADATA, _known)
        try:
            self._tensors: dict[str, Any] = found.state_dict_metadata
            self._places = {key._key(): info for key, info in (found.storage_data or {}).items()}
            paths: Mapping[str, Sequence[Any]] = getattr(found, "planner_data", None) or {}
            described = {name: record for name, record in self._tensors.items() if hasattr(record, "chunks")}
            whole = {n: Entry(torch.Size(r.size), _dtype(r.properties)) for n, r in described.items()}
        except (AttributeError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path / METADATA} does not describe a checkpoint ({error}); copy it again"
            ) from error
        self._missing_files()
        manifest = _old_manifest(path)
        if manifest is None:
            guessed = guessed_paths(self._tensors) if not paths else {}
            names = {stored: plait_name(paths.get(stored) or guessed.get(stored, (stored,))) for stored in whole}
        else:
            names = {stored: stored for stored in whole}
        self._stored = _ours(names)
        self.entries = {name: whole[stored] for name, stored in self._stored.items()}
        self.state = {} if manifest is None else dict(manifest.get("state") or {})
        left = sorted(stored for stored, name in names.items() if name is None)
        self.facts = self._facts(manifest, left)
        if not self.state:
            self.state = engine_state(self, self._steps())

    def _facts(self, manifest: Mapping[str, Any] | None, left: Sequence[str]) -> dict[str, str]:
        files = {info.relative_path for info in self._places.values()}
        facts = {"files": str(len(files))}
        if manifest is not None:
            facts["written by"] = f"Plait {manifest.get('versions', {}).get('plait', '?')}, format 1"
            facts["step"] = str(manifest.get("step"))
            facts["ranks"] = str(manifest.get("world_size"))
        if left:
            facts["left out"] = f"{len(left)} tensors of neither model nor optimizer: {', '.join(left[:3])}" + (
                ", …" if len(left) > 3 else ""
            )
        return facts

    def _missing_files(self) -> None:
        wanted = sorted({str(info.relative_path) for info in self._places.values()})
        lost = [name for name in wanted if not (self.path / name).is_file()]
        if lost:
            shown = ", ".join(lost[:8]) + (", …" if len(lost) > 8 else "")
            raise CheckpointError(f"{self.path} lacks {len(lost)} of its {len(wanted)} files: {shown}; copy them too")

    def read(self, name: str) -> Tensor:
        """One whole tensor; of its chunks, one is in memory at a time."""
        stored = self._stored[name]
        entry, chunks = self.entries[name], self._tensors[stored].chunks
        if len(chunks) == 1 and torch.Size(chunks[0].sizes) == entry.shape:
            return self._chunk(stored, chunks[0], entry)
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        if covered != entry.shape.numel():
            raise CheckpointError(f"{self.path}: of {stored} {covered} of {entry.shape.numel()} elements were saved")
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in chunks:
            part = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[part].copy_(self._chunk(stored, chunk, entry))
        return whole

    def _chunk(self, stored: str, chunk: Any, entry: Entry) -> Tensor:
        info = self._places.get((stored, tuple(chunk.offsets))) or self._places.get((stored, None))
        if info is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {stored} lies; copy it again")
        tensor = self._load(info, stored)
        if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(chunk.sizes) or tensor.dtype != entry.dtype:
            raise CheckpointError(f"{self.path / info.relative_path}: {stored} is not the tensor that was saved")
        return tensor.detach()

    def _load(self, info: Any, stored: str) -> Any:
        path = self.path / info.relative_path
        if getattr(info, "transform_descriptors", None):
            how = ", ".join(info.transform_descriptors)
            raise CheckpointError(f"{path} is stored through an extension ({how}), which cannot be read here")
        try:
            with path.open("rb") as file:
                part = io.BufferedReader(_Part(file, info.offset, info.length))
                return torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the unpickler and the archive reader did
            raise refusal(path, error, stored) from error

    def _steps(self) -> int | None:
        """What a number beside the tensors says."""
        for word in STEP_WORDS:
            info = self._places.get((word, None))
            if info is not None and not hasattr(self._tensors.get(word), "chunks"):
                value = self._load(info, word)
                return value if isinstance(value, int) else None
        return None

    def close(self) -> None:
        """Nothing is open between two reads."""


class _Part(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(room)  # type: ignore[attr-defined]  # a buffered reader, which has it
        self._at += count
        return int(count)


def _dtype(properties: Any) -> torch.dtype:
    found = properties.args[0] if isinstance(properties.args, tuple) and properties.args else properties.dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{found!r} is no dtype")
    return found


def _ours(names: Mapping[str, str | None]) -> dict[str, str]:
    """Our name → the stored one."""
    known = {stored: name for stored, name in names.items() if name is not None}
    model = {stored: name for stored, name in known.items() if name.startswith("model.")}
    optim = {stored: name for stored, name in known.items() if name.startswith("optim.")}
    return {name: stored for stored, name in {**known, **without_wrapper(model), **without_wrapper(optim)}.items()}


def _old_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest that Plait wrote beside such a checkpoint."""
    file = path / "manifest.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and found.get("format") == 1 else None
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}); copy it again") from error
