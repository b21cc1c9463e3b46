"""Tensors in one file, by name, read one at a time into memory of their own.

Files are read, not memory-mapped: pages of a mapped file count as memory of the process until the kernel evicts them,
so the memory of a conversion would appear to grow with every tensor that it reads, also against a memory limit.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from plait.checkpoint.convert.source import TensorEntry
from plait.checkpoint.tensorfile import as_bytes, read_all, read_slots
from plait.errors import CheckpointError

# A file of `torch.save`, opened without executing code in it and without reading its tensors.
#
# The unpickler builds containers, and for each tensor its position in the file. A plain state dict needs nothing else,
# so with `strict` a file that names any other class or function is refused.
#
# [Note: inert objects]
# DeepSpeed pickles its own objects beside the tensors: loss scalers, enums, addresses of fragments. `torch.load` would
# either import and build them, which executes whatever a file names, or refuse the file. Here every unknown class or
# function is replaced by a class that only stores its arguments. So a file can be opened without the packages that
# wrote it, and a file that names `os.system` gets an object that does nothing.


class Inert:
    """Stands in for an object that was not built: the name of its class, its arguments and its state."""

    known_as = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> Self:
        """Return an object that stores its arguments. Done here, as pickle may build an object without `__init__`."""
        self = super().__new__(cls)
        self.args = args
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **_: Any) -> Inert:
        """Return another inert object in place of the result."""
        return Inert(*args)

    # The methods that an unpickler calls on subclasses of dict and list.
    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Nothing is kept."""

    def extend(self, items: Any) -> None:
        """Nothing is kept."""

    def __repr__(self) -> str:
        return f"<{self.known_as or 'something'}, not opened>"


def field(thing: Any, key: str, default: Any = None) -> Any:
    """Return an attribute of an inert object; `default` if it has none of this name."""
    state = thing.state if isinstance(thing, Inert) else None
    return state.get(key, default) if isinstance(state, dict) else default


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """The position, shape and dtype of a tensor in a file."""

    path: Path
    begin: int
    """Byte of the file at which its first element lies."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def read(self) -> Tensor:
        """Return the whole tensor."""
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(reach if self.numel else 0, dtype=self.dtype)
        self.fill(flat, 0)
        return flat.as_strided(self.shape, self.stride).contiguous()

    def fill(self, into: Tensor, start: int) -> None:
        """Read into the flat tensor `into` as many elements as it has, from element `start` on."""
        if into.numel() == 0:
            return
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                whole = read_all(file, as_bytes(into), self.begin + start * self.dtype.itemsize)
            finally:
                os.close(file)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read any more: {error.strerror}") from error
        if not whole:
            raise CheckpointError(f"{self.path} ends in the middle of a tensor; copy it again")


class _Storage(NamedTuple):
    begin: int
    bytes: int
    dtype: torch.dtype


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_CONTAINERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("collections", "Counter"): Counter,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.torch_version", "TorchVersion"): str,
    # Pickles name it as the type of a tensor; it is never built.
    ("torch", "Tensor"): Inert,
    ("torch.nn.parameter", "Parameter"): Inert,
    ("torch.nn.parameter", "Buffer"): Inert,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path, offsets: dict[str, tuple[int, int]], *, strict: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._offsets, self._strict = path, offsets, strict
        self._known = _CONTAINERS | {
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): _first,
            ("torch._utils", "_rebuild_parameter_with_state"): _first,
            ("torch._tensor", "_rebuild_from_type_v2"): _call_inner,
            ("_codecs", "encode"): _bytes,
        }

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get(("builtins" if module == "__builtin__" else module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if self._strict:
            raise asks_for(self._path, f"{module}.{name}")
        return type(name.rpartition(".")[2], (Inert,), {"known_as": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(*self._offsets[str(key)], dtype)

    def _tensor(self, storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> PickledTensor:
        if len(rest) > 2 and rest[2]:
            raise ValueError(f"it holds a tensor with metadata that changes its values: {rest[2]}")
        if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)) or len(size) != len(
            stride
        ):
            raise ValueError(f"it holds a tensor of size {size!r:.80} and stride {stride!r:.80} at {offset!r:.20}")
        reach = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if (offset + reach) * storage.dtype.itemsize > storage.bytes:
            raise ValueError(
                f"it holds a tensor of {reach} elements at {offset}, which leaves its {storage.bytes} bytes"
            )
        begin = storage.begin + offset * storage.dtype.itemsize
        return PickledTensor(self._path, begin, storage.dtype, torch.Size(size), tuple(stride))

    def _tensor_of_dtype(
        self, storage: _Storage, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
    ) -> PickledTensor:
        return self._tensor(_Storage(storage.begin, storage.bytes, dtype), offset, size, stride)


def _first(data: Any, *_: Any) -> Any:
    return data


def _call_inner(function: Any, _type: Any, args: tuple[Any, ...], _state: Any) -> Any:
    return function(*args)


def _bytes(text: str, encoding: str) -> bytes:
    """Return bytes that were pickled as text, the way `torch.save` pickles them."""
    return text.encode(encoding)


def asks_for(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that names a class or function to import or call."""
    return CheckpointError(
        f"{path} asks for {what}, but no code from a checkpoint is executed. If you trust the file, load it with the "
        "program that wrote it, and save its state dict alone"
    )


