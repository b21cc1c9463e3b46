"""Asking whether a tensor has values; in a fake world none has."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers in it."""
    return not isinstance(tensor, FakeTensor)
