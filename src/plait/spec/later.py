"""Tensors of a checkpoint that training holds in another form, such as moments in 8 bits.

[Note: one at a time] All of them at once in the form that a checkpoint has would take several times the memory that the
other form is chosen for. So each is made when it is written and let go of, and one that is read is taken apart before
the next; as many at a time as there are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Later:
    """A tensor that is made when it is written, and taken apart when it was read; see [Note: one at a time]."""

    like: Tensor
    """Of the same shape and, where ranks have parts of it, the same parts; its values and dtype mean nothing."""
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """This rank's part, on the host."""
    take: Callable[[Tensor], None]
    """Hold what this rank's part of it says."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.like.shape


Entry = Tensor | Later
"""What a checkpoint holds under one name."""
