"""The Triton form of `adam_many`: one launch over many tensors, by a table of their addresses.

A program updates one piece of one tensor. It reads the gradient, the fp32 weight and both moments, and writes the
weight, the moments and the rounded weight: nothing passes through memory twice, and no tensor costs a launch of its
own. Scale and skip are read on the device, so the host need not know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.ops.triton import HAS_TRITON, on_device_of

BLOCK = 1024
"""Numbers that a program looks at together."""
PIECE = 8 * BLOCK
"""Numbers that a program updates, one block after another."""
WARPS = 4

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _address(table, row, count, index, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        """Where one of the tensors of an entry begins."""
        address = tl.load(table + row * count + index).to(tl.pointer_type(dtype))
        if aligned:
            address = tl.multiple_of(address, 16)  # lets several numbers travel in one access
        return address

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        table,
        pieces,
        rates,
        scale,
        found_inf,
        count,
        kept,
        decay,
        gain1,
        beta2,
        gain2,
        eps,
        weight_type: tl.constexpr,
        grad_type: tl.constexpr,
        room_type: tl.constexpr,
        has_room: tl.constexpr,
        has_scale: tl.constexpr,
        has_skip: tl.constexpr,
        aligned: tl.constexpr,
        blocks: tl.constexpr,
        block: tl.constexpr,
    ):
        """One program a piece."""
        piece = tl.program_id(0).to(tl.int64)
        index = tl.load(pieces + 2 * piece).to(tl.int64)
        begin = tl.load(pieces + 2 * piece + 1).to(tl.int64) * (blocks * block)
        weight = _address(table, 0, count, index, weight_type, aligned)
        grad = _address(table, 1, count, index, grad_type, aligned)
        mean = _address(table, 2, count, index, weight_type, aligned)
        square = _address(table, 3, count, index, weight_type, aligned)
        room = _address(table, 4, count, index, room_type, aligned)
        length = tl.load(table + 5 * count + index)
        if has_skip:
            length = tl.where(tl.load(found_inf) == 0, length, 0)
        if aligned:
            length = tl.multiple_of(length, 16)
        rate = tl.load(rates + index)
        root = tl.load(rates + count + index)
        factor = 1.0
        if has_scale:
            factor = 1.0 / tl.load(scale)
        for number in range(blocks):
            at = begin + number * block + tl.arange(0, block)
            inside = at < length
            w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
            m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
            g += w * decay
            m += (g - m) * gain1
            v = v * beta2 + g * g * gain2
            w = w * kept - rate * m / (tl.sqrt(v) / root + eps)
            tl.store(weight + at, w.to(weight_type), mask=inside)
            tl.store(mean + at, m.to(weight_type), mask=inside)
            tl.store(square + at, v.to(weight_type), mask=inside)
            if has_room:
                tl.store(room + at, w.to(room_type), mask=inside)


class Kind(NamedTuple):
    """What entries of one launch have in common."""

    weight: torch.dtype
    grad: torch.dtype
    room: torch.dtype | None
    aligned: bool
    """Whether all begin and end where wide accesses do."""


class Entry(NamedTuple):
    """What belongs to one weight. All of one shape, and dense in the same order."""

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    room: Tensor | None
    """Where the new weight is also written, rounded."""

    @property
    def kind(self) -> Kind:
        """Which launch it belongs to."""
        tensors = [self.weight, self.grad, self.mean, self.square, *([] if self.room is None else [self.room])]
        aligned = self.weight.numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return Kind(self.weight.dtype, self.grad.dtype, None if self.room is None else self.room.dtype, aligned)


class Launch(NamedTuple):
    """What the kernel has to know of the entries that it updates at once."""

    kind: Kind
    lengths: list[int]
    chosen: Tensor | None
    """Which of all entries they are; None where they are all."""
    table: Tensor
    pieces: Tensor


class Tables:
    """The launches that update a list of entries, kept on the device as long as nothing in the list moves.

    Whether something moved is asked in every step, so it is asked in one sweep: for a model of many small tensors it
    is the greater part of an update.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._launches: list[Launch] = []

    def of(self, entries: Sequence[Entry]) -> list[Launch]:
        """One for each kind of them."""
        seen: list[Any] = []
        for weight, grad, mean, square, room in entries:
            seen += (weight.data_ptr(), grad.data_ptr(), mean.data_ptr(), square.data_ptr(), grad.dtype, weight.numel())
            seen.append(0 if room is None else room.data_ptr())
        if seen != self._seen:
            kinds = [entry.kind for entry in entries]
            self._launches = [self._launch(kind, kinds, entries) for kind in dict.fromkeys(kinds)]
            self._seen = seen
        return self._launches

    def _launch(self, kind: Kind, kinds: list[Kind], entries: Sequence[Entry]) -> Launch:
        chosen = [index for index, found in enumerate(kinds) if found == kind]
        part = [entries[index] for index in chosen]
        device = part[0].weight.device
        lengths = [entry.weight.numel() for entry in part]
        rows = [entry.weight.data_ptr() for entry in part]
        rows += [entry.grad.data_ptr() for entry in part]
        rows += [entry.mean.data_ptr() for entry in part]
        rows += [entry.square.data_ptr() for entry in part]
        rows += [0 if entry.room is None else entry.room.data_ptr() for entry in part]
        known = next((launch.pieces for launch in self._launches if launch.lengths == lengths), None)
        if known is None:
            pairs = [(index, piece) for index, n in enumerate(lengths) for piece in range(-(-n // PIECE))]
            known = _sent(torch.tensor(pairs, dtype=torch.int32).view(-1, 2), device)
        picked = None if len(chosen) == len(kinds) else _sent(torch.tensor(chosen), device)
        return Launch(kind, lengths, picked, _sent(torch.tensor(rows + lengths), device), known)


def adam_many_triton(
    kept: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    rates: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    launch: Launch,
) -> None:
    """Update entries of one kind. `rates` holds each one's rate and the root of its second correction, fp32."""
    kind, lengths, _, table, pieces = launch
    if len(pieces) == 0:
        return  # a rank may have no part of any of them
    # What is close to 1 is worked out here: the kernel gets its numbers in fp32.
    with on_device_of(table):
        _kernel[(len(pieces),)](
            table,
            pieces,
            rates,
            rates if scale is None else scale,
            rates if found_inf is None else found_inf,
            len(lengths),
            kept,
            decay,
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            eps,
            weight_type=_TYPES[kind.weight],
            grad_type=_TYPES[kind.grad],
            room_type=_TYPES[kind.room or kind.weight],
            has_room=kind.room is not None,
            has_scale=scale is not None,
            has_skip=found_inf is not None,
            aligned=kind.aligned,
            blocks=PIECE // BLOCK,
            block=BLOCK,
            num_warps=WARPS,
        )


_TYPES: dict[torch.dtype, Any] = (
    {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if HAS_TRITON else {}
)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
