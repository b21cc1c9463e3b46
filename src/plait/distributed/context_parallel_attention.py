"""Context-parallel attention: ring attention, Ulysses (all-to-all) and all-gather attention; splitting of batches.

[Note: the ring]
Keys and values are sent from rank to rank in a ring; queries stay. With n ranks, rank r holds the chunks r and
2n - 1 - r of each row ([Note: balanced causal attention]): its first and second half. In step s it computes with the
keys and values of rank r - s (modulo n), while those of rank r - s - 1 are being sent to it. Which of its queries
attend to which of these keys follows from the order of the chunks in the row:

    its own keys          all queries to all keys, with a causal mask (both halves are in order)
    of a lower rank       all queries to the first half of the keys; the second half comes after all queries
    of a higher rank      the second half of the queries to all keys; all keys come after the first half

So only the step with its own keys needs a causal mask, and every step takes every rank the same time. The results of
the steps are merged with their log-sum-exp, in fp32.

The backward pass sends keys and values around the ring again. Their gradients, in fp32, follow one step behind: each
rank adds its contribution to what it received and sends the sum on. The sum for the keys of a rank begins at the next
rank and arrives at the rank itself after n - 1 hops. Besides its own tensors a rank holds two messages with keys and
values and two with gradients, however many ranks a row is split over.
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

from plait.distributed.collectives import all_gather_flat, all_to_all, reduce_scatter_flat
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

# ---- kernels: attention of some queries to some keys, with the log-sum-exp by which results are merged
#
# A *block* is the attention of some queries to some keys. A kernel is a pair of functions. Forward returns the output
# of a block and, for each query, the log-sum-exp of its scores. Backward takes the output and the log-sum-exp over
# *all* keys, merged over blocks, and returns the contribution of one block to the gradients. The gradients are the sums
# of these contributions, however the keys were divided into blocks.
#
# For a query without any allowed key in a block the log-sum-exp is so low that its output has no weight in a merge.


_aten: Any = torch.ops.aten


class AttentionBlock(NamedTuple):
    """The inputs of a kernel: queries, and the keys and values that they attend to.

    Each is (batch, heads, tokens, head_dim); keys and values may have fewer heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """(batch, 1, queries, keys), added to the scores."""
    causal: bool
    """Whether a query attends only to keys up to its own position."""
    scale: float
    """The factor that scores are multiplied by before softmax."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of attention for a block; tests compare all others with `reference`."""

    name: str
    forward: Callable[[AttentionBlock], tuple[Tensor, Tensor]]
    """A function of a block that returns the output and the log-sum-exp (batch, heads, queries)."""
    backward: Callable[[Tensor, AttentionBlock, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """A function of (gradient of the output, block, output, log-sum-exp) that returns the gradients of q, k and v."""


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, *, biased: bool) -> Kernel:
    """Return the fastest kernel that supports such tensors; `biased`: the block has a bias."""
    if q.device.type == "cpu":
        return cpu if q.shape[-1] == v.shape[-1] else reference
    if q.device.type != "cuda" or q.shape[-1] % 8 or v.shape[-1] % 8:
        return reference
    half = q.dtype in (torch.float16, torch.bfloat16)
    grouped = q.shape[1] != k.shape[1]
    if half and not biased and q.shape[-1] == v.shape[-1] <= 256:
        params = SDPAParams(q, k, v, None, 0.0, False, grouped)
        # Without a GPU the tensors are fake, and the kernel of a GPU is simulated.
        if not torch.cuda.is_available() or can_use_flash_attention(params):
            return flash
    if half or q.dtype == torch.float32:
        keys, values = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        params = SDPAParams(q, keys, values, None, 0.0, False, False)
        if not torch.cuda.is_available() or can_use_efficient_attention(params):
            return efficient
    return reference


def bias_of(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias for a boolean mask: 0 where a query may attend to a key, else a large negative number.

    Not minus infinity: the output of a query without any allowed key would be NaN. In memory each row has a multiple of
    16 elements, as the memory-efficient kernel requires.
    """
    width = -(-allowed.shape[-1] // 16) * 16
    bias = torch.zeros((*allowed.shape[:-1], width), dtype=dtype, device=allowed.device)[..., : allowed.shape[-1]]
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min / 4)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results of `dtype` are summed: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _reference(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    scores = _scores(block)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ _repeat_heads(block.v, block.q).to(weights.dtype)).to(block.q.dtype), lse


def _reference_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = block
    weights = (_scores(block) - lse[..., None]).exp()
    gradient, output = gradient.to(weights.dtype), output.to(weights.dtype)
    of_weights = gradient @ _repeat_heads(v, q).to(weights.dtype).mT
    of_scores = weights * (of_weights - (gradient * output).sum(-1, keepdim=True)) * block.scale
    of_q = of_scores @ _repeat_heads(k, q).to(weights.dtype)
    return of_q, _sum_heads(of_scores.mT @ q.to(weights.dtype), k), _sum_heads(weights.mT @ gradient, v)


def _scores(block: AttentionBlock) -> Tensor:
    q, k, _, bias, causal, scale = block
    dtype = accumulation_dtype(q.dtype)
    scores = q.to(dtype) @ _repeat_heads(k, q).to(dtype).mT * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with each head repeated for the query heads that share it."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _sum_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of keys or values before `_repeat_heads`: the sum over the query heads that share a head."""
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
    # Without dropout the random state is not read, but the operator requires these arguments.
    state = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    of_q, of_k, of_v = aten_flash_backward(
        gradient, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
    )
    return of_q, of_k, of_v


def _efficient(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    output, lse, *_ = aten_efficient(
        q, _repeat_heads(k, q), _repeat_heads(v, q), _for_every_head(bias, q), True, 0.0, causal, scale=scale
    )
    return output, lse[:, :, : q.shape[2]]  # the kernel pads queries to a multiple of 32


def _efficient_backward(
    gradient: Tensor, block: AttentionBlock, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, bias, causal, scale = block
    # The kernel pads queries to a multiple of 32; an infinite log-sum-exp gives the padding no weight.
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("inf"))
    padded[:, :, : lse.shape[2]] = lse
    state = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    of_q, of_k, of_v, _ = aten_efficient_backward(
        _by_token(gradient),
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _for_every_head(bias, q),
        _by_token(output),
        padded,
        *state,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return of_q, _sum_heads(of_k, k), _sum_heads(of_v, v)


def _by_token(x: Tensor) -> Tensor:
    """Return the same values, laid out in memory as (batch, tokens, heads, dim), like the output of the kernel.

    In 16 bits the kernel assumes that layout, and reads out of bounds with any other.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _for_every_head(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(-1, q.shape[1], -1, -1)


reference = Kernel("reference", _reference, _reference_backward)
"""The definition of attention in plain operations; needs memory for all scores of a block."""
cpu = Kernel("cpu", _cpu, _cpu_backward)
flash = Kernel("flash", _flash, _flash_backward)
efficient = Kernel("efficient", _efficient, _efficient_backward)

# ---- which tokens of a row belong to which rank, and splitting batches
#
# [Note: balanced causal attention]
# Late tokens attend to more tokens than early ones. So a row is split into twice as many chunks as there are ranks, and
# rank r of n gets the chunks r and 2n - 1 - r. With four ranks:
#
#     rank      0  1  2  3  3  2  1  0
#     chunk     0  1  2  3  4  5  6  7
#
# So every rank has the same number of (query, key) pairs. With Ulysses a rank computes full rows for some of the heads,
# which is balanced anyway; there a row has n chunks, and rank r has chunk r.


ContextKind = Literal["ring", "ulysses", "allgather"]
"""The values of `strategy.context.kind`; see `apply_context_parallel`."""

CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "ulysses", "allgather")

_SEQUENCE_INPUTS: Mapping[str, int] = MappingProxyType(
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
"""The names of inputs that are split along the sequence, and the value that each is padded with."""


def chunks_of(rank: int, size: int, kind: ContextKind) -> tuple[int, ...]:
    """Return the numbers of the chunks of a row that a rank holds; see [Note: balanced causal attention]."""
    return (rank,) if kind == "ulysses" or size == 1 else (rank, 2 * size - 1 - rank)


def chunk_count(size: int, kind: ContextKind) -> int:
    """Return how many chunks a row is split into."""
    return size if kind == "ulysses" or size == 1 else 2 * size


def padded_length(tokens: int, size: int, kind: ContextKind) -> int:
    """Return the length of a row after it is padded to a multiple of the number of chunks."""
    chunks = chunk_count(size, kind)
    return -(-tokens // chunks) * chunks


def split(x: Tensor, rank: int, size: int, kind: ContextKind, *, dim: int = 1) -> Tensor:
    """Return a rank's chunks of a tensor, concatenated along `dim`, whose size must be a multiple of the chunks."""
    chunks = x.chunk(chunk_count(size, kind), dim=dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, size, kind)], dim=dim)


def unsplit(shards: Sequence[Tensor], kind: ContextKind, *, dim: int = 1) -> Tensor:
    """Return the full tensor from what `split` returned on each rank: the inverse of `split`."""
    size = len(shards)
    chunks: dict[int, Tensor] = {}
    for rank, shard in enumerate(shards):
        indices = chunks_of(rank, size, kind)
        chunks.update(zip(indices, shard.chunk(len(indices), dim=dim), strict=True))
    return torch.cat([chunks[i] for i in range(len(chunks))], dim=dim)


def split_batch(
    inputs: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    kind: ContextKind = "ring",
    positions_as: str = "positions",
    real_as: str | None = None,
) -> dict[str, Any]:
    """Return a rank's part of a batch of token rows, the input of a model after `apply_context_parallel`.

    `input_ids`, `labels`, `positions`, `position_ids`, `document_ids`, `token_type_ids` and a 2-D `attention_mask`
    are split along the sequence; everything else is returned as it is. Labels have to be shifted already (as Plait's
    data has them): the next token may be on another rank.

    The result always has positions, because a rank cannot count them itself. If the batch has none, they are those of
    the full row (0, 1, 2, …), with the name `positions_as` ("position_ids" for a bare `transformers` model).

    A row whose length is not a multiple of the chunks is padded at its end with token 0, label -100, position 0 and
    document -1. No real token attends to the padding after it, and the padding has no loss, so the sum of the losses,
    their count and all gradients do not change. If `real_as` is given and rows are padded, the result has a boolean
    mask with this name, true for real tokens: for models that count tokens.
    """
    rows = _rows(inputs)
    tokens = rows.shape[1]
    whole = dict(inputs)
    if all(whole.get(name) is None for name in ("positions", "position_ids")):
        whole[positions_as] = torch.arange(tokens, device=rows.device)[None]
    missing = padded_length(tokens, size, kind) - tokens
    for name, filler in _SEQUENCE_INPUTS.items():
        x = whole.get(name)
        if x is None:
            continue
        _check_sequence_input(name, x, tokens)
        whole[name] = split(F.pad(x, (0, missing), value=filler) if missing else x, rank, size, kind)
    if missing and real_as is not None:
        real = torch.arange(tokens + missing, device=rows.device) < tokens
        whole[real_as] = split(real.expand(len(rows), -1), rank, size, kind)
    return whole


def _rows(inputs: Mapping[str, Any]) -> Tensor:
    rows = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        given = f"those of {', '.join(inputs)}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise ModelError(
            "context parallelism splits rows of tokens, so a batch has to be a mapping with `input_ids` of shape "
            f"(batch, tokens), not {given}; set strategy.layout.cp: 1 for other data"
        )
    return rows


def _check_sequence_input(name: str, x: object, tokens: int) -> None:
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != tokens:
        given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ModelError(
            f"{name} has to be of shape (batch, tokens={tokens}) to be split along the sequence, not {given}"
            + ("; give document_ids instead of a mask of pairs" if name == "attention_mask" else "")
        )


# ---- the ranks of a sequence, and the messages between them


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The process group over whose ranks a row is split, with its size and this process's rank in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, where: DeviceMesh | dist.ProcessGroup) -> ContextGroup:
        """Return the `ContextGroup` for a mesh with one axis, or for a process group."""
        if isinstance(where, DeviceMesh):
            if where.ndim != 1:
                raise WorldError(
                    f"a sequence is split along one mesh axis, not along {where.mesh_dim_names or where.ndim}; "
                    'pass a slice, such as mesh["cp"]'
                )
            where = where.get_group()
        return cls(where, dist.get_rank(where), dist.get_world_size(where))


class Hop:
    """A message to the next rank of the ring, and one from the rank before; both begin when it is created."""

    def __init__(self, cp: ContextGroup, outgoing: Tensor) -> None:
        self._outgoing = outgoing  # kept, so that it is not freed before it is sent
        self._incoming = torch.empty_like(outgoing)
        after, before = (cp.rank + 1) % cp.size, (cp.rank - 1) % cp.size
        self._works: Sequence[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, group=cp.group, group_peer=after),
                dist.P2POp(dist.irecv, self._incoming, group=cp.group, group_peer=before),
            ]
        )

    def wait(self) -> Tensor:
        """Return the tensor that the rank before has sent. On CUDA only the current stream waits, not the host."""
        wait_for(self._works, "an exchange between parts of the sequence")
        return self._incoming


