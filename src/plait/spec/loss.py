"""Loss as (sum, count), so that a mean never depends on how a batch was cut."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossTerm(NamedTuple):
    """A loss summed over its targets, and how many targets there were.

    Only the strategy divides, by the count over all micro-batches and ranks of the step.
    It is a named tuple, not a dataclass, because sharding hooks look for tensors inside a
    module's output with pytree, which sees through tuples only.
    """

    sum: Tensor
    count: Tensor | int | float  # type: ignore[assignment]  # hides tuple.count, on purpose

    def mean(self) -> Tensor:
        """The mean of this one part; use it for display, never for a backward pass."""
        return self.sum / self.count
