"""Tensors of a checkpoint that training holds in another form, such as moments in 8 bits.

[Note: a few rows at a time] All of them at once in the form that a checkpoint has would take several times the memory
that the other form is chosen for. So rows are made when they are written and let go of, and those that are read are
taken apart before the next; as many at a time as there are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
