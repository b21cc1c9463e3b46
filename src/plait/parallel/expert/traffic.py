"""What expert parallelism sends, in theory."""

from __future__ import annotations


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
