"""Kernels that begin while the one before them ends, and that fetch what the next one needs.

[Note: chained kernels] Between two kernels a device stands still for a moment: the last programs of one end, the next
one is launched, and its first loads are on their way. Chained (programmatic dependent launch, from Hopper on), the next
one is launched as soon as all programs of the one before run. It asks for weights that it will need, which nobody
writes, and then waits until the one before has ended, before it reads anything else or writes anything.

A kernel lets the next one in only after its own wait. So no more than two are under way, and what any but the one
before has written is there: that may be read before the wait too, past the cache of the processor. Memory that a
later kernel gets again is written behind its wait, when all who read it have ended.

[Note: looking ahead] A kernel whose programs take much room keeps those of the next one out until it ends, and then
nobody asks for anything while sums are added up, results written and programs exchanged. So who has done his own
loads fetches the beginning of what the next kernel reads first into the L2 cache: as much as the memory could send in
that time. It is a hint: nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.kernels.triton import HAS_TRITON

MOST_AHEAD = 3
"""Matrices that are fetched together."""
AHEAD = 16 << 20
"""Bytes that are fetched: what an H200 sends in four microseconds, and a third of its L2 cache."""
LINE = 64
"""Numbers of 16 bits that are fetched together."""
NO_KEYS = (
    "ahead_n_first",
    "ahead_n_second",
    "ahead_n_third",
    "ahead_width",
    "ahead_stride",
    "ahead_part_bits",
    "ahead_line_bits",
)
"""Numbers for which no kernel is compiled anew. Each kernel spells them out: in a tuple, Triton (3.6 to 3.9) would
compile one for every size."""

_HOPPER = (9, 0)
_CAN_WAIT = False

if HAS_TRITON:
    import triton
    import triton.language as tl

    _CAN_WAIT = hasattr(tl.extra.cuda, "gdc_wait") and hasattr(tl.extra.cuda, "gdc_launch_dependents")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def follow():  # type: ignore[no-untyped-def]
        """Wait for the kernel before, then let the next one in."""
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _fetch(here):  # type: ignore[no-untyped-def]
        """Fetch the lines at some addresses into the L2 cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [here], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def ask_for(weight, row, begin, end, width, lines: tl.constexpr):  # type: ignore[no-untyped-def]
        """Fetch columns of some rows of a weight (rows, width) of 16 bits into the L2 cache, by lines of 64 numbers."""
        column = tl.minimum(begin + 64 * tl.arange(0, lines), end - 1)
        _fetch(weight + row.to(tl.int64)[:, None] * width + column[None, :])

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def line_at(  # type: ignore[no-untyped-def]
        number, first, second, third, n_first, n_second, width, stride, part_bits, line_bits
    ):
        """Addresses of some lines, by their numbers: those of a part of a row follow each other, then parts, then rows.

        A part begins every `stride` columns. Up to three matrices (rows, width) of 16 bits lie one below the other.
        There are powers of two of lines and parts, as division takes long.
        """
        line = number & ((1 << line_bits) - 1)
        part = (number >> line_bits) & ((1 << part_bits) - 1)
        row = number >> (line_bits + part_bits)
        is_first, is_second = row < n_first, row < n_first + n_second
        start = tl.where(is_first, first.to(tl.int64), tl.where(is_second, second.to(tl.int64), third.to(tl.int64)))
        own = row - tl.where(is_first, 0, tl.where(is_second, n_first, n_first + n_second))
        column = tl.minimum(part * stride + 64 * line, width - 1)
        return start + 2 * (own.to(tl.int64) * width + column)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def plan_here(  # type: ignore[no-untyped-def]
        first, second, third, n_first, n_second, n_third, width, stride, part_bits, line_bits, program, programs
    ):
        """Fetch this program's share of the lines that an `Ahead` names; see [Note: looking ahead]."""
        count = (n_first + n_second + n_third) << (part_bits + line_bits)
        share = tl.cdiv(count, programs)
        end = tl.minimum((program + 1) * share, count)
        for begin in range(program * share, end, 256):
            number = tl.minimum(begin + tl.arange(0, 256), end - 1)
            _fetch(line_at(number, first, second, third, n_first, n_second, width, stride, part_bits, line_bits))


class Ahead(NamedTuple):
    """What the next kernel reads first: in every row of some matrices, the beginning of each part."""

    matrices: Sequence[Tensor]
    """(rows, width) each, of the same width."""
    parts: int = 1
    """Programs of the next kernel that share a row, a power of two."""
    stride: int = 0
    """Columns between their beginnings."""
    budget: int = AHEAD
    """Bytes to fetch, about; a line of each part at least."""

    def line_bits(self) -> int:
        """Of how many lines of each part, as a power of two."""
        width = self.matrices[0].shape[1]
        most = (self.stride if self.parts > 1 else width) // LINE
        lines = min(most, self.budget // (2 * LINE * self.parts * sum(map(len, self.matrices))))
        return max(lines, 1).bit_length() - 1


def can_launch_dependent(x: Tensor) -> bool:
    """Whether kernels may run in a chain where `x` is."""
    return _CAN_WAIT and x.is_cuda and torch.cuda.get_device_capability(x.device) >= _HOPPER


def is_chained(x: Tensor) -> bool:
    """Whether kernels that multiply `x` do: they fetch weights of 16 bits."""
    return x.itemsize == 2 and can_launch_dependent(x)


def dependent_launch_options(chained: bool) -> dict[str, Any]:
    """How to launch a kernel that takes `chained`."""
    return {"chained": True, "launch_pdl": True} if chained else {"chained": False}


def ahead_options(x: Tensor, ahead: Ahead | None) -> dict[str, Any]:
    """What a kernel over `x` that looks ahead is told; nothing is fetched where kernels are not chained."""
    if ahead is None or not is_chained(x):
        ahead = None
    matrices = [] if ahead is None else list(ahead.matrices)
    spare = MOST_AHEAD - len(matrices)
    first, second, third = (*matrices, *[x] * spare)
    n_first, n_second, n_third = (*map(len, matrices), *[0] * spare)
    return {
        "looks": ahead is not None,
        "ahead_first": first,
        "ahead_second": second,
        "ahead_third": third,
        "ahead_n_first": n_first,
        "ahead_n_second": n_second,
        "ahead_n_third": n_third,
        "ahead_width": 0 if ahead is None else first.shape[1],
        "ahead_stride": 0 if ahead is None else ahead.stride,
        "ahead_part_bits": 0 if ahead is None else ahead.parts.bit_length() - 1,
        "ahead_line_bits": 0 if ahead is None else ahead.line_bits(),
    }
