"""Ring attention: keys and values go round the ranks, queries stay.

[Note: the ring]
Rank r holds the chunks r and 2n - 1 - r of each row ([Note: balanced causal attention]). In step s it
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from plait.distributed.collectives import all_gather_flat, reduce_scatter_flat
from plait.distributed.heartbeat import wait_for
from plait.errors import ModelError, WorldError
from plait.torch_internals import (
    aten_efficient,
    aten_efficient_backward,
    aten_flash,
    aten_flash_backward,
    aten_flash_cpu,
    aten_flash_cpu_backward,
    group_by_name,
)

# Attention of some queries over some keys, with the log-sum-exp that lets results over several keys be merged.
#
# A kernel is a pair of functions. Forward gives the output and, for each query, the logarithm of the sum of the
# exponentials of its scores. Backward gets output and log-sum-exp *of all keys*, and gives the part of the gradients
# that these keys have in it; so parts are added up, whichever way the keys were divided.
#
# A query that no key of the block is allowed for has a log-sum-exp so low that its output has no weight in a merge.


_aten: Any = torch.ops.aten


class AttentionBlock(NamedTuple):
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
    forward: Callable[[AttentionBlock], tuple[Tensor, Tensor]]
    """The output and the log-sum-exp (batch, heads, queries)."""
    backward: Callable[[Tensor, AttentionBlock, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
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


def _mathematics(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    scores = _scores(block)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ _spread(block.v, block.q).to(weights.dtype)).to(block.q.dtype), lse


def _mathematics_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = block
    weights = (_scores(block) - lse[..., None]).exp()
    gradient, output = gradient.to(weights.dtype), output.to(weights.dtype)
    of_weights = gradient @ _spread(v, q).to(weights.dtype).mT
    of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True)) * block.scale
    of_q = of_scores @ _spread(k, q).to(weights.dtype)
    return of_q, _fold(of_scores.mT @ q.to(weights.dtype), k), _fold(weights.mT @ gradient, v)


def _scores(block: AttentionBlock) -> Tensor:
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


def _cpu(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    output, lse = aten_flash_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return output, lse


def _cpu_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    of_q, of_k, of_v = aten_flash_cpu_backward(gradient, q, k, v, output, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return of_q, of_k, of_v


def _flash(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    assert bias is None, "the flash kernel takes no bias"
    output, lse, *_ = aten_flash(q, k, v, 0.0, causal, False, scale=scale)
    return output, lse


def _flash_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _, causal, scale = block
    # Without dropout the random state is never read; it only has to be there.
    state = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    of_q, of_k, of_v = aten_flash_backward(
        gradient, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
    )
    return of_q, of_k, of_v


def _efficient(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    output, lse, *_ = aten_efficient(
        q, _spread(k, q), _spread(v, q), _for_every_head(bias, q), True, 0.0, causal, scale=scale
    )
    return output, lse[:, :, : q.shape[2]]  # it has rows for a multiple of 32 queries


def _efficient_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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

# Which tokens of a row belong to which rank, and the cutting of batches.
#
# [Note: balanced causal attention]
# Late tokens attend to more than early ones. A row is therefore cut into twice as many chunks as there are ranks,
# and rank r of n gets the chunks r and 2n - 1 - r: with four ranks
#
#     rank      0  1  2  3  3  2  1  0
#     chunk     0  1  2  3  4  5  6  7
#
# so every rank has the same number of pairs of query and key. Ulysses gives every rank whole rows of some heads,
# which is balanced anyway; there rank r has simply the r-th of n pieces.


Kind = Literal["ring", "ulysses", "allgather"]
"""How the ranks exchange what attention needs: see `apply_context_parallel`."""

KINDS: tuple[Kind, ...] = ("ring", "ulysses", "allgather")

_ALONG: Mapping[str, int] = MappingProxyType(
    {
        "input_ids": 0,
        "labels": -100,
        "positions": 0,
        "position_ids": 0,
        "document_ids": -1,
        "attention_mask": 0,
        "token_type_ids": 0,
    }
)
"""The inputs that run along the sequence, and what fills them up."""


def chunks_of(rank: int, size: int, kind: Kind) -> tuple[int, ...]:
    """The chunks of a row that a rank holds, in order; see [Note: balanced causal attention]."""
    return (rank,) if kind == "ulysses" or size == 1 else (rank, 2 * size - 1 - rank)


def chunk_count(size: int, kind: Kind) -> int:
    """How many chunks a row is cut into."""
    return size if kind == "ulysses" or size == 1 else 2 * size


def padded_length(tokens: int, size: int, kind: Kind) -> int:
    """The length of a row once it divides into chunks."""
    chunks = chunk_count(size, kind)
    return -(-tokens // chunks) * chunks


def cut(x: Tensor, rank: int, size: int, kind: Kind, *, dim: int = 1) -> Tensor:
    """A rank's part of a tensor whose `dim` runs along the sequence and divides."""
    chunks = x.chunk(chunk_count(size, kind), dim=dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, size, kind)], dim=dim)


