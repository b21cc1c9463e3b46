"""What lies where in a checkpoint: `index.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from plait.checkpoint.pieces import Piece

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
    def parse(cls, text: str) -> Index:
        """From the file's text."""
        return cls({name: _record(fields) for name, fields in json.loads(text)["tensors"].items()})


def _record(fields: Mapping[str, Any]) -> TensorRecord:
    pieces = tuple(
        Stored(p["file"], p["begin"], tuple(p["start"]), tuple(p["shape"]), tuple(p["digests"]))
        for p in fields["pieces"]
    )
    return TensorRecord(getattr(torch, fields["dtype"]), tuple(fields["shape"]), pieces)


def _start(piece: Stored) -> tuple[int, ...]:
    return piece.start
