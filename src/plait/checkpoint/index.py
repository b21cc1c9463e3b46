"""What lies where in a checkpoint: `index.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from plait.checkpoint.pieces import Piece
from plait.checkpoint.tensorfile import BLOCK, DTYPES, Slot
from plait.config import parse_json

NAME = "index.json"


class Stored(NamedTuple):
    """One piece of a tensor, in one file."""

    file: str
    begin: int
    """Byte of the file at which it starts."""
    start: tuple[int, ...]
    """Index, in the whole tensor, of its first element."""
    shape: tuple[int, ...]
    digests: tuple[str, ...]
    """Of every block; see `tensorfile.BLOCK`."""


class TensorRecord(NamedTuple):
    """A tensor by its whole shape, and the pieces that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Every tensor of a checkpoint."""

    tensors: Mapping[str, TensorRecord]

    @classmethod
    def of(cls, written: Iterable[tuple[Piece, Stored]]) -> Index:
        """From what all ranks wrote."""
        about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        pieces: dict[str, list[Stored]] = {}
        for piece, stored in written:
            about[piece.name] = piece.dtype, piece.whole
            pieces.setdefault(piece.name, []).append(stored)
        return cls(
            {name: TensorRecord(*about[name], tuple(sorted(pieces[name], key=_start))) for name in sorted(about)}
        )

    def text(self) -> str:
        """As it stands in the file."""
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
        """From the file's content, beside files of these `sizes`. Raises `ValueError` where it is malformed.

        Each tensor must be made up of its pieces exactly, and each piece must lie within one of the files:
        see [Note: pieces that do not fit together].
        """
        match parse_json(content):
            case {"tensors": dict(tensors)}:
                return cls({name: _record(name, fields, sizes) for name, fields in tensors.items()})
        raise ValueError("expected an object with `tensors`")

    def slots(self) -> dict[str, dict[str, Slot]]:
        """For each file what its head must say: the pieces in it, by their names there."""
        found: dict[str, dict[str, Slot]] = {}
        for name, record in self.tensors.items():
            for stored in record.pieces:
                piece = Piece(name, record.dtype, record.shape, stored.start, stored.shape)
                slot = Slot(record.dtype, stored.shape, stored.begin, piece.bytes)
                found.setdefault(stored.file, {})[piece.key] = slot
        return found


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def _record(name: str, fields: Any, sizes: Mapping[str, int]) -> TensorRecord:
    match fields:
        case {"dtype": str(word), "shape": [*shape], "pieces": [*pieces]} if word in _DTYPES and _are_lengths(shape):
            dtype, whole = _DTYPES[word], tuple(shape)
        case _:
            raise ValueError(f"{name} is described by {fields!r:.80}, expected dtype, shape and pieces")
    if math.prod(max(length, 1) for length in whole) * dtype.itemsize >= 1 << 63:
        raise ValueError(f"{name} has the shape {whole}, which no memory holds")
    record = TensorRecord(dtype, whole, tuple(_stored(name, piece, dtype, whole, sizes) for piece in pieces))
    if reason := untiled([(piece.start, piece.shape) for piece in record.pieces if 0 not in piece.shape], whole):
        raise ValueError(f"the pieces of {name} do not make up its shape {whole}: {reason}")
    return record


def _stored(name: str, fields: Any, dtype: torch.dtype, whole: tuple[int, ...], sizes: Mapping[str, int]) -> Stored:
    match fields:
        case {
            "file": str(file),
            "begin": int(begin),
            "start": [*start],
            "shape": [*shape],
            "digests": [*digests],
        } if _are_lengths([begin, *start, *shape]) and all(isinstance(each, str) for each in digests):
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
    return Stored(file, begin, tuple(start), tuple(shape), tuple(digests))


def _are_lengths(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


# [Note: pieces that do not fit together]
# Digests say that bytes are what was written. They do not say that they belong to this place of this tensor: an index
# whose pieces overlap, leave a hole or point at the bytes of another tensor would be loaded without a complaint. So
# the index is checked when it is read: cut along one dimension after the other, every place of a tensor must be in one
# piece. And when a file is opened, its own head must name the same tensors with the same shapes at the same bytes.
def untiled(pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], whole: tuple[int, ...]) -> str | None:
    """Why rectangles (first index, shape) do not cover a whole exactly once; None where they do."""
    if 0 in whole:
        return None
    if not pieces:
        return "a part of it is in none"
    if not whole:
        return None if len(pieces) == 1 else f"{len(pieces)} of them overlap"
    cuts = sorted({0, whole[0], *(start[0] for start, _ in pieces), *(start[0] + shape[0] for start, shape in pieces)})
    number = {cut: at for at, cut in enumerate(cuts)}
    slabs: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = [[] for _ in cuts[1:]]
    room = sum(math.prod(shape) for _, shape in pieces) - math.prod(whole)
    if room:
        return f"{room} elements are in several" if room > 0 else f"{-room} elements are in none"
    for start, shape in pieces:
        for at in range(number[start[0]], number[start[0] + shape[0]]):
            slabs[at].append((start[1:], shape[1:]))
    return next((reason for slab in slabs if (reason := untiled(slab, whole[1:]))), None)


def _start(piece: Stored) -> tuple[int, ...]:
    return piece.start
