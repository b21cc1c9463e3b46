"""What every collector of gradients is told, however it collects them.

Each technique brings its own: `ShardedGradients` (ZeRO), `GradientBuckets` (replicated parameters), `OwnGradients` (one
process), `StreamedGradients` (offload). The engine calls the two methods below at the same moments for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Gradients(Protocol):
    """What collects gradients over micro-batches and ranks."""

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; `last`: the optimizer steps after its backward pass."""

    def finish(self) -> None:
        """Complete the step's gradients."""


def as_one(collectors: Sequence[Gradients]) -> Gradients:
    """The collectors of all stages that a rank holds, as one."""
    return collectors[0] if len(collectors) == 1 else _Several(collectors)


class _Several:
    """Passes on to each what all are told."""

    def __init__(self, each: Sequence[Gradients]) -> None:
        self._each = each

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch."""
        for one in self._each:
            one.before_backward(last=last)

    def finish(self) -> None:
        """Complete the step's gradients."""
        for one in self._each:
            one.finish()
