"""Means and whitening over masked values, in a form that ranks can add up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Sums from which mean and variance follow. Those of several parts are added, so no cut changes the result."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, on purpose
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Of the values where the mask is not zero, in fp64."""
        weight = mask.to(torch.float64)
        kept = torch.where(mask.bool(), values.detach().double(), 0.0)
        return cls(weight.sum(), kept.sum(), (kept * kept).sum())

    def plus(self, other: Moments) -> Moments:
        """Of both parts together."""
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """Zero where there is nothing."""
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The unbiased one; zero for less than two values."""
        spread = (self.squares - self.total * self.mean).clamp(min=0.0)
        return torch.where(self.count > 1, spread / (self.count - 1).clamp(min=1), 0.0)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean where the mask is not zero; zero where it is nowhere."""
    weight = mask.to(values.dtype)
    kept = torch.where(mask.bool(), values, 0.0)  # not a product: what lies outside may not be finite
    if dim is None:
        return kept.sum() / weight.sum().clamp(min=1)
    return kept.sum(dim) / weight.sum(dim).clamp(min=1)


def whiten(
    values: Tensor, mask: Tensor, *, moments: Moments | None = None, shift: bool = True, eps: float = 1e-8
) -> Tensor:
    """Values of variance one, and of mean zero unless `shift` is false; zero outside the mask.

    `moments` are those of all ranks and micro-batches; absent, of these values alone.
    """
    known = Moments.of(values, mask) if moments is None else moments
    mean, variance = known.mean.to(values.dtype), known.variance.to(values.dtype)
    white = (values - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask.bool(), white if shift else white + mean, 0.0)