def all_gather_stacked(x: Tensor, cp: ContextGroup) -> Tensor:
    """Return the tensors of all ranks, stacked in rank order; not differentiable."""
    everyone = x.new_empty(cp.size * x.numel())
    all_gather_flat(everyone, x.reshape(-1), group=cp.group)
    return everyone.view(cp.size, *x.shape)


def reduce_scatter_stacked(x: Tensor, cp: ContextGroup) -> Tensor:
    """Sum `x`, which has one slice per rank, over all ranks; return this rank's slice. Not differentiable."""
    local = x.new_empty(x[0].numel())
    reduce_scatter_flat(local, x.reshape(-1), group=cp.group)
    return local.view(x.shape[1:])


def pack(*tensors: Tensor) -> Tensor:
    """Return the tensors, flattened and concatenated, as one message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unpack(flat: Tensor, *shapes: Sequence[int]) -> list[Tensor]:
    """Return the tensors of a message, which have these shapes, as views of it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [chunk.view(*shape) for chunk, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: ContextGroup, *, documents: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return causal attention of this rank's queries over full rows, by ring attention; see [Note: the ring].

    Tensors are (batch, heads, tokens of this rank, head_dim), split as by `split_batch`; keys and values may have
    fewer heads. With `documents`, the document ids of all ranks (rank, batch, tokens), tokens attend within their
    document only.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        compiled: Tensor = _compiled_ring(q, k, v, documents, cp.group.group_name, scale)[0]
        return compiled
    return _Ring.apply(q, k, v, documents, cp, scale)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True, slots=True)
