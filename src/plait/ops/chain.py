"""Kernels that begin while the one before them ends.

[Note: chained kernels] Between two kernels a device stands still for a moment: the last programs of one end, the next
one is launched, and its first loads are on their way. Chained (programmatic dependent launch, from Hopper on), the next
one is launched as soon as all programs of the one before run. It asks for weights that it will need, which nobody
writes, and then waits until the one before has ended, before it reads anything else or writes anything.

A kernel lets the next one in only after its own wait. So no more than two are under way, and what an earlier one has
written is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.ops.triton import HAS_TRITON

_HOPPER = (9, 0)

if HAS_TRITON:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def follow():  # type: ignore[no-untyped-def]
        """Wait for the kernel before, then let the next one in."""
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def ask_for(weight, row, begin, end, width, lines: tl.constexpr):  # type: ignore[no-untyped-def]
        """Fetch columns of some rows of a weight (rows, width) of 16 bits into the L2 cache, by lines of 64 numbers."""
        column = tl.minimum(begin + 64 * tl.arange(0, lines), end - 1)
        here = weight + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [here], dtype=tl.int32, is_pure=False, pack=1
        )


def chain_options(x: Tensor) -> dict[str, Any]:
    """How to launch a kernel over `x` that takes `chained`: in a chain where the device can."""
    chained = x.is_cuda and x.itemsize == 2 and torch.cuda.get_device_capability(x.device) >= _HOPPER
    return {"chained": True, "launch_pdl": True} if chained else {"chained": False}
