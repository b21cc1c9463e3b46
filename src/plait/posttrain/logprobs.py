"""How likely a model finds tokens that are given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models import IGNORE_INDEX
from plait.world import is_sharded

CHUNK_TOKENS = 4096
"""Tokens whose logits are held in fp32 at one time."""


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, in fp32; zero where the label is -100. Shapes (…, vocabulary) and (…).

    Logits of which each rank has some words are put together first.
    """
    if is_sharded(logits):
        logits = logits.full_tensor()
    flat, targets = logits.flatten(0, -2), labels.flatten()
    parts = [
        -F.cross_entropy(part.float(), target, ignore_index=IGNORE_INDEX, reduction="none")
        for part, target in zip(torch.split(flat, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(labels.shape)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the distribution at each place, in fp32."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def as_bits(numbers: Tensor) -> Tensor:
    """fp32 numbers as whole ones with the same bits, for inputs of a model that are no activations.

    [Note: inputs that keep their precision]
    Floating-point inputs are cast to the compute format. A log-probability of −200 would be off by a half in bf16, and
    what is learned from is its difference from another one.
    """
    return numbers.float().contiguous().view(torch.int32)


def from_bits(numbers: Tensor) -> Tensor:
    """What `as_bits` was given; fp32 numbers stay as they are."""
    return numbers.view(torch.float32) if numbers.dtype == torch.int32 else numbers