class _BlockPair:
    """Which queries of this rank attend to which keys of a rank, in one step of the ring."""

    queries: slice
    keys: slice
    same_rank: bool
    """Whether the keys are those of this rank: only then a causal mask is needed."""
    ids: tuple[Tensor, Tensor] | None
    """Document ids of the queries and of the keys, (batch, tokens) each."""

    def block(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionBlock:
        """Return the block for a kernel, from all queries of this rank and all keys and values of the other."""
        queries, keys, values = q[:, :, self.queries], k[:, :, self.keys], v[:, :, self.keys]
        # Where there is a bias, it includes the causal mask.
        return AttentionBlock(queries, keys, values, self._bias(q.dtype), self.same_rank and self.ids is None, scale)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the bias of this block alone: those of all blocks together are as large as a full mask."""
        if self.ids is None:
            return None
        queries, keys = self.ids
        allowed = queries[:, :, None] == keys[:, None, :]
        return bias_of((allowed.tril() if self.same_rank else allowed)[:, None], dtype)


def _block_pair(rank: int, source: int, tokens: int, documents: Tensor | None) -> _BlockPair:
    queries = slice(tokens // 2, None) if source > rank else slice(None)
    keys = slice(0, tokens // 2) if source < rank else slice(None)
    ids = None if documents is None else (documents[rank][:, queries], documents[source][:, keys])
    return _BlockPair(queries, keys, source == rank, ids)


def _ring_steps(k: Tensor, v: Tensor, cp: ContextGroup) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, its keys, its values) for each rank, this one first; the next are sent while the caller computes."""
    message = pack(k, v)
    for step in range(cp.size):
        hop = Hop(cp, message) if step < cp.size - 1 else None
        keys, values = unpack(message, k.shape, v.shape)
        yield (cp.rank - step) % cp.size, keys, values
        if hop is not None:
            message = hop.wait()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, cp: ContextGroup, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = choose_kernel(q, k, v, biased=documents is not None)
    output = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=accumulation_dtype(q.dtype))
    lse = q.new_empty(q.shape[:-1], dtype=output.dtype)
    for source, keys, values in _ring_steps(k, v, cp):
        pair = _block_pair(cp.rank, source, q.shape[2], documents)
        block_output, block_lse = kernel.forward(pair.block(q, keys, values, scale))
        if source == cp.rank:
            output.copy_(block_output)
            lse.copy_(block_lse)
        else:
            _merge(output[:, :, pair.queries], lse[:, :, pair.queries], block_output, block_lse)
    return output.to(q.dtype), lse


