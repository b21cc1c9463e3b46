"""One safetensors file, written straight from tensors and read in slices, with a digest of every block.

The files are ordinary safetensors: any reader of that format opens them. The `safetensors` library is not used, because
it cannot write a file larger than memory piece by piece, and cannot tell which bytes of a file are damaged.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
import xxhash
from torch import Tensor

BLOCK = 16 << 20
"""Bytes that one digest covers. Digests per block allow a slice to be verified without reading the whole tensor."""

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
"""The dtypes that safetensors has, by their names in that format."""


class Slot(NamedTuple):
    """The position of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which it starts."""
    bytes: int


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], about: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Slot]]:
    """Return the header of a file for these tensors, and the position of each."""
    # Wide dtypes first, so that every tensor is aligned to its own width.
    ordered = sorted(tensors, key=lambda item: -item[1].itemsize)
    fields: dict[str, object] = {} if about is None else {"__metadata__": dict(about)}
    offset = 0
    slots: dict[str, Slot] = {}
    for key, dtype, shape in ordered:
        assert key not in slots, f"two tensors are called {key}"
        size = math.prod(shape) * dtype.itemsize
        fields[key] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        slots[key] = Slot(dtype, tuple(shape), offset, size)
        offset += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {key: slot._replace(begin=slot.begin + len(header)) for key, slot in slots.items()}


def read_header(file: int) -> bytes:
    """Return the header of an open safetensors file: 8 bytes for its length, and its JSON. Or raise `ValueError`."""
    size = os.fstat(file).st_size
    length = os.pread(file, 8, 0)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or 8 + count > size:
        raise ValueError(f"truncated: {size} bytes do not hold its header")
    content = bytearray(count)
    if not read_all(file, memoryview(content), 8):
        raise ValueError(f"truncated: {size} bytes do not hold its header")
    return length + bytes(content)


def slots_in(header: bytes, size: int) -> dict[str, Slot]:
    """Return the positions of the tensors in a file of `size` bytes that begins with this header.

    Raise `ValueError` unless the tensors fill the file from the end of the header to the end of the file without
    overlap, each with as many bytes as its shape and dtype require.
    """
    try:
        fields = json.loads(header[8:], object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("its header is not a JSON object")
    fields.pop("__metadata__", None)
    slots = {name: _slot(name, field, len(header)) for name, field in fields.items()}
    end = len(header)
    for name, slot in sorted(slots.items(), key=lambda item: item[1][2:]):
        if slot.begin != end:
            raise ValueError(f"{name} begins at byte {slot.begin}, expected {end}, the end of the tensor before it")
        end += slot.bytes
    if end > size:
        raise ValueError(f"truncated: it has {size} bytes of {end}")
    if end < size:
        raise ValueError(f"it has {size} bytes, and its tensors end at byte {end}")
    return slots


def read_slots(path: Path) -> dict[str, Slot]:
    """Return the positions of the tensors of a safetensors file. Raise `ValueError` if it is malformed."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return slots_in(read_header(file), os.fstat(file).st_size)
    finally:
        os.close(file)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return fields


def _slot(name: str, field: object, header_size: int) -> Slot:
    match field:
        case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            type(length) is int and length >= 0 for length in shape
        ):
            if dtype_name not in DTYPES:
                raise ValueError(
                    f"{name} has the dtype {dtype_name}, which is not known; known are {', '.join(DTYPES)}"
                )
            size = math.prod(shape) * DTYPES[dtype_name].itemsize
            if end - begin != size:
                raise ValueError(f"{name} has {end - begin} bytes, and its shape {shape} of {dtype_name} takes {size}")
            return Slot(DTYPES[dtype_name], tuple(shape), header_size + begin, size)
    raise ValueError(f"{name} is described by {field!r:.80}, expected dtype, shape and data_offsets")


def digest(data: memoryview | bytes) -> str:
    """Return the digest of one block: XXH3, 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return view_bytes(tensor.detach().reshape(-1).view(torch.uint8))


def view_bytes(flat: Tensor) -> memoryview:
    """Return the memory of a flat CPU tensor of bytes."""
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def contiguous_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on its device: its own memory where that is contiguous, else a copy."""
    if not tensor.numel():
        return tensor.new_empty(0).view(torch.uint8)
    return tensor.detach().reshape(-1).view(torch.uint8)


class TensorFileWriter:
    """Writes a file whose names and shapes are known beforehand; tensors may come in any order, from any thread."""

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
        about: Mapping[str, str] | None = None,
    ) -> None:
        header, self.slots = make_header(tensors, about)
        self.header_digest = digest(header)
        self.size = len(header) + sum(slot.bytes for slot in self.slots.values())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._thread_local = threading.local()
        try:
            os.ftruncate(self._file, self.size)
            write_all(self._file, memoryview(header), 0)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, key: str, tensor: Tensor) -> list[str]:
        """Write one tensor, from any device, and return the digests of its blocks."""
        return self.write_strips(key, [tensor])

    def write_strips(self, key: str, strips: Iterable[Tensor]) -> list[str]:
        """Write one tensor, given as strips of consecutive rows, and return the digests of its blocks."""
        slot = self.slots[key]
        digests = []
        at = slot.begin
        for block in self._blocks(key, slot, strips):
            digests.append(digest(block))
            write_all(self._file, block, at)
            at += len(block)
        assert at == slot.begin + slot.bytes, f"{key}: {at - slot.begin} bytes, not {slot.bytes}"
        return digests

    def _blocks(self, key: str, slot: Slot, strips: Iterable[Tensor]) -> Iterator[memoryview]:
        left = slot.bytes
        begun = torch.empty(0, dtype=torch.uint8)  # the first bytes of a block that ends in a later strip
        for strip in strips:
            assert strip.dtype == slot.dtype, f"{key}: {strip.dtype}, not {slot.dtype}"
            assert tuple(strip.shape[1:]) == slot.shape[1:], f"{key}: rows of {tuple(strip.shape)}, not {slot.shape}"
            chunk = flat = contiguous_bytes(strip)
            at = 0
            while at < flat.numel():
                size = min(BLOCK, left)
                chunk = flat[at : at + size - len(begun)]
                at += len(chunk)
                if len(begun) or len(chunk) < size:
                    begun = torch.cat([begun, chunk.cpu()])
                else:
                    begun = chunk if chunk.device.type == "cpu" else self._on_host(chunk)
                if len(begun) == size:
                    left -= size
                    yield view_bytes(begun)
                    begun = begun[:0].clone()
            del strip, flat, chunk  # otherwise two strips would be in memory

    def _on_host(self, block: Tensor) -> Tensor:
        """Return a copy of a block in a pinned buffer, one per thread, so that memory does not grow with the file."""
        buffer: Tensor | None = getattr(self._thread_local, "buffer", None)
        if buffer is None:
            buffer = self._thread_local.buffer = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        return buffer[: block.numel()].copy_(block)

    def close(self) -> None:
        """Sync the file to the disk and close it, once all tensors are written."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def abandon(self) -> None:
        """Close a file that will not be completed."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        if error_type is None:
            self.close()
        else:
            self.abandon()


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write all of `data` at an offset of the file."""
    while len(data):
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


def read_all(file: int, into: memoryview, at: int) -> bool:
    """Fill `into` from an offset of the file; return whether the file was long enough."""
    while len(into):
        count = os.preadv(file, [into], at)
        if count == 0:
            return False
        into, at = into[count:], at + count
    return True
