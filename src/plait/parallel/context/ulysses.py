"""Ulysses: the ranks trade heads for tokens, and each attends over whole rows of its own heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import ModelError
from plait.parallel.context.line import Line


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, line: Line, inner: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Any attention over rows that are spread over the ranks of `line`, each with one piece of them in order.

    Tensors are (batch, heads, tokens of this rank, head_dim). `inner` is called with all tokens and every n-th part
    of the heads; its answer goes back. Before and after it the ranks exchange all to all.

    The heads of `q` have to divide by the number of ranks. Where those of keys and values do not, they are
    repeated until they do: then ranks share one.
    """
    check_heads(q.shape[1], line.size)
    kv_heads = lcm(k.shape[1], line.size)
    if kv_heads > k.shape[1]:
        k, v = (x.repeat_interleave(kv_heads // x.shape[1], dim=1) for x in (k, v))
    if q.shape[-1] == v.shape[-1]:
        q, k, v = _tokens_for_heads([q, k, v], line)
    else:
        (q, k), (v,) = _tokens_for_heads([q, k], line), _tokens_for_heads([v], line)
    # Back: (batch, own heads, all tokens) is cut by tokens, and what arrives is joined by heads.
    back = torch.stack(inner(q, k, v).chunk(line.size, dim=2))
    return _exchange(back, line).transpose(0, 1).flatten(1, 2)


def check_heads(heads: int, size: int) -> None:
    """Refuse a number of heads that the ranks cannot share."""
    if heads % size:
        raise ModelError(
            f"ulysses shares the heads of attention among the ranks, and {heads} heads do not divide by "
            f"cp={size}; choose another cp, or ring or allgather, which cut only the sequence"
        )


def _tokens_for_heads(tensors: Sequence[Tensor], line: Line) -> Sequence[Tensor]:
    """From (batch, heads, tokens of this rank, dim) to (batch, heads of this rank, tokens, dim), in one message."""
    by_rank = [x.reshape(x.shape[0], line.size, -1, *x.shape[2:]).transpose(0, 1) for x in tensors]
    arrived = _exchange(torch.cat(by_rank, dim=2), line)
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return torch.split(whole, [x.shape[2] for x in by_rank], dim=1)


def _exchange(x: Tensor, line: Line) -> Tensor:
    return _Exchange.apply(x, line.group)  # type: ignore[no-any-return,no-untyped-call]


class _Exchange(torch.autograd.Function):
    """The i-th part of `x` goes to rank i; what comes from rank i is the i-th part of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=group)
    return result
