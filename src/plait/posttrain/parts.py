"""Modules that post-training adds to a model. Each fills itself, whatever the model thinks of initial values."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Part(nn.Module):
    """A module that is no part of the model as it was described."""

    def reset_parameters(self) -> None:
        """Fill the parameters."""
        raise NotImplementedError


class LoraDown(nn.Linear, Part):
    """`A`: from the features to the rank. Starts as any linear layer of torch does, and as `peft` has it."""

    def __init__(self, features: int, rank: int) -> None:
        super().__init__(features, rank, bias=False)


class LoraUp(nn.Linear, Part):
    """`B`: from the rank to the features. Starts at zero, so that the adapter changes nothing at first."""

    def __init__(self, rank: int, features: int) -> None:
        super().__init__(rank, features, bias=False)

    def reset_parameters(self) -> None:
        """All zero."""
        nn.init.zeros_(self.weight)


class ValueHead(Part):
    """One number for each token, in the place of the layer that gave logits. Always in fp32.

    It is called as that layer was, and lets go what it does not need: labels, and the embedding of a tied head.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(features, 1, bias=False).weight.detach())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small, so that all answers are worth about the same at first."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, *_: object) -> Tensor:
        """(…, features) to (…)."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(-1)
