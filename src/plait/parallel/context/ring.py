"""Ring attention: keys and values go round the ranks, queries stay.

[Note: the ring]
Rank r holds the chunks r and 2n - 1 - r of each row ([Note: balanced causal attention], split.py). In step s it
has the keys and values of rank r - s, while those of rank r - s - 1 are already on their way to it. What its
queries meet there, by the order of the chunks:

    own keys              all queries, causally (both halves are in order)
    from an earlier rank  all queries meet the first half; the second half lies after all of them
    from a later rank     only the second half of the queries meets them, but all of them

So but for its own keys no block needs a causal mask, and every step costs every rank the same. The results of the
steps are merged by their log-sum-exp, in fp32.

The backward pass turns the ring once more. The gradients of keys and values travel with them, in fp32, one step
behind: they start at the first rank that is not their own and end at home, n - 1 hops later. Beside its own
tensors a rank holds two messages of keys and values and two of their gradients, however long the row is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.parallel.context.kernels import Block, accumulation_dtype, bias_of, choose_kernel
from plait.parallel.context.line import Hop, Line, pack, unpack
from plait.torch_internals import group_by_name


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, line: Line, *, documents: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention over rows that are spread over the ranks of `line`.

    Tensors are (batch, heads, tokens of this rank, head_dim), cut as `split_batch` cuts; keys and values may have
    fewer heads. `documents` are the document ids of all ranks, (rank, batch, tokens): then tokens attend
    within their document only. See [Note: the ring].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        compiled: Tensor = _compiled_ring(q, k, v, documents, line.group.group_name, scale)[0]
        return compiled
    return _Ring.apply(q, k, v, documents, line, scale)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The queries of one rank that meet keys of another, and which of those."""

    queries: slice
    keys: slice
    own: bool
    """Whether both are of the same rank, and so have an order among them."""
    ids: tuple[Tensor, Tensor] | None
    """Document ids of the queries and of the keys, (batch, tokens) each."""

    def block(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Block:
        """What a kernel has to compute, of all queries here and all keys and values there."""
        queries, keys, values = q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]
        # The kernel has to see to the order only where no bias says it.
        return Block(queries, keys, values, self._bias(q.dtype), self.own and self.ids is None, scale)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """Made when it is needed: those of all blocks together are as large as the mask of whole rows."""
        if self.ids is None:
            return None
        queries, keys = self.ids
        allowed = queries[:, :, None] == keys[:, None, :]
        return bias_of((allowed.tril() if self.own else allowed)[:, None], dtype)


def _meeting(rank: int, source: int, tokens: int, documents: Tensor | None) -> _Meeting:
    queries = slice(tokens // 2, None) if source > rank else slice(None)
    keys = slice(0, tokens // 2) if source < rank else slice(None)
    ids = None if documents is None else (documents[rank][:, queries], documents[source][:, keys])
    return _Meeting(queries, keys, source == rank, ids)


def _rounds(k: Tensor, v: Tensor, line: Line) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank and its keys and values, one's own first; the next are on their way while the caller works."""
    here = pack(k, v)
    for step in range(line.size):
        hop = Hop(line, here) if step < line.size - 1 else None
        keys, values = unpack(here, k.shape, v.shape)
        yield (line.rank - step) % line.size, keys, values
        if hop is not None:
            here = hop.wait()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, line: Line, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = choose_kernel(q, k, v, biased=documents is not None)
    output = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=accumulation_dtype(q.dtype))
    lse = q.new_empty(q.shape[:-1], dtype=output.dtype)
    for source, keys, values in _rounds(k, v, line):
        meeting = _meeting(line.rank, source, q.shape[2], documents)
        part, part_lse = kernel.forward(meeting.block(q, keys, values, scale))
        if source == line.rank:
            output.copy_(part)
            lse.copy_(part_lse)
        else:
            _merge(output[:, :, meeting.queries], lse[:, :, meeting.queries], part, part_lse)
    return output.to(q.dtype), lse


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the result over some more keys into the running one, in place."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_()[..., None]).add_(part * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    line: Line,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = choose_kernel(q, k, v, biased=documents is not None)
    gradient = gradient.contiguous()
    of_q = torch.zeros_like(q, dtype=lse.dtype)
    own = torch.zeros(k.numel() + v.numel(), dtype=lse.dtype, device=q.device)
    travelling: Hop | None = None
    for source, keys, values in _rounds(k, v, line):
        meeting = _meeting(line.rank, source, q.shape[2], documents)
        mine = meeting.queries
        part_q, part_k, part_v = kernel.backward(
            gradient[:, :, mine],
            meeting.block(q, keys, values, scale),
            output[:, :, mine],
            lse[:, :, mine].contiguous(),
        )
        of_q[:, :, mine] += part_q
        if source == line.rank:
            sums = own
        elif travelling is None:
            sums = torch.zeros_like(own)
        else:
            sums = travelling.wait()
        of_k, of_v = unpack(sums, k.shape, v.shape)
        of_k[:, :, meeting.keys] += part_k
        of_v[:, :, meeting.keys] += part_v
        if source != line.rank:
            travelling = Hop(line, sums)
    if travelling is not None:
        own += travelling.wait()
    of_k, of_v = unpack(own, k.shape, v.shape)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, line: Line, scale: float
    ) -> Tensor:
        output, lse = _forward(q, k, v, documents, line, scale)
        ctx.save_for_backward(q, k, v, output, lse, documents)
        ctx.line, ctx.scale = line, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, output, lse, documents = ctx.saved_tensors
        gradients = _backward(gradient, q, k, v, output, lse, documents, ctx.line, ctx.scale)
        return *gradients, None, None, None


# To `torch.compile` the ring is one operator forward and one backward: a compiler cannot trace messages between
# two ranks. Eagerly it is no operator, so that whoever counts or fakes operations sees what it does.


@torch.library.custom_op("plait::ring_attention", mutates_args=())
def _compiled_ring(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str, scale: float
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, documents, _line_named(group_name), scale)


@_compiled_ring.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:-1], v.shape[-1])
    return q.new_empty(shape), q.new_empty(shape[:-1], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("plait::ring_attention_backward", mutates_args=())
def _compiled_ring_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group_name: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = _backward(gradient, q, k, v, output, lse, documents, _line_named(group_name), scale)
    # An operator may not return two views of one tensor.
    return of_q, of_k.clone(), of_v.clone()


@_compiled_ring_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group_name: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.group_name, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _differentiate(ctx: Any, gradient: Tensor, _of_lse: Tensor | None) -> Any:
    q, k, v, output, lse, documents = ctx.saved_tensors
    gradients = _compiled_ring_backward(gradient, q, k, v, output, lse, documents, ctx.group_name, ctx.scale)
    return *gradients, None, None, None


_compiled_ring.register_autograd(_differentiate, setup_context=_keep)


def _line_named(group_name: str) -> Line:
    # Operators take no process groups; functional collectives find theirs by this function too.
    return Line.of(group_by_name(group_name))