def join(parts: Sequence[Tensor], kind: Kind, *, dim: int = 1) -> Tensor:
    """The whole tensor, in the order of the sequence, from the parts of all ranks: undoes `cut`."""
    size = len(parts)
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        mine = chunks_of(rank, size, kind)
        chunks.update(zip(mine, part.chunk(len(mine), dim=dim), strict=True))
    return torch.cat([chunks[i] for i in range(len(chunks))], dim=dim)


def split_batch(
    inputs: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    kind: Kind = "ring",
    positions_as: str = "positions",
    real_as: str | None = None,
) -> dict[str, Any]:
    """A rank's part of a batch of token rows: the inputs of a model for `apply_context_parallel` of this kind.

    `input_ids`, `labels`, `positions`, `position_ids`, `document_ids`, `token_type_ids` and a 2-D `attention_mask`
    are cut along the sequence; everything else stays as it is. Labels have to be shifted already (as Plait's
    data has them): the neighbour of a token may be on another rank.

    Positions are always explicit in the result, since a rank cannot count them itself. Where the batch has
    none, they are 0, 1, 2, … of the whole row, under the name `positions_as` ("position_ids" for a bare
    `transformers` model).

    A row that does not divide into chunks is filled up at its end: with token 0, label -100, position 0, document
    -1. No real token attends to what comes after it, and no loss is taken there, so the sum of the loss, its
    count and all gradients are those of the row as it was. A model that counts tokens is told which ones are real,
    under the name `real_as`.
    """
    rows = _rows(inputs)
    tokens = rows.shape[1]
    whole = dict(inputs)
    if all(whole.get(name) is None for name in ("positions", "position_ids")):
        whole[positions_as] = torch.arange(tokens, device=rows.device)[None]
    missing = padded_length(tokens, size, kind) - tokens
    for name, filler in _ALONG.items():
        x = whole.get(name)
        if x is None:
            continue
        _check_runs_along(name, x, tokens)
        whole[name] = cut(F.pad(x, (0, missing), value=filler) if missing else x, rank, size, kind)
    if missing and real_as is not None:
        real = torch.arange(tokens + missing, device=rows.device) < tokens
        whole[real_as] = cut(real.expand(len(rows), -1), rank, size, kind)
    return whole


def _rows(inputs: Mapping[str, Any]) -> Tensor:
    rows = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        found = f"those of {', '.join(inputs)}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise ModelError(
            "context parallelism cuts rows of tokens, so a batch has to be a mapping with `input_ids` of shape "
            f"(batch, tokens), not {found}; set strategy.layout.cp: 1 for other data"
        )
    return rows


def _check_runs_along(name: str, x: object, tokens: int) -> None:
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != tokens:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ModelError(
            f"{name} has to be of shape (batch, tokens={tokens}) to be cut along the sequence, not {found}"
            + ("; give document_ids instead of a mask of pairs" if name == "attention_mask" else "")
        )


# The ranks that share a sequence, and the messages between them.


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks among which a sequence is cut, and where this one stands among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, where: DeviceMesh | dist.ProcessGroup) -> SequenceRanks:
        """The line along a mesh of one axis, or of a process group."""
        if isinstance(where, DeviceMesh):
            if where.ndim != 1:
                raise WorldError(
                    f"a sequence is cut along one mesh axis, not along {where.mesh_dim_names or where.ndim}; "
                    'pass a slice, such as mesh["cp"]'
                )
            where = where.get_group()
        return cls(where, dist.get_rank(where), dist.get_world_size(where))


