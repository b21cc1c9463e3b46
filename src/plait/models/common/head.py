"""The last layer of a language model: hidden states to logits, or straight to the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plait.models.common.loss import linear_cross_entropy, linear_logits
from plait.spec import LossTerm

if TYPE_CHECKING:
    from plait.models.common.fp8_loss import Fp8Head


class LMHead(nn.Module):
    """A linear layer without bias that can finish the loss itself.

    A tied head has no parameter: it is called with the embedding's. So there is one name and one tensor, and
    no tie that a build on the meta device could break. Head and embedding both belong to the root's shard
    group, whose parameters are whole while the root's forward runs.

    The weight may be a DTensor of which each rank has some words. Then the loss is computed without gathering
    logits, and logits, where asked for, are gathered.
    """

    fp8_head: Fp8Head | None = None
    """How the loss computes its gradients, where that is in 8 bits."""

    def __init__(self, dim: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.features = dim
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, embedding: Tensor | None = None
    ) -> Tensor | LossTerm:
        """Loss where labels are given, logits where not; `embedding` is the weight of a tied head."""
        weight = self.weight if embedding is None else embedding
        assert weight is not None, "a tied head is called with the embedding's weight"
        if labels is None:
            return linear_logits(hidden, weight)
        return linear_cross_entropy(hidden, weight, labels, fp8=self.fp8_head)
