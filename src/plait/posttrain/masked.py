"""Whitening of masked values."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8
"""Added to a variance, so that equal values become zeros."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Values of variance one and mean zero where the mask is not zero, by sums in fp64; zero elsewhere."""
    kept = torch.where(mask.bool(), values.detach().double(), 0.0)  # no product: what lies outside may not be finite
    count, total = mask.double().sum(), kept.sum()
    mean = total / count.clamp(min=1)
    variance = ((kept * kept).sum() - total * mean).clamp(min=0.0) / (count - 1).clamp(min=1)  # the unbiased one
    white = (values - mean.to(values.dtype)) * torch.rsqrt(variance.to(values.dtype) + EPS)
    return torch.where(mask.bool(), white, 0.0)
