"""What data parallelism sends, in theory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


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