def _merge(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
    """Merge the result for further keys into `output` and `lse`, the result for the keys so far, in place."""
    total = torch.logaddexp(lse, block_lse)
    output.mul_((lse - total).exp_()[..., None]).add_(block_output * (block_lse - total).exp_()[..., None])
    lse.copy_(total)


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    cp: ContextGroup,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = choose_kernel(q, k, v, biased=documents is not None)
    gradient = gradient.contiguous()
    of_q = torch.zeros_like(q, dtype=lse.dtype)
    local_sums = torch.zeros(k.numel() + v.numel(), dtype=lse.dtype, device=q.device)
    in_flight: Hop | None = None
    for source, keys, values in _ring_steps(k, v, cp):
        pair = _block_pair(cp.rank, source, q.shape[2], documents)
        queries = pair.queries
        block_q, block_k, block_v = kernel.backward(
            gradient[:, :, queries],
            pair.block(q, keys, values, scale),
            output[:, :, queries],
            lse[:, :, queries].contiguous(),
        )
        of_q[:, :, queries] += block_q
        if source == cp.rank:
            sums = local_sums
        elif in_flight is None:
            sums = torch.zeros_like(local_sums)
        else:
            sums = in_flight.wait()
        of_k, of_v = unpack(sums, k.shape, v.shape)
        of_k[:, :, pair.keys] += block_k
        of_v[:, :, pair.keys] += block_v
        if source != cp.rank:
            in_flight = Hop(cp, sums)
    if in_flight is not None:
        local_sums += in_flight.wait()
    of_k, of_v = unpack(local_sums, k.shape, v.shape)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, cp: ContextGroup, scale: float
    ) -> Tensor:
        output, lse = _forward(q, k, v, documents, cp, scale)
        ctx.save_for_backward(q, k, v, output, lse, documents)
        ctx.cp, ctx.scale = cp, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, output, lse, documents = ctx.saved_tensors
        gradients = _backward(gradient, q, k, v, output, lse, documents, ctx.cp, ctx.scale)
        return *gradients, None, None, None


