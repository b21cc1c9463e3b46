"""What data parallelism sends, in theory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import NamedTuple

from plait.distributed.context_parallel_attention import ContextKind, padded_length
from plait.distributed.pipeline_schedule import placement_of


def data_traffic(
    *,
    stage: int,
    shapes: Iterable[Sequence[int]],
    shards: int,
    copies: int = 1,
    micro_batches: int = 1,
    itemsize: int = 4,
    reduced_itemsize: int = 4,
) -> float:
    """Bytes that one rank sends in one step, for parameters of these shapes (of the rank's own tensor-parallel part).

    `shards` ranks share one copy of states, of which there are `copies`; of ZeRO 0 each of the shards × copies ranks
    has all. With n = shards, c = copies, m micro-batches, e = `itemsize` of the parameters as they compute, r =
    `reduced_itemsize` of the gradients as they are summed, and P numbers in the parameters:

    | stage | gathered                 | scattered                | summed over copies        |
    |-------|--------------------------|--------------------------|---------------------------|
    | 0     |                          |                          | 2 (nc - 1) / nc · P · r   |
    | 1     | (n - 1) / n · P · e      | (n - 1) / n · P · r      | 2 (c - 1) / c · P / n · r |
    | 2     | (n - 1) / n · P · e      | m · (n - 1) / n · P · r  | m times that              |
    | 3     | 2 m · (n - 1) / n · P · e | m · (n - 1) / n · P · r | m times that              |

    Stage 3 gathers before the forward and before the backward pass of each micro-batch; 1 and 2 gather once a step.
    Where a parameter is sharded, its rows are filled up until n divides them, and P counts the filling, too.
    """
    if stage == 0:
        ranks = shards * copies
        return _around(sum(map(prod, shapes)) * reduced_itemsize, ranks, times=2)
    numbers = sum(-(-rows // shards) * shards * prod(rest) for rows, *rest in shapes)
    gathers = 2 * micro_batches if stage == 3 else 1
    reductions = 1 if stage == 1 else micro_batches
    gathered = _around(numbers * itemsize, shards, times=gathers)
    scattered = _around(numbers * reduced_itemsize, shards, times=reductions)
    return gathered + scattered + _around(numbers / shards * reduced_itemsize, copies, times=2 * reductions)


def _around(size: float, ranks: int, *, times: int) -> float:
    """Bytes that a rank sends while `size` bytes go around a ring so many times."""
    return times * size * (ranks - 1) / ranks


# What tensor and sequence parallelism send, in theory.


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """Bytes of the tensors that go through each kind of collective, on one rank.

    For an all-gather and a reduce-scatter that is the size of the whole; for an all-reduce and an all-to-all, of what
    a rank puts in.
    """

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    all_to_all: int = 0

    def sent(self, size: int) -> float:
        """Bytes that each of `size` ranks sends: an all-reduce goes around a ring twice, the others once."""
        once = self.all_gather + self.reduce_scatter + self.all_to_all
        return (2 * self.all_reduce + once) * (size - 1) / size


def tensor_traffic(
    *,
    tokens: int,
    dim: int,
    layers: int,
    sequence: bool,
    itemsize: int,
    recompute: bool = False,
    shared: int = 0,
    exchanged: int = 0,
    vocabulary: bool = True,
    mixtures: int = 0,
    top_k: int = 0,
    beside: bool = False,
) -> TensorTraffic:
    """What one forward and backward pass over `tokens` tokens brings, for layers of two regions each.

    With A = tokens · dim · itemsize, the activations of one place:

    - tensor parallel alone, a layer: all-reduce 4 A (each region's sum, and its input's gradient);
    - with `sequence`, a layer: all-gather 4 A and reduce-scatter 4 A, which is as much as 4 A all-reduced; and
      all-gather 2 A in all, where the last block is left and, in the backward pass, where the first was entered;
    - `recompute` of every layer repeats its forward pass up to the last matrix product: all-reduce A a layer, or
      all-gather 2 A and reduce-scatter A;
    - `vocabulary` (embedding and head are split): all-reduce 2 A, for the embedding's sum and the gradient of the
      head's input, and 12 bytes a token for the loss (the largest logit, the sum, the target, in fp32);
    - `shared`: parameters of the whole model that all ranks have and whose gradients are summed, in fp32: all-reduce
      4 bytes each. These are, with `sequence`, the blocks' norms and the biases of row-parallel layers; and keys and
      values with fewer heads than ranks;
    - `exchanged`: parameters of fused projections that this rank has: all-to-all itemsize bytes each, forward (again
      with `recompute`) and backward;
    - `mixtures` of the layers have experts in place of their second region: all-reduce 2 A as there, and 4 bytes for
      each of the `top_k` weights of a token, whose gradient is summed. With `sequence` a mixture sees all tokens: to
      the all-reduces comes all-gather 2 A, and there is no reduce-scatter. Shared experts `beside` the others are a
      region more, on all tokens: all-reduce 2 A, and with `recompute` A, for the sum of the others.

    The number of ranks does not appear: `Traffic.sent` brings it in.
    """
    place = tokens * dim * itemsize
    again = 1 if recompute else 0
    all_reduce = 4 * shared
    all_gather = reduce_scatter = 0
    if sequence:
        all_gather = (4 + 2 * again) * layers * place + 2 * place
        reduce_scatter = ((4 + again) * layers - 2 * mixtures) * place
        all_reduce += 2 * mixtures * place
    else:
        all_reduce += (4 + again) * layers * place
    all_reduce += mixtures * (4 * top_k * tokens + (2 + again) * beside * place)
    if vocabulary:
        all_reduce += 2 * place + 12 * tokens
    return TensorTraffic(all_reduce, all_gather, reduce_scatter, (2 + again) * exchanged * itemsize)


# How much context parallelism sends, as a function of sizes alone.


class ContextTraffic(NamedTuple):
    """Bytes that one rank sends for one micro-batch."""

    forward: int
    backward: int


def context_traffic(
    kind: ContextKind,
    *,
    size: int,
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    element_size: int,
    recompute: bool = False,
    documents: bool = False,
) -> ContextTraffic:
    """What one rank of `size` sends for a micro-batch of `batch` rows of `tokens` (of the whole row).

    `heads` and `kv_heads` are those that this rank has (after tensor parallelism). `element_size` is that of keys
    and values in bytes, 2 for bf16. With L = tokens / size (rows filled up until they divide), e = element_size,
    f = max(e, 4), KV = 2 · batch · kv_heads · L · head_dim, a layer sends

    | kind      | forward                  | backward                     |
    |-----------|--------------------------|------------------------------|
    | ring      | (size - 1) · KV · e      | (size - 1) · KV · (e + f)    |
    | allgather | (size - 1) · KV · e      | (size - 1) · KV · f          |
    | ulysses   | (size - 1) / size · A · e | the same                    |

    where A = 2 · batch · L · head_dim · (heads + lcm(kv_heads, size)): queries, keys, values and output, keys and
    values repeated where ranks share a head. A collective counts as what its best algorithm sends: an
    all-gather or reduce-scatter (size - 1) parts, an all-to-all (size - 1) of `size` parts.

    With `recompute` the backward pass does the layers' forward again. With `documents` the forward pass adds, once
    for all layers, the document ids: (size - 1) · batch · L · 8.
    """
    local = padded_length(tokens, size, kind) // size
    others = size - 1
    summed = max(element_size, 4)
    if kind == "ulysses":
        elements = 2 * batch * local * head_dim * (heads + lcm(kv_heads, size))
        forward = backward = others * elements // size * element_size
    else:
        message = 2 * batch * kv_heads * local * head_dim
        forward = others * message * element_size
        backward = others * message * (summed + element_size if kind == "ring" else summed)
    if recompute:
        backward += forward
    ids = others * batch * local * 8 if documents else 0
    return ContextTraffic(layers * forward + ids, layers * backward)


# What expert parallelism sends, in theory.


def expert_traffic(
    *,
    tokens: int,
    dim: int,
    itemsize: int,
    top_k: int,
    experts: int,
    ep: int,
    mixtures: int,
    tp: int = 1,
    micro_batches: int = 1,
    recomputed: int = 0,
    backward: bool = True,
) -> int:
    """The bytes that one rank sends over `ep` in one step, where routing is balanced.

    A rank has t tokens in a step, in m micro-batches, of d numbers of i bytes. Each token is k rows, of which
    the share (ep - 1) / ep has its expert elsewhere. A row goes there and its answer comes back; its gradients
    do the same the other way round; a layer that is recomputed does the way of the forward pass once more. Before
    rows are sent, ranks tell each other how many there will be for each of the e experts, as 8 bytes each:

        (ep - 1) / ep · ( t · k · d · i · (2 · forwards + 2 · backwards) + m · e · 8 · forwards ) / tp

    with forwards = mixtures + recomputed mixtures, and backwards = mixtures. The ranks of tp see the same tokens, and
    each sends those that chose its own experts; what they sum is in `parallel.tensor.tensor_traffic`.

    Without balance each rank sends what its tokens chose, and what others chose here: over all ranks the sum is the
    same but for what stays at home.
    """
    forwards = mixtures + recomputed
    backwards = mixtures if backward else 0
    rows = tokens * top_k * dim * itemsize * 2 * (forwards + backwards)
    counts = micro_batches * experts * 8 * forwards
    return (rows + counts) * (ep - 1) // (ep * tp)


# What a pipeline sends, in theory.


def pipeline_traffic(
    schedule: str,
    *,
    ranks: int,
    rank: int,
    micro_batches: int,
    activation_bytes: int,
    virtual: int | None = None,
    tied_bytes: int = 0,
    backward: bool = True,
) -> int:
    """The bytes that one rank sends in one step.

    With m micro-batches, and activations of a bytes between two stages:

        m · a · (stages of this rank whose next stage lies elsewhere
                 + stages of this rank whose previous stage lies elsewhere, where there is a backward pass)
        + the gradients of weights that the first and the last stage share, where they lie on different ranks

    So an inner rank with v stages sends 2 · v · m · a. What stages of one rank hand each other is not sent. The
    first time that inputs of some shape come, a few hundred bytes more tell each next stage what it will get.
    """
    placement = placement_of(schedule, ranks, virtual)
    last = len(placement) - 1
    crossings = 0
    for stage, owner in enumerate(placement):
        if owner != rank:
            continue
        crossings += stage < last and placement[stage + 1] != rank
        crossings += backward and stage > 0 and placement[stage - 1] != rank
    shares = rank in (placement[0], placement[last]) and placement[0] != placement[last]
    return crossings * micro_batches * activation_bytes + (tied_bytes if backward and shares else 0)
