"""What runs on a GPU in place of what a machine without one would choose, and what it takes there unseen.

The shares of a kernel's own memory were found on an H200 (torch 2.11), by comparing the peak around a call with its
arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models import attention
from plait.torch_internals import (
    aten_cudnn,
    aten_cudnn_backward,
    aten_efficient,
    aten_efficient_backward,
    aten_flash,
    aten_flash_backward,
    aten_plain_efficient_backward,
    aten_plain_flash_backward,
    body_of_custom_op,
)
from plait.world import replaced

aten = torch.ops.aten

MATMUL_WORKSPACE = 32 * 2**20
"""What cuBLAS keeps for good on each thread that multiplies: the one that goes forward, and the one that goes back."""


@contextmanager
def kernels_of_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Attention goes to the kernel that torch prefers on such a GPU, until the block ends."""
    cudnn = capability[0] >= 9

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if q.device.type != "cuda":
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        wide = q.dtype == torch.float32
        if wide and enable_gqa and k.shape[1] != q.shape[1]:
            # No fast kernel has a grouped form in fp32: torch computes all scores.
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.empty(bias.shape, dtype=q.dtype, device=q.device)
        if wide or (bias is not None and not cudnn):
            op = aten_efficient
            return _first(op(q, k, v, bias, True, dropout_p, is_causal, scale=scale))
        if cudnn:
            op = aten_cudnn
            return _first(op(q, k, v, bias, True, dropout_p, is_causal, False, scale=scale))
        op = aten_flash
        return _first(op(q, k, v, dropout_p, is_causal, False, scale=scale))

    def attend_blocks(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
        return attend(q, k, v, is_causal=True, enable_gqa=enable_gqa)

    plain = F.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(replaced(F, "scaled_dot_product_attention", attend))
        stack.enter_context(replaced(attention, "_compiled_flex_attention", attend_blocks))
        yield


def _first(results: tuple[Tensor, ...]) -> Tensor:
    return results[0]


_BACKWARD_ATTENTION = {
    aten_cudnn_backward.default,
    aten_flash_backward.default,
    aten_plain_flash_backward.default,
}
_BACKWARD_EFFICIENT = {
    aten_efficient_backward.default,
    aten_plain_efficient_backward.default,
}


def hidden_bytes(func: Any, args: Any) -> int:
    """Bytes that a kernel takes while it runs, beside its arguments and results."""
    if func in _BACKWARD_ATTENTION:
        _, q, k = args[:3]
        rows = q.numel() // q.shape[-1]
        # The gradient of the queries is summed in fp32, and a row has a sum of its own. Where queries share keys,
        # each first gets gradients of keys and values for itself.
        spread = 2 * q.numel() * q.element_size() if k.numel() < q.numel() and k.shape[1] < q.shape[1] else 0
        return 4 * int(q.numel()) + 4 * int(rows) + int(spread)
    if func in _BACKWARD_EFFICIENT:
        q = args[1]
        return int(q.numel() * max(4, q.element_size()) + 4 * (q.numel() // q.shape[-1]))
    return 0


def body_of(func: Any) -> Callable[..., Any] | None:
    """What one of Plait's own operators does, where `func` is one: its parts take memory that the whole hides."""
    if getattr(func, "namespace", None) != "plait":
        return None
    return body_of_custom_op(func)