# For `torch.compile`, which cannot trace point-to-point messages, ring attention is a custom operator for the forward
# pass and one for the backward pass. In eager mode it is neither, so that dispatch modes that count or fake operations
# see the operations inside.


@torch.library.custom_op("plait::ring_attention", mutates_args=())
def _compiled_ring(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str, scale: float
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, documents, _group_named(group_name), scale)


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
    of_q, of_k, of_v = _backward(gradient, q, k, v, output, lse, documents, _group_named(group_name), scale)
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.group_name, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _autograd_backward(ctx: Any, gradient: Tensor, _of_lse: Tensor | None) -> Any:
    q, k, v, output, lse, documents = ctx.saved_tensors
    gradients = _compiled_ring_backward(gradient, q, k, v, output, lse, documents, ctx.group_name, ctx.scale)
    return *gradients, None, None, None


_compiled_ring.register_autograd(_autograd_backward, setup_context=_setup_context)


def _group_named(group_name: str) -> ContextGroup:
    # A custom operator cannot take a process group, only its name.
    return ContextGroup.of(group_by_name(group_name))


# ---- all-gather attention: every rank gathers all keys and values, and attends with its own queries


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextGroup,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return causal attention of this rank's queries over full rows, whose keys and values are all-gathered.

    Tensors are (batch, heads, tokens of this rank, head_dim), split as by `split_batch`; keys and values may have
    fewer heads. `mask` (batch, 1, tokens of this rank, all tokens) is true where a token may be attended to; see
    `visible`. Needs memory for all keys and values of a row.
    """
    gathered = gather_with_gradient(pack(k, v), cp)
    messages = [unpack(flat, k.shape, v.shape) for flat in gathered]
    k, v = (unsplit([message[i] for message in messages], "allgather", dim=2) for i in range(2))
    outputs = []
    chunk = q.shape[2] // 2
    for half, index in enumerate(chunks_of(cp.rank, cp.size, "allgather")):
        rows, end = slice(half * chunk, (half + 1) * chunk), (index + 1) * chunk
        visible_keys = None if mask is None else mask[:, :, rows, :end]
        outputs.append(_attend_at_the_end(q[:, :, rows], k[:, :, :end], v[:, :, :end], visible_keys, dropout, scale))
    return torch.cat(outputs, dim=2)


def _attend_at_the_end(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Return attention of queries that are the last tokens of the keys; causal without a mask."""
    if mask is None and not torch.compiler.is_compiling() and choose_kernel(q, k, v, biased=False) is flash:
        # The causal mask of this operator puts the last query at the last key, as needed here.
        output: Tensor = aten_flash(q, k, v, dropout, True, scale=scale)[0]
        return output
    if mask is None:
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if q.shape[1] != k.shape[1]:
        # The kernels that take a mask do not support fewer key heads than query heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


