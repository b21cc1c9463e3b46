"""What a model answers in each phase: the loss of its pairs, where it would have answered with logits.

Each is a class that a model is extended by (see [Note: a model is extended, not wrapped] in `extend`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import DpoConfig, RewardConfig
from plait.distributed import is_sharded
from plait.errors import ModelError
from plait.models import IGNORE_INDEX, LossTerm
from plait.posttrain.lora import AddedModule, adapters_off

# Losses over a chosen and a rejected answer. Each is of one pair and knows no others, so no cut changes it.
#
# `chosen` and `rejected` are log-ratios: how much likelier an answer is to the policy than to the reference. Without a
# reference they are the policy's own log-probabilities.


def reward_loss(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, center: float = 0.0) -> Tensor:
    """Of two rewards: the chosen one should be larger, by a margin if asked (Bradley and Terry).

    `center` weighs the square of their sum, which keeps rewards around zero.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center * (chosen + rejected) ** 2 if center else loss


def parted(chosen: Tensor, rejected: Tensor, chosen_last: Tensor, rejected_last: Tensor) -> Tensor:
    """Where two rows of tokens are not the same any more, up to the end of the longer one.

    `…_last` are the positions of their last tokens. One that has ended differs from one that goes on.
    """
    positions = torch.arange(chosen.shape[1], device=chosen.device)
    shorter, longer = torch.minimum(chosen_last, rejected_last), torch.maximum(chosen_last, rejected_last)
    same = (chosen == rejected) & (positions <= shorter[:, None])
    return (same.cumprod(1) == 0) & (positions <= longer[:, None])


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Rafailov et al., 2023; with `label_smoothing`, the conservative form for labels that may be wrong."""
    ahead = beta * (chosen - rejected)
    return -F.logsigmoid(ahead) * (1.0 - label_smoothing) - F.logsigmoid(-ahead) * label_smoothing


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Azar et al., 2023: a squared distance from `1 / (2 beta)`, so that likely pairs stop pulling."""
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2


def hinge_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Zhao et al., 2023 (SLiC): nothing more to learn once a pair is ahead by `1 / beta`."""
    return F.relu(1.0 - beta * (chosen - rejected))


def kto_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    point: Tensor | float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> Tensor:
    """Ethayarajh et al., 2024: each answer by itself is better or worse than a reference point.

    `point` is how far the policy has moved on the whole (a KL divergence, not negative); it is not differentiated.
    """
    good = desirable * (1.0 - (beta * (chosen - point)).sigmoid())
    bad = undesirable * (1.0 - (beta * (point - rejected)).sigmoid())
    return good + bad


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """D'Oosterlinck et al., 2024: chosen answers become likelier, rejected ones less likely."""
    return (1.0 - (beta * chosen).sigmoid()) + (beta * rejected).sigmoid()


# How likely a model finds tokens that are given.


