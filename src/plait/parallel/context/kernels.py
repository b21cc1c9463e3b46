"""Attention of some queries over some keys, with the log-sum-exp that lets results over several keys be merged.

A kernel is a pair of functions. Forward gives the output and, for each query, the logarithm of the sum of the
exponentials of its scores. Backward gets output and log-sum-exp *of all keys*, and gives the part of the gradients
that these keys have in it; so parts are added up, whichever way the keys were divided.

A query that no key of the block is allowed for has a log-sum-exp so low that its output has no weight in a merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from plait.torch_internals import (
    aten_efficient,
    aten_efficient_backward,
    aten_flash,
    aten_flash_backward,
    aten_flash_cpu,
    aten_flash_cpu_backward,
)

_aten: Any = torch.ops.aten


class Block(NamedTuple):
    """Some queries and the keys and values that they meet: (batch, heads, tokens, head_dim) each.

    Keys and values may have fewer heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """(batch, 1, queries, keys), added to the scores."""
    causal: bool
    """Whether a query meets only the keys up to its own place."""
    scale: float
    """What the scores are multiplied by."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a block; `mathematics` is the twin that all others must agree with."""

    name: str
    forward: Callable[[Block], tuple[Tensor, Tensor]]
    """The output and the log-sum-exp (batch, heads, queries)."""
    backward: Callable[[Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(gradient, block, output, log-sum-exp) to the gradients of q, k and v."""


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, *, biased: bool) -> Kernel:
    """The fastest kernel that takes such tensors."""
    if q.device.type == "cpu":
        return cpu if q.shape[-1] == v.shape[-1] else mathematics
    if q.device.type != "cuda" or q.shape[-1] % 8 or v.shape[-1] % 8:
        return mathematics
    half = q.dtype in (torch.float16, torch.bfloat16)
    grouped = q.shape[1] != k.shape[1]
    if half and not biased and q.shape[-1] == v.shape[-1] <= 256:
        params = SDPAParams(q, k, v, None, 0.0, False, grouped)
        # Where there is no GPU, the tensors are fakes, and what is wanted is what a GPU would do.
        if not torch.cuda.is_available() or can_use_flash_attention(params):
            return flash
    if half or q.dtype == torch.float32:
        keys, values = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        params = SDPAParams(q, keys, values, None, 0.0, False, False)
        if not torch.cuda.is_available() or can_use_efficient_attention(params):
            return efficient
    return mathematics


def bias_of(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that leaves only the allowed pairs of a boolean mask.

    The others get a large number, not infinity: a query without any allowed key would come out as NaN.
    Rows are a multiple of 16 wide in memory, as the memory-efficient kernel wants it.
    """
    width = -(-allowed.shape[-1] // 16) * 16
    bias = torch.zeros((*allowed.shape[:-1], width), dtype=dtype, device=allowed.device)[..., : allowed.shape[-1]]
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min / 4)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.promote_types(dtype, torch.float32)


def _mathematics(block: Block) -> tuple[Tensor, Tensor]:
    scores = _scores(block)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ _spread(block.v, block.q).to(weights.dtype)).to(block.q.dtype), lse


def _mathematics_backward(gradient: Tensor, block: Block, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = block
    weights = (_scores(block) - lse[..., None]).exp()
    gradient, output = gradient.to(weights.dtype), output.to(weights.dtype)
    of_weights = gradient @ _spread(v, q).to(weights.dtype).mT
    of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True)) * block.scale
    of_q = of_scores @ _spread(k, q).to(weights.dtype)
    return of_q, _fold(of_scores.mT @ q.to(weights.dtype), k), _fold(weights.mT @ gradient, v)


def _scores(block: Block) -> Tensor:
    q, k, _, bias, causal, scale = block
    dtype = accumulation_dtype(q.dtype)
    scores = q.to(dtype) @ _spread(k, q).to(dtype).mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, once for each head of the queries."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _fold(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of keys or values that were spread: summed over the heads that shared one."""
    if gradient.shape[1] == x.shape[1]:
        return gradient
    batch, heads, tokens, dim = x.shape
    return gradient.view(batch, heads, -1, tokens, dim).sum(2, dtype=accumulation_dtype(gradient.dtype))


def _cpu(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    output, lse = aten_flash_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return output, lse


def _cpu_backward(gradient: Tensor, block: Block, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    of_q, of_k, of_v = aten_flash_cpu_backward(gradient, q, k, v, output, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return of_q, of_k, of_v


def _flash(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    assert bias is None, "the flash kernel takes no bias"
    output, lse, *_ = aten_flash(q, k, v, 0.0, causal, False, scale=scale)
    return output, lse


def _flash_backward(gradient: Tensor, block: Block, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, causal, scale = block
    # Without dropout the random state is never read; it only has to be there.
    state = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    of_q, of_k, of_v = aten_flash_backward(
        gradient, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
    )
    return of_q, of_k, of_v


def _efficient(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    output, lse, *_ = aten_efficient(
        q, _spread(k, q), _spread(v, q), _for_every_head(bias, q), True, 0.0, causal, scale=scale
    )
    return output, lse[:, :, : q.shape[2]]  # it has rows for a multiple of 32 queries


def _efficient_backward(gradient: Tensor, block: Block, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    # Rows beyond the queries have an infinite log-sum-exp, and so no weight, as the kernel itself fills them.
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("inf"))
    padded[:, :, : lse.shape[2]] = lse
    state = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    of_q, of_k, of_v, _ = aten_efficient_backward(
        _by_token(gradient),
        q,
        _spread(k, q),
        _spread(v, q),
        _for_every_head(bias, q),
        _by_token(output),
        padded,
        *state,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return of_q, _fold(of_k, k), _fold(of_v, v)


def _by_token(x: Tensor) -> Tensor:
    """The same tensor with the heads of a token side by side in memory, as the kernel's own output has it.

    In 16 bits the kernel takes that for granted, and reads beyond the end of anything else.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _for_every_head(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(-1, q.shape[1], -1, -1)


mathematics = Kernel("mathematics", _mathematics, _mathematics_backward)
"""The definition, in plain operations; holds all scores of a block."""
cpu = Kernel("cpu", _cpu, _cpu_backward)
flash = Kernel("flash", _flash, _flash_backward)
efficient = Kernel("efficient", _efficient, _efficient_backward)
