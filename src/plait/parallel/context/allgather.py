"""All-gather: every rank collects all keys and values, and attends with its own queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.parallel.context.kernels import accumulation_dtype, choose_kernel, flash
from plait.parallel.context.line import Line, gather_from_all, pack, scatter_sum, unpack
from plait.parallel.context.split import chunks_of, join
from plait.torch_internals import aten_flash


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: Line,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention over rows that are spread over the ranks of `line`.

    Tensors are (batch, heads, tokens of this rank, head_dim), cut as `split_batch` cuts; keys and values may have
    fewer heads. `mask`, where given, says which of all tokens each of this rank's may attend to, (batch, 1,
    tokens of this rank, all tokens); see `visible`.

    The simplest way, and the one that needs memory for all keys and values of a row.
    """
    gathered = _Gather.apply(pack(k, v), line)  # type: ignore[no-untyped-call]
    parts = [unpack(flat, k.shape, v.shape) for flat in gathered]
    k, v = (join([part[i] for part in parts], "allgather", dim=2) for i in range(2))
    outputs = []
    chunk = q.shape[2] // 2
    for half, index in enumerate(chunks_of(line.rank, line.size, "allgather")):
        rows, end = slice(half * chunk, (half + 1) * chunk), (index + 1) * chunk
        seen = None if mask is None else mask[:, :, rows, :end]
        outputs.append(_attend_to_the_last(q[:, :, rows], k[:, :, :end], v[:, :, :end], seen, dropout, scale))
    return torch.cat(outputs, dim=2)


def _attend_to_the_last(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Attention of queries that are the last of the keys; causal where there is no mask."""
    if mask is None and not torch.compiler.is_compiling() and choose_kernel(q, k, v, biased=False) is flash:
        # Called so, and only so, "causal" means that the last query sees all keys, and no mask has to be held.
        output: Tensor = aten_flash(q, k, v, dropout, True, scale=scale)[0]
        return output
    if mask is None:
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if q.shape[1] != k.shape[1]:
        # The kernels that take a mask have no grouped form.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def visible(documents: Tensor, line: Line) -> Tensor:
    """Which of all tokens this rank's may attend to: earlier ones of the same document.

    From the document ids of all ranks, (rank, batch, tokens), to (batch, 1, tokens of this rank, all tokens).
    """
    everyone = join(list(documents), "allgather")
    chunk = documents.shape[2] // 2
    starts = torch.tensor(chunks_of(line.rank, line.size, "allgather"), device=documents.device) * chunk
    own = (starts[:, None] + torch.arange(chunk, device=documents.device)).flatten()
    earlier = own[:, None] >= torch.arange(everyone.shape[1], device=documents.device)
    same = documents[line.rank][:, :, None] == everyone[:, None, :]
    return (same & earlier)[:, None]


class _Gather(torch.autograd.Function):
    """The flat messages of all ranks, stacked; gradients are summed in fp32 on their way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return gather_from_all(x, line)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mine = scatter_sum(gradient.to(accumulation_dtype(gradient.dtype)), ctx.line)
        return mine.to(gradient.dtype), None