CHUNK_TOKENS = 4096
"""Tokens whose logits are held in fp32 at one time."""


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, in fp32; zero where the label is -100. Shapes (…, vocabulary) and (…).

    Logits of which each rank has some words are put together first.
    """
    if is_sharded(logits):
        logits = logits.full_tensor()
    flat, targets = logits.flatten(0, -2), labels.flatten()
    chunks = [
        -F.cross_entropy(chunk.float(), target, ignore_index=IGNORE_INDEX, reduction="none")
        for chunk, target in zip(torch.split(flat, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
    ]
    return (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).view(labels.shape)


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


# Numbers of a step that are added over its micro-batches, and over ranks once it is over.


class MetricSums:
    """Sums of metrics over the micro-batches of a step, without waiting for the device; one all-reduce per step."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def add(self, *values: Tensor | float, device: torch.device) -> None:
        """Add the values of one micro-batch, in the same order each time."""
        numbers = [torch.as_tensor(value).detach().to(device, torch.float64) for value in values]
        self._seen.append(torch.stack(numbers))

    def finish(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """The sums over the step, on all ranks of a group that saw other data; None where nothing was noted."""
        if not self._seen:
            return None
        sums = torch.stack(self._seen).sum(0)
        self._seen.clear()
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums


class Rewarding(nn.Module):
    """A model with a value head: a number for each token, or the loss of pairs."""

    reward: ClassVar[RewardConfig]

    def forward(self, input_ids: Tensor, last: Tensor | None = None, **inputs: Any) -> Any:
        """With `last`, where each row ends: rows are pairs, all chosen ones first. Without: a value for each token."""
        values: Tensor = super().forward(input_ids, **inputs)
        if last is None:
            return values
        reward = self.reward
        chosen, rejected = values.gather(1, last[:, None]).squeeze(1).float().chunk(2)
        if reward.tokens == "last":
            losses = reward_loss(chosen, rejected, margin=reward.margin, center=reward.center)
        else:
            # An answer that has ended keeps the number that it ended with.
            positions = torch.arange(values.shape[1], device=values.device).minimum(last[:, None])
            per_token = reward_loss(
                *values.gather(1, positions).float().chunk(2), margin=reward.margin, center=reward.center
            )
            compared = parted(*input_ids.chunk(2), *last.chunk(2))
            losses = (per_token * compared).sum(1) / compared.sum(1).clamp(min=1)
        return {"loss": LossTerm(losses.sum(), len(losses)), "chosen": chosen.detach(), "rejected": rejected.detach()}


class Preferring(nn.Module):
    """A model that learns from pairs directly."""

    dpo: ClassVar[DpoConfig]

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, reference: Tensor | None = None, **inputs: Any
    ) -> Any:
        """With labels: rows are pairs, all chosen ones first. Without: logits."""
        if labels is None:
            return super().forward(input_ids, **inputs)
        dpo, lengths = self.dpo, (labels != IGNORE_INDEX).sum(-1)
        tokens = token_logprobs(super().forward(input_ids, **inputs), labels).sum(-1)
        scale = 1.0 / lengths.clamp(min=1) if dpo.loss == "ipo" else torch.ones_like(tokens)
        logprobs = tokens * scale
        if dpo.reference == "base":
            with torch.no_grad(), adapters_off(self):
                reference = token_logprobs(super().forward(input_ids, **inputs), labels).sum(-1) * scale
        ratios = logprobs
        if reference is not None and dpo.reference != "none":
            ratios = logprobs - from_bits(reference)
        chosen, rejected = ratios.chunk(2)
        losses = self._losses(chosen, rejected)
        if dpo.sft_weight:
            pairs = len(chosen)
            losses = losses - dpo.sft_weight * tokens[:pairs] / lengths[:pairs].clamp(min=1)
        return {
            "loss": LossTerm(losses.sum(), len(losses)),
            "chosen": dpo.beta * chosen.detach(),
            "rejected": dpo.beta * rejected.detach(),
            "logprobs": logprobs.detach(),
        }

    def _losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        dpo = self.dpo
        match dpo.loss:
            case "dpo":
                return dpo_loss(chosen, rejected, beta=dpo.beta, label_smoothing=dpo.label_smoothing)
            case "ipo":
                return ipo_loss(chosen, rejected, beta=dpo.beta)
            case "hinge":
                return hinge_loss(chosen, rejected, beta=dpo.beta)
            case "apo_zero":
                return apo_zero_loss(chosen, rejected, beta=dpo.beta)
            case "kto":
                drift = self.drift
                assert isinstance(drift, Drift)
                if self.training:
                    drift.add(chosen, rejected)
                weights = {"desirable": dpo.desirable, "undesirable": dpo.undesirable}
                return kto_loss(chosen, rejected, beta=dpo.beta, point=drift.mean, **weights)


class Drift(AddedModule):
    """How far the policy has moved on the whole: the mean log-ratio over all answers of the step before.

    Taken from a whole step, it depends on neither ranks nor micro-batches; a step late, it needs no second pass.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self._sums = MetricSums()

    def reset_parameters(self) -> None:
        """At first it has not moved."""
        self.mean.zero_()

    def add(self, chosen: Tensor, rejected: Tensor) -> None:
        """Add one micro-batch."""
        ratios = torch.cat((chosen, rejected)).detach().double()
        self._sums.add(ratios.sum(), len(ratios), device=ratios.device)

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """The step is over, on all ranks that saw other data."""
        sums = self._sums.finish(group)
        if sums is not None:
            with torch.no_grad():
                self.mean.copy_((sums[0] / sums[1]).clamp(min=0.0))


class Drifting(Preferring):
    """One whose loss needs a reference point."""

    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor) -> None:
        """Move the reference point."""
        inherited = getattr(super(), "after_step", None)
        if inherited is not None:
            inherited(group, updated=updated)
        drift = self.drift
        assert isinstance(drift, Drift)
        drift.finish(group)


def rewarding(config: RewardConfig) -> type[nn.Module]:
    """The class to extend a model by, for `plait reward`."""
    return type("Rewarding", (Rewarding,), {"reward": config})


def preferring(model: nn.Module, config: DpoConfig) -> type[nn.Module]:
    """The class to extend a model by, for `plait dpo`; the model gets what the loss needs."""
    if config.loss != "kto":
        return type("Preferring", (Preferring,), {"dpo": config})
    if hasattr(model, "drift"):
        raise ModelError("the model has something called `drift` already, where dpo.loss: kto keeps its point")
    model.drift = Drift().to(next(model.parameters()).device)
    return type("Drifting", (Drifting,), {"dpo": config})
