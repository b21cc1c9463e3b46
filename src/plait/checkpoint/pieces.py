"""Which slices of which tensors this rank holds, and which of them it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.tensorfile import BLOCK
from plait.distributed import Channel, is_sharded

STRIP = 4 * BLOCK
"""Size of a strip: the rows of a deferred tensor that are converted at a time; see [Note: a few rows at a time]."""


# Tensors of a checkpoint that training holds in another form, such as moments in 8 bits.
#
# [Note: a few rows at a time] Converting a whole tensor to the dtype of the checkpoint would take several times the
# memory that the packed form saves. So a thread that writes unpacks one strip of rows, writes it and frees it before
# the next one, and a thread that reads packs each strip before it reads the next one.


@dataclass(frozen=True, slots=True)
class DeferredTensor:
    """A tensor that is unpacked when it is written, and packed when it is read; see [Note: a few rows at a time]."""

    like: Tensor
    """A tensor of the same shape and the same sharding; its values and dtype are not used."""
    dtype: torch.dtype
    make_rows: Callable[[int, int], Tensor]
    """`make_rows(begin, end)` returns these rows of this rank's shard, unpacked, on the host."""
    store_rows: Callable[[int, Tensor], None]
    """`store_rows(begin, rows)` packs `rows` and stores them in this rank's shard, from row `begin` on."""

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.like.shape


Entry = Tensor | DeferredTensor
"""A tensor to save or load, as the run holds it."""


class Piece(NamedTuple):
    """A slice of a tensor: its position and shape, without values, so that it is cheap to send between ranks."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's name, followed by `@` and the first index if it is not the whole tensor."""
        return self.name if self.shape == self.whole else f"{self.name}@{','.join(map(str, self.start))}"

    def rows(self, begin: int, end: int) -> Piece:
        """Return the part of this piece from row `begin` to `end`."""
        start, shape = self.start, self.shape
        return self._replace(start=(start[0] + begin, *start[1:]), shape=(end - begin, *shape[1:]))

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece, and the tensor in which this rank holds it."""

    piece: Piece
    tensor: Tensor
    """Without values (on the meta device) if `deferred` is set."""
    deferred: DeferredTensor | None = None

    def strips(self) -> Iterator[Tensor]:
        """Yield its values in strips of rows, see [Note: a few rows at a time]; all at once unless it is deferred."""
        if self.deferred is None:
            yield self.tensor
            return
        for rows in self.rows_at_once():
            yield self.deferred.make_rows(rows.start, rows.stop)

    def rows_at_once(self) -> Iterator[slice]:
        """Return the rows of each strip."""
        rows = self.piece.shape[0]
        step = max(1, STRIP * rows // max(self.piece.bytes, 1))
        return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def held_pieces(entries: Mapping[str, Entry]) -> list[HeldPiece]:
    """Return the pieces that this rank holds; there is none for a tensor of which it has no shard."""
    tensors = {name: entry.like if isinstance(entry, DeferredTensor) else entry for name, entry in entries.items()}
    return [_with_deferred(held, entries[held.piece.name]) for held in _pieces_of(tensors)]


def _with_deferred(held: HeldPiece, entry: Entry) -> HeldPiece:
    """Return the piece; if `entry` is deferred, with the checkpoint's dtype and `deferred` set in place of values."""
    if isinstance(entry, Tensor):
        return held
    piece = held.piece._replace(dtype=entry.dtype)
    return HeldPiece(piece, torch.empty(piece.shape, dtype=piece.dtype, device="meta"), entry)


def _pieces_of(tensors: Mapping[str, Tensor]) -> list[HeldPiece]:
    pieces = []
    sharded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            sharded[name] = tensor
            continue
        shape = tuple(tensor.shape)
        pieces.append(HeldPiece(Piece(name, tensor.dtype, shape, (0,) * len(shape), shape), tensor.detach()))
    if sharded:
        pieces.extend(_shards_of(sharded))
    return pieces


def _shards_of(tensors: Mapping[str, Tensor]) -> list[HeldPiece]:
    # [Note: DTensor is loaded late]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    # The planner of torch's DCP computes the offsets of a shard for every kind of placement.
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    shards = []
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        name = item.index.fqn
        shape, start = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
        if 0 in shape and 0 not in data.size:
            continue
        local = planner.resolve_data(item)
        assert isinstance(local, Tensor)
        shards.append(HeldPiece(Piece(name, data.properties.dtype, tuple(data.size), start, shape), local.detach()))
    return shards


class WriteAssignment:
    """Decides which rank writes a piece that several ranks hold. It is reused while the pieces do not change."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known: list[Piece] | None = None
        self._mine: list[int] = []

    def mine(self, held_pieces: Sequence[HeldPiece]) -> list[HeldPiece]:
        """Return the pieces that this rank writes; the ranks together write every piece once. Collective."""
        pieces = [held.piece for held in held_pieces]
        if self._channel.any(pieces != self._known):
            gathered = self._channel.gather(pieces)
            self._mine = self._channel.scatter(None if gathered is None else assign_writes(gathered))
            self._known = pieces
        return [held_pieces[index] for index in self._mine]


def assign_writes(held: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """Return for each rank the indices of its pieces that it writes, so that all write about as many bytes."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(held):
        for index, piece in enumerate(pieces):
            holders.setdefault((piece.name, piece.start), []).append((rank, index))
    load = [0] * len(held)
    mine: list[list[int]] = [[] for _ in held]

    def assign(rank: int, index: int) -> None:
        mine[rank].append(index)
        load[rank] += held[rank][index].bytes

    shared = []
    for candidates in holders.values():
        if len(candidates) == 1:
            assign(*candidates[0])
        else:
            shared.append(candidates)
    shared.sort(key=lambda candidates: -held[candidates[0][0]][candidates[0][1]].bytes)
    for candidates in shared:
        assign(*min(candidates, key=lambda candidate: load[candidate[0]]))
    return [sorted(numbers) for numbers in mine]


# A copy of this rank's pieces in host memory, so that training continues while they are written.


def copy_bytes(size: float, *, pinned: bool) -> float:
    """Return the bytes that a copy of `size` bytes takes: torch rounds pinned memory up to a power of two."""
    return 1 << (int(size) - 1).bit_length() if pinned and size else size


class Staging:
    """Host buffers for the pieces that this rank writes, allocated at the first copy and reused for later ones.

    Buffers for tensors on a GPU are pinned, so that copies run at the full speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, pieces: Sequence[HeldPiece]) -> list[HeldPiece]:
        """Copy the pieces to host memory, and return the copies. When this returns, the originals may change."""
        device = None
        copies = []
        for held in pieces:
            buffer = self._buffer(held)
            if held.deferred is None:
                buffer.copy_(held.tensor, non_blocking=True)
            else:
                for rows, strip in zip(held.rows_at_once(), held.strips(), strict=True):
                    buffer[rows] = strip
            copies.append(HeldPiece(held.piece, buffer))
            if held.tensor.is_cuda:
                device = held.tensor.device
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        keys = {held.piece.key for held in pieces}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in keys}
        return copies

    def _buffer(self, held: HeldPiece) -> Tensor:
        buffer = self._buffers.get(held.piece.key)
        if buffer is None or buffer.shape != held.tensor.shape or buffer.dtype != held.tensor.dtype:
            buffer = torch.empty(held.tensor.shape, dtype=held.tensor.dtype, pin_memory=held.tensor.is_cuda)
            self._buffers[held.piece.key] = buffer
        return buffer
