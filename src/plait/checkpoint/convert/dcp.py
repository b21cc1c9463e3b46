"""Folders of `torch.distributed.checkpoint` (DCP), as FSDP writes them: model and optimizer by their names."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from plait.checkpoint.convert.files import refusal
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.checkpoint.convert.torchfile import STEP_WORDS, engine_state, guessed_paths, plait_name, without_wrapper
from plait.checkpoint.manifest import coverage_problem
from plait.config import is_below, read_json_object
from plait.errors import CheckpointError

# A restricted unpickler: it builds only objects of classes that the caller names, and calls nothing else.


Known = Callable[[str, str], Any]
"""Maps a class in a pickle (module, name) to the class that is built instead; None if the class is unknown."""


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, known: Known, path: Path) -> None:
        super().__init__(file)
        self._known, self._path = known, path

    def find_class(self, module: str, name: str) -> Any:
        allowed = self._known(module, name)
        if allowed is None:
            raise CheckpointError(
                f"{self._path} asks for {module}.{name}, which does not belong in such a file; no code of it was run. "
                "It was not written by DCP, or was manipulated: get it again from its source"
            )
        return allowed


def unpickle(path: Path, known: Known) -> Any:
    """Return the object in a pickle. Raise `CheckpointError` if it is damaged, or `known` returns None for a class."""
    try:
        with path.open("rb") as file:
            return _RestrictedUnpickler(file, known, path).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); copy it again") from error


class InertObject:
    """Stands in for an object of a known class: its state as it was pickled, without its methods."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state


# A folder of `torch.distributed.checkpoint`: its tensors, each assembled from its chunks.


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
    # Megatron also stores the save plans of its ranks, to reuse them at the next save.
    f"{_DCP}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
}
"""The classes of objects that torch pickles into `.metadata`. They are built as `InertObject`, and never imported."""


class _Index(InertObject):
    """A key of the chunk table (`MetadataIndex`): the name of a tensor, and the offset of a chunk in it."""

    fqn: str = ""
    offset: Sequence[int] | None = None  # the file omits it if it is None

    def _key(self) -> tuple[str, tuple[int, ...] | None]:
        return self.fqn, None if self.offset is None else tuple(self.offset)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self._key() == other._key()


def _known(module: str, name: str) -> Any:
    if name in _CLASSES.get(module, ()):
        return InertObject
    if (module, name) == (f"{_DCP}.metadata", "MetadataIndex"):
        return _Index
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    others = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): InertObject,
        ("collections", "OrderedDict"): dict,
        ("pathlib", "PosixPath"): InertObject,
        ("pathlib", "WindowsPath"): InertObject,
        ("pathlib._local", "PosixPath"): InertObject,
        ("pathlib._local", "WindowsPath"): InertObject,
    }
    return others.get((module, name))


class Chunks:
    """The tensors of a DCP folder, under the names that they were saved with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata = unpickle(path / METADATA, _known)
        try:
            self._records: dict[str, Any] = metadata.state_dict_metadata
            self._locations = {key._key(): info for key, info in (metadata.storage_data or {}).items()}
            self.paths: Mapping[str, Sequence[Any]] = getattr(metadata, "planner_data", None) or {}
            """The path of keys of each name, where the writer stored it."""
            described = {name: record for name, record in self._records.items() if hasattr(record, "chunks")}
            self.tensors = {n: TensorEntry(torch.Size(r.size), _dtype(r.properties)) for n, r in described.items()}
            for name, record in described.items():
                _check_chunks(name, record)
            if wrong := [
                str(info.relative_path) for info in self._locations.values() if not is_below(str(info.relative_path))
            ]:
                raise ValueError(f"it names the file {wrong[0]!r}, which is not in this folder")
            if any(_is_bad_range(info) for info in self._locations.values()):
                raise ValueError("an offset or length in a file is not a number")
        except (AttributeError, TypeError, KeyError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(
                f"{path / METADATA} does not describe a checkpoint ({error}); copy it again"
            ) from error
        self._missing_files()

    @property
    def names(self) -> Sequence[str]:
        """The names of everything that was saved, tensors or not."""
        return list(self._records)

    @property
    def files(self) -> int:
        """The number of files of the folder."""
        return len({info.relative_path for info in self._locations.values()})

    def _missing_files(self) -> None:
        wanted = sorted({str(info.relative_path) for info in self._locations.values()})
        lost = [name for name in wanted if not (self._path / name).is_file()]
        if lost:
            shown = ", ".join(lost[:8]) + (", …" if len(lost) > 8 else "")
            raise CheckpointError(f"{self._path} lacks {len(lost)} of its {len(wanted)} files: {shown}; copy them too")

    def read(self, stored: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return a whole tensor, or its part at `index` in the first dimensions; one chunk is in memory at a time."""
        entry, chunks = self.tensors[stored], self._records[stored].chunks
        if not index and len(chunks) == 1 and torch.Size(chunks[0].sizes) == entry.shape:
            return self._chunk(stored, chunks[0], entry)
        wanted = torch.empty(entry.shape[len(index) :], dtype=entry.dtype)
        covered = 0
        for chunk in chunks:
            begins, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            first = tuple(at - begin for at, begin in zip(index, begins, strict=False))
            if all(0 <= at < size for at, size in zip(first, sizes, strict=False)):
                rest = zip(begins[len(index) :], sizes[len(index) :], strict=True)
                region = tuple(slice(begin, begin + size) for begin, size in rest)
                wanted[region].copy_(self._chunk(stored, chunk, entry)[first])
                covered += math.prod(sizes[len(index) :])
        if covered != wanted.numel():
            raise CheckpointError(f"{self._path}: of {stored} {covered} of {wanted.numel()} elements were saved")
        return wanted

    def _chunk(self, stored: str, chunk: Any, entry: TensorEntry) -> Tensor:
        info = self._locations.get((stored, tuple(chunk.offsets))) or self._locations.get((stored, None))
        if info is None:
            raise CheckpointError(f"{self._path / METADATA} does not say where {stored} lies; copy it again")
        tensor = self._load(info, stored)
        if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(chunk.sizes) or tensor.dtype != entry.dtype:
            raise CheckpointError(f"{self._path / info.relative_path}: {stored} is not the tensor that was saved")
        return tensor.detach()

    def value(self, stored: str) -> Any:
        """Return a value other than a tensor; None if it is absent."""
        info = self._locations.get((stored, None))
        if info is None or hasattr(self._records.get(stored), "chunks"):
            return None
        return self._load(info, stored)

    def _load(self, info: Any, stored: str) -> Any:
        path = self._path / info.relative_path
        if getattr(info, "transform_descriptors", None):
            how = ", ".join(info.transform_descriptors)
            raise CheckpointError(f"{path} is stored through an extension ({how}), which cannot be read here")
        try:
            with path.open("rb") as file:
                section = io.BufferedReader(_FileSection(file, info.offset, info.length))
                return torch.load(section, map_location="cpu", weights_only=True)
        except Exception as error:  # torch passes on any exception of the unpickler and the archive reader
            raise refusal(path, error, stored) from error


