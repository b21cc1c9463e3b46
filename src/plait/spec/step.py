"""Loss as (sum, count), so that a mean never depends on how a batch was cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
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


# One rank's part of one forward/backward.


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a model is called with once.

    `inputs` is a mapping (passed as keywords), a tuple or list (passed as positions) or a single object.
    `samples` is how many samples are real. Zero marks a filler: a rank without data of its own still
    takes part in every collective, and its loss and metrics count for nothing.
    """

    inputs: Any
    samples: int


def first_part(inputs: Any) -> Any:
    """The first value of a mapping or sequence; anything else as it is. With that an `nn.Sequential` is called."""
    if isinstance(inputs, Mapping):
        return next(iter(inputs.values()))
    return inputs[0] if isinstance(inputs, (tuple, list)) else inputs


# Tensors of a checkpoint that training holds in another form, such as moments in 8 bits.
#
# [Note: a few rows at a time] All of them at once in the form that a checkpoint has would take several times the memory
# that the other form is chosen for. So rows are made when they are written and let go of, and those that are read are
# taken apart before the next; as many at a time as there are threads.


@dataclass(frozen=True, slots=True)
class Later:
    """A tensor that is made when it is written, and taken apart when it was read; see [Note: a few rows at a time]."""

    like: Tensor
    """Of the same shape and, where ranks have parts of it, the same parts; its values and dtype mean nothing."""
    dtype: torch.dtype
    make: Callable[[int, int], Tensor]
    """Rows of this rank's part, from one to the one behind the last, on the host."""
    take: Callable[[int, Tensor], None]
    """Hold what rows of this rank's part say, from this one on."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.like.shape


Entry = Tensor | Later
"""What a checkpoint holds under one name."""
