"""Work that needs whole matrices, shared out: each is brought together on one rank only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.optim.shards import Rows

Work = Callable[[Tensor], Tensor]
"""Takes a whole tensor and gives one of the same shape and dtype."""


def map_whole(work: Work, tensors: Sequence[Tensor], rows: Sequence[Rows | None]) -> list[Tensor]:
    """`work` on every tensor as a whole; each rank gets the rows of the results that are its own.

    A tensor that is whole here is worked on here. The others of a mesh axis go, in one all-to-all, to the
    ranks that work on them, and come back in a second one: every rank does a share of the work, and no
    rank ever holds more than its share of the whole tensors.
    """
    results: dict[int, Tensor] = {}
    buckets: dict[Hashable, list[tuple[int, Rows]]] = {}
    for index, where in enumerate(rows):
        if where is None:
            results[index] = work(tensors[index])
        else:
            buckets.setdefault(where.key, []).append((index, where))
    for bucket in buckets.values():
        shards = [tensors[index] for index, _ in bucket]
        for (index, _), result in zip(bucket, _exchange(work, shards, [r for _, r in bucket]), strict=True):
            results[index] = result
    return [results[index] for index in range(len(tensors))]


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for each cost, so that the sums are close: the largest first, to the least loaded."""
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def _exchange(work: Work, shards: Sequence[Tensor], rows: Sequence[Rows]) -> list[Tensor]:
    group, rank = rows[0].group, rows[0].rank
    numels = [where.numels() for where in rows]
    ranks = len(numels[0])
    owners = share_out([_cost(where.whole) for where in rows], ranks)
    order = sorted(range(len(shards)), key=lambda index: owners[index])
    mine = [index for index in order if owners[index] == rank]

    # Flattened row blocks in the order of ranks are the flattened whole, so nothing is padded or permuted.
    send = torch.cat([shards[index].flatten() for index in order])
    sent = [sum(numels[i][rank] for i in order if owners[i] == to) for to in range(ranks)]
    received = [sum(numels[i][source] for i in mine) for source in range(ranks)]
    arrived = send.new_empty(sum(received))
    dist.all_to_all_single(arrived, send, received, sent, group=group)

    blocks = list(arrived.split_with_sizes([numels[i][source] for source in range(ranks) for i in mine]))
    for place, index in enumerate(mine):
        own = slice(place, None, len(mine))
        whole = torch.cat(blocks[own]).view(rows[index].whole)
        blocks[own] = work(whole).flatten().split_with_sizes(numels[index])
    back = torch.cat(blocks) if blocks else arrived
    dist.all_to_all_single(send, back, sent, received, group=group)

    pieces = send.split_with_sizes([shards[index].numel() for index in order])
    results = {index: piece.view(shards[index].shape) for index, piece in zip(order, pieces, strict=True)}
    return [results[index] for index in range(len(shards))]


def _cost(shape: torch.Size) -> float:
    # A product with the smaller Gram matrix: elements × the shorter side.
    return float(shape.numel() * min(shape[0], shape[1:].numel()))
