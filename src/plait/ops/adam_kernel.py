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
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

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


class Entry(NamedTuple):
    """What belongs to one weight. All of one shape, and dense in the same order."""

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    room: Tensor | None
    """Where the new weight is also written, rounded."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What entries of one launch have in common: formats, and whether all begin and end where wide accesses do."""
        tensors = [self.weight, self.grad, self.mean, self.square, *([] if self.room is None else [self.room])]
        aligned = self.weight.numel() % 16 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return self.weight.dtype, self.grad.dtype, None if self.room is None else self.room.dtype, aligned


class Tables:
    """Addresses and pieces of each launch, kept on the device as long as they stay the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], Tensor, Tensor]] = {}

    def of(self, number: int, entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
        """The table and the pieces of the launch with this number."""
        rows: list[int] = [entry.weight.data_ptr() for entry in entries]
        rows += [entry.grad.data_ptr() for entry in entries]
        rows += [entry.mean.data_ptr() for entry in entries]
        rows += [entry.square.data_ptr() for entry in entries]
        rows += [0 if entry.room is None else entry.room.data_ptr() for entry in entries]
        lengths = [entry.weight.numel() for entry in entries]
        rows += lengths
        known = self._known.get(number)
        if known is not None and known[0] == rows:
            return known[1:]
        device = entries[0].weight.device
        table = _sent(torch.tensor(rows), device)
        if known is not None and known[0][-len(lengths) :] == lengths:
            pieces = known[2]
        else:
            pairs = [(index, part) for index, n in enumerate(lengths) for part in range(-(-n // PIECE))]
            pieces = _sent(torch.tensor(pairs, dtype=torch.int32).view(-1, 2), device)
        self._known[number] = rows, table, pieces
        return table, pieces


def adam_many_triton(
    kept: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    entries: Sequence[Entry],
    rates: Tensor,
    scale: Tensor | None,
    found_inf: Tensor | None,
    launch: tuple[Tensor, Tensor],
) -> None:
    """Update entries of one kind. `rates` holds each one's rate and the root of its second correction, fp32."""
    first = entries[0]
    room = first.weight.dtype if first.room is None else first.room.dtype
    table, pieces = launch
    if len(pieces) == 0:
        return  # a rank may have no part of any of them
    # What is close to 1 is worked out here: the kernel gets its numbers in fp32.
    with on_device_of(first.weight):
        _kernel[(len(pieces),)](
            table,
            pieces,
            rates,
            rates if scale is None else scale,
            rates if found_inf is None else found_inf,
            len(entries),
            kept,
            decay,
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            eps,
            weight_type=_TYPES[first.weight.dtype],
            grad_type=_TYPES[first.grad.dtype],
            room_type=_TYPES[room],
            has_room=first.room is not None,
            has_scale=scale is not None,
            has_skip=found_inf is not None,
            aligned=first.kind[-1],
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