class Hop:
    """One message to the next rank of the line, and the one that comes from the rank before.

    Both are under way from the start; `wait` gives what came. On CUDA it does not hold up the host, only the
    work that is queued after it.
    """

    def __init__(self, line: SequenceRanks, outgoing: Tensor) -> None:
        self._outgoing = outgoing  # must not be freed before it is sent
        self._incoming = torch.empty_like(outgoing)
        after, before = (line.rank + 1) % line.size, (line.rank - 1) % line.size
        self._works: Sequence[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=line.group, group_peer=after),
                dist.P2POp(dist.irecv, self._incoming, group=line.group, group_peer=before),
            ]
        )

    def wait(self) -> Tensor:
        """What the rank before has sent."""
        wait_for(self._works, "an exchange between parts of the sequence")
        return self._incoming


def gather_from_all(x: Tensor, line: SequenceRanks) -> Tensor:
    """The tensors of all ranks, stacked in rank order; without gradients."""
    everyone = x.new_empty(line.size * x.numel())
    all_gather_flat(everyone, x.reshape(-1), group=line.group)
    return everyone.view(line.size, *x.shape)


def scatter_sum(x: Tensor, line: SequenceRanks) -> Tensor:
    """The i-th part of the sum over all ranks, for rank i; `x` has one part for each rank. Without gradients."""
    mine = x.new_empty(x[0].numel())
    reduce_scatter_flat(mine, x.reshape(-1), group=line.group)
    return mine.view(x.shape[1:])


def pack(*tensors: Tensor) -> Tensor:
    """Tensors as one flat message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(*shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, line: SequenceRanks, *, documents: Tensor | None = None, scale: float | None = None
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

    def block(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionBlock:
        """What a kernel has to compute, of all queries here and all keys and values there."""
        queries, keys, values = q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]
        # The kernel has to see to the order only where no bias says it.
        return AttentionBlock(queries, keys, values, self._bias(q.dtype), self.own and self.ids is None, scale)

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


def _rounds(k: Tensor, v: Tensor, line: SequenceRanks) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank and its keys and values, one's own first; the next are on their way while the caller works."""
    here = pack(k, v)
    for step in range(line.size):
        hop = Hop(line, here) if step < line.size - 1 else None
        keys, values = unpack(here, k.shape, v.shape)
        yield (line.rank - step) % line.size, keys, values
        if hop is not None:
            here = hop.wait()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, line: SequenceRanks, scale: float
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
    line: SequenceRanks,
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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, line: SequenceRanks, scale: float
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


def _line_named(group_name: str) -> SequenceRanks:
    # Operators take no process groups; functional collectives find theirs by this function too.
    return SequenceRanks.of(group_by_name(group_name))


# All-gather: every rank collects all keys and values, and attends with its own queries.


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    line: SequenceRanks,
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
    gathered = _KeyValueGather.apply(pack(k, v), line)  # type: ignore[no-untyped-call]
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


def visible(documents: Tensor, line: SequenceRanks) -> Tensor:
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


class _KeyValueGather(torch.autograd.Function):
    """The flat messages of all ranks, stacked; gradients are summed in fp32 on their way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: SequenceRanks) -> Tensor:
        ctx.line = line
        return gather_from_all(x, line)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mine = scatter_sum(gradient.to(accumulation_dtype(gradient.dtype)), ctx.line)
        return mine.to(gradient.dtype), None


# Ulysses: the ranks trade heads for tokens, and each attends over whole rows of its own heads.


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, line: SequenceRanks, inner: Callable[[Tensor, Tensor, Tensor], Tensor]
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


def _tokens_for_heads(tensors: Sequence[Tensor], line: SequenceRanks) -> Sequence[Tensor]:
    """From (batch, heads, tokens of this rank, dim) to (batch, heads of this rank, tokens, dim), in one message."""
    by_rank = [x.reshape(x.shape[0], line.size, -1, *x.shape[2:]).transpose(0, 1) for x in tensors]
    arrived = _exchange(torch.cat(by_rank, dim=2), line)
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return torch.split(whole, [x.shape[2] for x in by_rank], dim=1)


def _exchange(x: Tensor, line: SequenceRanks) -> Tensor:
    return _HeadExchange.apply(x, line.group)  # type: ignore[no-any-return,no-untyped-call]


class _HeadExchange(torch.autograd.Function):
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
