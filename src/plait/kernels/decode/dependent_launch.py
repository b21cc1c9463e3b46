"""Programmatic dependent launch: a kernel starts before the previous one ends, and data is prefetched for it.

[Note: programmatic dependent launch] Between two kernels a GPU is idle for a moment: while the last programs of the
first one end, the second is launched, and its first loads arrive. With programmatic dependent launch (PDL, from Hopper
on) a kernel is launched as soon as all programs of the previous kernel have started and allow it. It prefetches its
weights, which no kernel writes. Then it waits until the previous kernel has ended, before it reads anything else or
writes anything.

A kernel allows the launch of the next one only after its own wait. So at most two kernels run at the same time, and
when a kernel starts, all kernels but the previous one have ended. What these have written may be read before the wait
too, but not through the L1 cache. A kernel writes only after its wait, so memory may be reused: all kernels that read
its former content have ended then.

[Note: prefetching for the next kernel] If the programs of a kernel need many registers or much shared memory, those of
the next kernel cannot start until it ends. Memory is idle while the kernel adds up sums and writes results. So once a
program has issued its own loads, it prefetches into the L2 cache the beginning of what the next kernel will read first:
as much as memory delivers in that time. This affects the speed only, not the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.kernels import HAS_TRITON

MOST_MATRICES = 3
"""The maximum number of matrices that are prefetched together."""
PREFETCH_BYTES = 16 << 20
"""Bytes that are prefetched: what an H200 reads in four microseconds, and a third of its L2 cache."""
LINE = 64
"""16-bit elements of a cache line."""
PREFETCH_ARGUMENTS = (
    "next_n_first",
    "next_n_second",
    "next_n_third",
    "next_width",
    "next_stride",
    "next_segment_bits",
    "next_line_bits",
)
"""Arguments whose values Triton must not specialize a kernel on. Each kernel has them as separate arguments: if they
were a tuple, Triton (3.6 to 3.9) would compile a kernel for every combination of values."""

_HOPPER = (9, 0)
HAS_DEPENDENT_LAUNCH = False

if HAS_TRITON:
    import triton
    import triton.language as tl

    HAS_DEPENDENT_LAUNCH = hasattr(tl.extra.cuda, "gdc_wait") and hasattr(tl.extra.cuda, "gdc_launch_dependents")

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def wait_for_previous():  # type: ignore[no-untyped-def]
        """Wait until the previous kernel has ended, then allow the launch of the next one."""
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def _prefetch(addresses):  # type: ignore[no-untyped-def]
        """Prefetch the cache lines at some addresses into L2."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def prefetch_rows(weight, row, begin, end, width, lines: tl.constexpr):  # type: ignore[no-untyped-def]
        """Prefetch columns `begin` to `end` of some rows of a 16-bit weight (rows, width) into the L2 cache."""
        column = tl.minimum(begin + 64 * tl.arange(0, lines), end - 1)
        _prefetch(weight + row.to(tl.int64)[:, None] * width + column[None, :])

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def address_of_line(  # type: ignore[no-untyped-def]
        number, first, second, third, n_first, n_second, width, stride, segment_bits, line_bits
    ):
        """Return the addresses of cache lines, given their numbers.

        Lines are numbered within a segment first, then over the segments of a row, then over the rows of up to three
        16-bit matrices (rows, width), one matrix after another. A segment begins every `stride` columns. The numbers of
        lines per segment and of segments per row are powers of two, because division is slow.
        """
        line = number & ((1 << line_bits) - 1)
        segment = (number >> line_bits) & ((1 << segment_bits) - 1)
        row = number >> (line_bits + segment_bits)
        is_first, is_second = row < n_first, row < n_first + n_second
        start = tl.where(is_first, first.to(tl.int64), tl.where(is_second, second.to(tl.int64), third.to(tl.int64)))
        matrix_row = row - tl.where(is_first, 0, tl.where(is_second, n_first, n_first + n_second))
        column = tl.minimum(segment * stride + 64 * line, width - 1)
        return start + 2 * (matrix_row.to(tl.int64) * width + column)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def prefetch_next(  # type: ignore[no-untyped-def]
        first, second, third, n_first, n_second, n_third, width, stride, segment_bits, line_bits, program, programs
    ):
        """Prefetch this program's part of the lines of a `Prefetch`; see [Note: prefetching for the next kernel]."""
        count = (n_first + n_second + n_third) << (segment_bits + line_bits)
        share = tl.cdiv(count, programs)
        end = tl.minimum((program + 1) * share, count)
        for begin in range(program * share, end, 256):
            number = tl.minimum(begin + tl.arange(0, 256), end - 1)
            address = address_of_line(
                number, first, second, third, n_first, n_second, width, stride, segment_bits, line_bits
            )
            _prefetch(address)


class Prefetch(NamedTuple):
    """What the next kernel reads first: the beginning of each segment (part of a row) in all rows of some matrices."""

    matrices: Sequence[Tensor]
    """(rows, width) each, of the same width."""
    segments: int = 1
    """Segments per row: the number of programs of the next kernel that share a row; a power of two."""
    stride: int = 0
    """Columns from the beginning of one segment to the next."""
    budget: int = PREFETCH_BYTES
    """The approximate number of bytes to prefetch; at least one line of each segment is prefetched."""

    def line_bits(self) -> int:
        """Return the binary logarithm of the number of lines to prefetch per segment."""
        width = self.matrices[0].shape[1]
        most = (self.stride if self.segments > 1 else width) // LINE
        lines = min(most, self.budget // (2 * LINE * self.segments * sum(map(len, self.matrices))))
        return max(lines, 1).bit_length() - 1


def can_launch_dependent(x: Tensor) -> bool:
    """Whether the device of `x` has programmatic dependent launch."""
    return HAS_DEPENDENT_LAUNCH and x.is_cuda and torch.cuda.get_device_capability(x.device) >= _HOPPER


def uses_dependent_launch(x: Tensor) -> bool:
    """Whether kernels that multiply `x` use dependent launch: its dtype has 16 bits, as prefetching requires."""
    return x.itemsize == 2 and can_launch_dependent(x)


def dependent_launch_options(dependent: bool) -> dict[str, Any]:
    """Return the launch options of a kernel that has the argument `dependent`."""
    return {"dependent": True, "launch_pdl": True} if dependent else {"dependent": False}


def prefetch_options(x: Tensor, prefetch: Prefetch | None) -> dict[str, Any]:
    """Return the arguments `prefetches` and `next_…` of a kernel; without dependent launch, nothing is prefetched."""
    if prefetch is None or not uses_dependent_launch(x):
        prefetch = None
    matrices = [] if prefetch is None else list(prefetch.matrices)
    spare = MOST_MATRICES - len(matrices)
    first, second, third = (*matrices, *[x] * spare)
    n_first, n_second, n_third = (*map(len, matrices), *[0] * spare)
    return {
        "prefetches": prefetch is not None,
        "next_first": first,
        "next_second": second,
        "next_third": third,
        "next_n_first": n_first,
        "next_n_second": n_second,
        "next_n_third": n_third,
        "next_width": 0 if prefetch is None else first.shape[1],
        "next_stride": 0 if prefetch is None else prefetch.stride,
        "next_segment_bits": 0 if prefetch is None else prefetch.segments.bit_length() - 1,
        "next_line_bits": 0 if prefetch is None else prefetch.line_bits(),
    }
