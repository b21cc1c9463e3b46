"""Which experts a token goes to, and what keeps them evenly busy.

[Note: balance does not depend on how a batch was cut]
A load is a property of many tokens, and the tokens that one forward pass sees depend on the layout: on the
size of a micro-batch, and on how many ranks share a step. So nothing here is taken over a forward pass.

- The balance loss, the z loss and the capacity are defined on one row of a batch, which no axis but the
  context axis cuts (see `Router.sum_over_row`). The model weights a row's penalty by the row's number of
  targets, so it adds up over rows as the loss itself does, and divided by the number of all targets it is a
  mean over rows.
- The bias is moved once a step, by the choices of the whole step: counted on each rank, summed over ranks as
  integers, and compared with an even share. Only the sign of the difference is used.

A row counts into that load in the backward pass, and only if its penalty has a gradient. So a pass that is
computed twice counts once, one without a backward pass does not count, nor does a row without targets or a
filler: all the rows that count in the loss, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import MoeConfig
from plait.errors import ModelError


class Routing(NamedTuple):
    """Where the tokens of one forward go."""

    choices: Tensor
    """(tokens, top_k): experts, by number. The number of experts itself stands for a choice that was dropped."""
    weights: Tensor
    """(tokens, top_k), fp32: how much each expert's answer counts."""
    penalty: Tensor
    """(rows,), fp32: balance and z loss, each with its weight; zero outside of training."""


class Router(nn.Module):
    """Scores every expert for every token, in fp32, and chooses the best `top_k`.

    See [Note: balance does not depend on how a batch was cut].
    """

    bias: Tensor | None
    """Added to the scores for choosing, not for weighting; `balance` moves it."""
    load: Tensor | None
    """How often each expert was chosen since `balance` was called last, on this rank."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        if config.top_k > config.experts:
            raise ModelError(
                f"model.top_k={config.top_k} is more than model.experts={config.experts}: "
                "a token cannot be sent to more experts than there are"
            )
        self.num_experts, self.top_k = config.experts, config.top_k
        self.score, self.normalize = config.score, config.normalize
        self.balance_loss, self.z_loss = config.balance_loss, config.z_loss
        self.bias_rate = config.bias_rate
        self.capacity_factor = config.capacity_factor
        self.sum_over_row: Callable[[Tensor], Tensor] = _as_it_is
        """Sums of a row's tokens here → sums of the whole row. Where ranks share rows, another takes its place."""
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        balanced = config.bias_rate > 0
        self.register_buffer("bias", torch.zeros(config.experts) if balanced else None)
        self.register_buffer(
            "load", torch.zeros(config.experts, dtype=torch.int64) if balanced else None, persistent=False
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """Route the tokens of (rows, tokens, dim); those that are not `real` (rows, tokens) go along and do not count.

        Absent, all are real.
        """
        # In fp32 whatever the run computes in: bf16 makes ties of scores that differ, and a choice is not
        # something that can be off by a little.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        index = (scores if self.bias is None else scores + self.bias).topk(self.top_k).indices
        weights = scores.gather(-1, index)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, True)
        counted = chosen if real is None else chosen & real[..., None]
        penalty = self._penalty(logits, scores, counted, real)
        if self.load is not None:
            # Of a row that ranks share, a part without targets counts as well: its gradient is the sum over the row.
            penalty = penalty + self.sum_over_row(_Tally.apply(_nothing(scores), counted.sum(1), self.load))  # type: ignore[no-untyped-call]
        if self.training and self.capacity_factor is not None:
            index = self._drop(index, chosen)
        return Routing(index.flatten(0, 1), weights.flatten(0, 1), penalty)

    def _penalty(self, logits: Tensor, scores: Tensor, chosen: Tensor, real: Tensor | None) -> Tensor:
        """What each row is charged for uneven load and for large logits."""
        rows, tokens, experts = scores.shape
        if not self.training or not (self.balance_loss or self.z_loss):
            return _nothing(scores)
        shares = scores / scores.sum(-1, keepdim=True)
        squares = logits.logsumexp(-1, keepdim=True).square()
        lengths = scores.new_full((rows, 1), tokens)
        if real is not None:
            shares, squares, lengths = shares * real[..., None], squares * real[..., None], real.sum(1, keepdim=True)
        sums = torch.cat([chosen.sum(1).float(), shares.sum(1), squares.sum(1), lengths.float()], 1)
        sums = self.sum_over_row(sums)
        counts, shares, squares, length = torch.split(sums, [experts, experts, 1, 1], 1)
        balance = (counts * shares).sum(1, keepdim=True) * (experts / self.top_k) / length.square()
        return torch.add(self.balance_loss * balance, squares / length, alpha=self.z_loss).squeeze(1)

    def _drop(self, index: Tensor, chosen: Tensor) -> Tensor:
        """Replace the choices of each row that come too late for their expert."""
        capacity = math.ceil(self.capacity_factor * chosen.shape[1] * self.top_k / self.num_experts)  # type: ignore[operator]
        place = chosen.cumsum(1).gather(-1, index)
        return index.where(place <= capacity, self.num_experts)


def balance(routers: list[Router], loads: Tensor) -> None:
    """Move each router's bias against its experts' `loads` (routers, experts), which are those of all ranks."""
    # Times the number of experts instead of divided by it: whole numbers, the same on every rank.
    above = loads.sum(1, keepdim=True) - loads * loads.shape[1]
    for router, sign in zip(routers, above.sign(), strict=True):
        assert router.bias is not None
        router.bias.add_(sign, alpha=router.bias_rate)


class _Tally(torch.autograd.Function):
    """Part of the penalties, as it is. Going back, the rows that count are added to the load."""

    @staticmethod
    def forward(ctx: Any, penalty: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        """`counts` (rows, experts) are the choices of each row."""
        ctx.save_for_backward(counts)
        ctx.load = load
        return penalty.view_as(penalty)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Count, and pass on."""
        (counts,) = ctx.saved_tensors
        ctx.load.add_((counts * (grad != 0)[:, None]).sum(0))
        return grad, None, None


def _nothing(scores: Tensor) -> Tensor:
    """Zeros (rows,), but not constants: their gradient tells which rows count."""
    return scores[:, :0].sum((1, 2))


def _as_it_is(sums: Tensor) -> Tensor:
    return sums