def visible(documents: Tensor, cp: ContextGroup) -> Tensor:
    """Return the boolean mask (batch, 1, tokens of this rank, all tokens) of the tokens that may be attended to.

    These are the token itself and earlier ones of the same document. `documents` are the document ids of all ranks,
    (rank, batch, tokens).
    """
    everyone = unsplit(list(documents), "allgather")
    chunk = documents.shape[2] // 2
    starts = torch.tensor(chunks_of(cp.rank, cp.size, "allgather"), device=documents.device) * chunk
    local = (starts[:, None] + torch.arange(chunk, device=documents.device)).flatten()
    earlier = local[:, None] >= torch.arange(everyone.shape[1], device=documents.device)
    same = documents[cp.rank][:, :, None] == everyone[:, None, :]
    return (same & earlier)[:, None]


def gather_with_gradient(x: Tensor, cp: ContextGroup) -> Tensor:
    """Return the tensors of all ranks, stacked in rank order; the backward pass reduce-scatters gradients in fp32."""
    return _Gather.apply(x, cp)  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp = cp
        return all_gather_stacked(x, cp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        local = reduce_scatter_stacked(gradient.to(accumulation_dtype(gradient.dtype)), ctx.cp)
        return local.to(gradient.dtype), None


# ---- Ulysses: an all-to-all from tokens to heads, so that each rank attends over full rows of its heads


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, cp: ContextGroup, inner: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the attention of this rank's tokens that `inner` computes over full rows, for some heads on each rank.

    Tensors are (batch, heads, tokens of this rank, head_dim), where rank r has chunk r of each row. One all-to-all
    gives each of n ranks all tokens of 1/n of the heads, `inner` is called with them, and another all-to-all returns
    the results to the ranks of the tokens.

    The heads of `q` have to divide by the number of ranks. If those of keys and values do not, heads are repeated until
    they do, so that several ranks have the same head.
    """
    check_heads(q.shape[1], cp.size)
    kv_heads = lcm(k.shape[1], cp.size)
    if kv_heads > k.shape[1]:
        k, v = (x.repeat_interleave(kv_heads // x.shape[1], dim=1) for x in (k, v))
    if q.shape[-1] == v.shape[-1]:
        q, k, v = _scatter_heads([q, k, v], cp)
    else:
        (q, k), (v,) = _scatter_heads([q, k], cp), _scatter_heads([v], cp)
    # The way back: split (batch, heads of this rank, all tokens, dim) by tokens, concatenate what is received by heads.
    back = torch.stack(inner(q, k, v).chunk(cp.size, dim=2))
    return all_to_all(back, cp.group).transpose(0, 1).flatten(1, 2)


def check_heads(heads: int, size: int) -> None:
    """Raise a `ModelError` if the heads do not divide by the number of ranks."""
    if heads % size:
        raise ModelError(
            f"ulysses splits the heads of attention over the ranks, and {heads} heads do not divide by cp={size}; "
            "use another cp, or ring or allgather, which split only the sequence"
        )


def _scatter_heads(tensors: Sequence[Tensor], cp: ContextGroup) -> Sequence[Tensor]:
    """Return (batch, heads of this rank, all tokens, dim) for each (batch, heads, tokens of this rank, dim).

    All tensors are sent in one all-to-all.
    """
    by_rank = [x.reshape(x.shape[0], cp.size, -1, *x.shape[2:]).transpose(0, 1) for x in tensors]
    arrived = all_to_all(torch.cat(by_rank, dim=2), cp.group)
    whole = arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return torch.split(whole, [x.shape[2] for x in by_rank], dim=1)
