"""Asking whether a tensor has values; in a fake world none has."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, and is not one of a plan."""
    return not isinstance(tensor, FakeTensor)