def _check_chunks(name: str, record: Any) -> None:
    """Raise an error unless the chunks cover their tensor exactly. [Note: pieces that do not fit together]"""
    whole = tuple(record.size)
    pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in record.chunks]
    for start, shape in pieces:
        if not len(start) == len(shape) == len(whole):
            raise ValueError(f"a chunk of {name} from {start} with the shape {shape} is not of its shape {whole}")
        if any(a < 0 or n < 0 or a + n > most for a, n, most in zip(start, shape, whole, strict=True)):
            raise ValueError(f"a chunk of {name} from {start} with the shape {shape} leaves its shape {whole}")
    if reason := coverage_problem([piece for piece in pieces if 0 not in piece[1]], whole):
        raise ValueError(f"the chunks of {name} do not cover its shape {whole}: {reason}")


def _is_bad_range(info: Any) -> bool:
    return not all(type(number) is int and number >= 0 for number in (info.offset, info.length))


class _FileSection(io.RawIOBase):
    """A byte range of a file, as a file."""

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
        target = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(target)  # type: ignore[attr-defined]  # a buffered reader, which has it
        self._at += count
        return int(count)


def _dtype(properties: Any) -> torch.dtype:
    dtype = properties.args[0] if isinstance(properties.args, tuple) and properties.args else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is not a dtype")
    return dtype


class DcpSource(Source):
    """A checkpoint of `torch.distributed.checkpoint`: model and optimizer under the names that torch gives them.

    Plait's own checkpoints before format 2 are in this format too.
    """

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chunks = chunks = Chunks(path)
        manifest = _old_manifest(path)
        if manifest is None:
            guessed = guessed_paths(chunks.names) if not chunks.paths else {}
            names = {n: plait_name(chunks.paths.get(n) or guessed.get(n, (n,))) for n in chunks.tensors}
        else:
            names = {stored: stored for stored in chunks.tensors}
        self._stored = _ours(names)
        self.entries = {name: chunks.tensors[stored] for name, stored in self._stored.items()}
        self.state = {} if manifest is None else dict(manifest.get("state") or {})
        left = sorted(stored for stored, name in names.items() if name is None)
        self.facts = self._facts(manifest, left)
        if not self.state:
            self.state = engine_state(self, self._steps())

    def _facts(self, manifest: Mapping[str, Any] | None, left: Sequence[str]) -> dict[str, str]:
        facts = {"files": str(self._chunks.files)}
        if manifest is not None:
            facts["written by"] = f"Plait {manifest.get('versions', {}).get('plait', '?')}, format 1"
            facts["step"] = str(manifest.get("step"))
            facts["ranks"] = str(manifest.get("world_size"))
        if left:
            facts["left out"] = f"{len(left)} tensors of neither model nor optimizer: {', '.join(left[:3])}" + (
                ", …" if len(left) > 3 else ""
            )
        return facts

    def read(self, name: str) -> Tensor:
        """Return one whole tensor; one of its chunks is in memory at a time."""
        return self._chunks.read(self._stored[name])

    def _steps(self) -> int | None:
        """Return the step count that was saved beside the tensors, if any."""
        for key in STEP_WORDS:
            value = self._chunks.value(key)
            if value is not None:
                return value if isinstance(value, int) else None
        return None

    def close(self) -> None:
        """Do nothing: no file is open between two reads."""


def _ours(names: Mapping[str, str | None]) -> dict[str, str]:
    """Return the stored name for each of Plait's names."""
    known = {stored: name for stored, name in names.items() if name is not None}
    model = {stored: name for stored, name in known.items() if name.startswith("model.")}
    optim = {stored: name for stored, name in known.items() if name.startswith("optim.")}
    return {name: stored for stored, name in {**known, **without_wrapper(model), **without_wrapper(optim)}.items()}


def _old_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest that Plait wrote to a DCP folder (checkpoints of format 1); None if there is none."""
    file = path / "manifest.json"
    if not file.is_file():
        return None
    manifest = read_json_object(file, CheckpointError)
    return manifest if manifest.get("format") == 1 else None