def open_file(path: Path, *, strict: bool = False) -> Any:
    """Return the content of a file, with a `PickledTensor` for each tensor. [Note: inert objects]

    `strict`: anything that is neither a container nor a tensor is an error, not an inert object.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
                raise ValueError("it is compressed, unlike files of torch.save")
            order = archive.read(records["byteorder"]).decode() if "byteorder" in records else "little"
            if order != sys.byteorder:
                raise ValueError(f"its byte order is {order}-endian, this machine's is not")
            offsets = {
                name.removeprefix("data/"): (data_begins(file, record.header_offset), record.file_size)
                for name, record in records.items()
                if name.startswith("data/")
            }
            return _Unpickler(archive.read(records["data.pkl"]), path, offsets, strict=strict).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise CheckpointError(_unreadable(path, error)) from error


def data_begins(file: BinaryIO, header: int) -> int:
    """Return the offset of the bytes of a zip record whose header begins at `header`.

    The length of the header is stored in the header alone, not in the directory at the end of the archive.
    """
    file.seek(header + 26)
    lengths = file.read(4)
    return header + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _unreadable(path: Path, error: Exception) -> str:
    names = sorted(p.name for p in path.parent.glob("*.pt")) if path.parent.is_dir() else []
    some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    if not path.exists():
        return f"{path} is missing; {path.parent} holds {some or 'no .pt file'}"
    return (
        f"{path} ({path.stat().st_size} bytes) cannot be read: {type(error).__name__}: {error}. It is damaged or "
        f"incomplete: copy it again{f'. Found beside it: {some}' if some else ''}"
    )


class SafetensorsFile:
    """A safetensors file, written by any program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._slots = read_slots(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not a complete safetensors file ({error}); copy it again") from error
        self.entries = {name: TensorEntry(torch.Size(slot.shape), slot.dtype) for name, slot in self._slots.items()}
        self._file = os.open(path, os.O_RDONLY)

    def read(self, name: str) -> Tensor:
        """Return one whole tensor."""
        return read_bytes(self._file, self._slots[name].begin, self.entries[name], self.path)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


FileTensor = PickledTensor | Tensor
"""A tensor of a file of `torch.save`: its position, or, in the format before torch 1.6, the tensor itself."""


class TorchFile:
    """A file of `torch.save`, whose tensors are located but not loaded. No code in it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = open_file(path, strict=True) if zipfile.is_zipfile(path) else load_values(path)
        """What was saved, with a `FileTensor` in place of each tensor."""

    def close(self) -> None:
        """Do nothing: no file is open between two reads."""


def read_file_tensor(tensor: FileTensor) -> Tensor:
    """Return the tensor with its values."""
    return tensor.detach() if isinstance(tensor, Tensor) else tensor.read()


def load_values(path: Path) -> Any:
    """Return the content of a file of `torch.save` with numbers, texts and tensors. Refuse one that names code to run.

    The format before torch 1.6, which is not a zip archive, can only be loaded in this way.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch passes on any exception of the unpickler
        raise refusal(path, error) from error


def refusal(path: Path, error: Exception, what: str = "it") -> CheckpointError:
    """Return the error for a file that torch refused to load, or of which it refused the entry `what`."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    if match:
        return asks_for(path, match[1])
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(f"{path}: {what} is incomplete, or not of torch.save ({first}); copy it again")


def tensors_in(content: Any) -> list[FileTensor]:
    """Return every tensor in nested containers."""
    if isinstance(content, FileTensor):
        return [content]
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        return [tensor for value in content for tensor in tensors_in(value)]
    return []


def read_bytes(file: int, begin: int, entry: TensorEntry, path: Path) -> Tensor:
    """Return a tensor whose bytes lie in a file from `begin` on. Raise `CheckpointError` if the file is too short."""
    if begin < 0 or begin + entry.bytes > os.fstat(file).st_size:  # checked before memory is allocated
        raise CheckpointError(f"{path} is truncated: it ends before byte {begin + entry.bytes}; copy it again")
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if entry.bytes and not read_all(file, as_bytes(tensor), begin):
        raise CheckpointError(f"{path} is truncated: it ends before byte {begin + entry.bytes}; copy it again")
    return tensor
