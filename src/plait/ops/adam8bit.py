"""One step of AdamW whose moments are kept in 8 bits: in one kernel on CUDA, piece by piece elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.adam import AdamNumbers, adam_step, adam_step_plain
from plait.ops.adam8bit_kernel import adam8bit_step_triton, is_fused
from plait.ops.blockwise import Packed, pack_into, unpack, width_of

_PIECE = 1 << 18
"""Numbers whose moments are wide at one time on the CPU: they stay in the cache."""
_DEVICE_PIECE = 1 << 24
"""The same elsewhere, where many are needed to keep the device busy."""


def adam8bit_step(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """Update a weight of any floating-point format and its packed moments in place."""
    if weight.numel() == 0:
        return
    if is_fused(weight):
        adam8bit_step_triton(numbers, weight, grad, mean, square)
    else:
        adam8bit_step_plain(numbers, weight, grad, mean, square)


@torch.no_grad()
def adam8bit_step_plain(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Packed, square: Packed) -> None:
    """The plain twin: widen, step, pack. The memory it takes does not grow with the tensor."""
    on_host = weight.device.type == "cpu"
    step = adam_step if on_host else adam_step_plain
    rows = max(1, (_PIECE if on_host else _DEVICE_PIECE) // width_of(weight))
    for begin in range(0, weight.shape[0], rows):
        piece = slice(begin, begin + rows)
        wide = weight[piece].float()  # the weight itself where it is fp32
        wide_mean, wide_square = unpack(mean.rows(begin, begin + rows)), unpack(square.rows(begin, begin + rows))
        step(numbers, [wide], [grad[piece].contiguous()], [wide_mean], [wide_square])
        if weight.dtype != torch.float32:
            weight[piece].copy_(wide)
        pack_into(mean.rows(begin, begin + rows), wide_mean)
        pack_into(square.rows(begin, begin + rows), wide_square)
