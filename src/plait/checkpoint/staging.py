"""A copy of this rank's pieces in host memory, so that training goes on while they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.checkpoint.pieces import Held


def copy_bytes(size: float, *, pinned: bool) -> float:
    """Memory for a copy of so many bytes: what torch pins comes in powers of two."""
    return 1 << (int(size) - 1).bit_length() if pinned and size else size


class Staging:
    """Memory that is taken at the first copy and kept for the next: as much as this rank writes, no more.

    Of tensors on a GPU the copies are pinned, so that they go at the full speed of the bus.
    """

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def copy(self, held: Sequence[Held]) -> list[Held]:
        """The same pieces, in host memory. When it returns, the originals may change."""
        device = None
        copies = []
        for each in held:
            room = self._room_for(each)
            if each.later is None:
                room.copy_(each.tensor, non_blocking=True)
            else:
                for rows, strip in zip(each.rows_at_once(), each.strips(), strict=True):
                    room[rows] = strip
            copies.append(Held(each.piece, room))
            if each.tensor.is_cuda:
                device = each.tensor.device
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        keys = {each.piece.key for each in held}
        self._room = {key: room for key, room in self._room.items() if key in keys}
        return copies

    def _room_for(self, each: Held) -> Tensor:
        room = self._room.get(each.piece.key)
        if room is None or room.shape != each.tensor.shape or room.dtype != each.tensor.dtype:
            room = torch.empty(each.tensor.shape, dtype=each.tensor.dtype, pin_memory=each.tensor.is_cuda)
            self._room[each.piece.key] = room
        return room
