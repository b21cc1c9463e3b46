"""What a model answers in each phase: the loss of its pairs, where it would have answered with logits.

Each is a class that a model is extended by (see [Note: a model is extended, not wrapped] in `extend`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config import DpoConfig, RewardConfig
from plait.errors import ModelError
from plait.models import IGNORE_INDEX
from plait.posttrain.logprobs import from_bits, token_logprobs
from plait.posttrain.lora.layer import adapters_off
from plait.posttrain.parts import Part
from plait.posttrain.preference import apo_zero_loss, dpo_loss, hinge_loss, ipo_loss, kto_loss, parted, reward_loss
from plait.posttrain.sums import Sums
from plait.spec import LossTerm


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
            places = torch.arange(values.shape[1], device=values.device).minimum(last[:, None])
            each = reward_loss(*values.gather(1, places).float().chunk(2), margin=reward.margin, center=reward.center)
            compared = parted(*input_ids.chunk(2), *last.chunk(2))
            losses = (each * compared).sum(1) / compared.sum(1).clamp(min=1)
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
        own = tokens * scale
        if dpo.reference == "base":
            with torch.no_grad(), adapters_off(self):
                reference = token_logprobs(super().forward(input_ids, **inputs), labels).sum(-1) * scale
        ratios = own if reference is None or dpo.reference == "none" else own - from_bits(reference)
        chosen, rejected = ratios.chunk(2)
        losses = self._losses(chosen, rejected)
        if dpo.sft_weight:
            pairs = len(chosen)
            losses = losses - dpo.sft_weight * tokens[:pairs] / lengths[:pairs].clamp(min=1)
        return {
            "loss": LossTerm(losses.sum(), len(losses)),
            "chosen": dpo.beta * chosen.detach(),
            "rejected": dpo.beta * rejected.detach(),
            "logprobs": own.detach(),
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
                    drift.note(chosen, rejected)
                weights = {"desirable": dpo.desirable, "undesirable": dpo.undesirable}
                return kto_loss(chosen, rejected, beta=dpo.beta, point=drift.mean, **weights)


class Drift(Part):
    """How far the policy has moved on the whole: the mean log-ratio over all answers of the step before.

    Taken from a whole step, it depends on neither ranks nor micro-batches; a step late, it needs no second pass.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self._sums = Sums()

    def reset_parameters(self) -> None:
        """At first it has not moved."""
        self.mean.zero_()

    def note(self, chosen: Tensor, rejected: Tensor) -> None:
        """Take note of one micro-batch."""
        ratios = torch.cat((chosen, rejected)).detach().double()
        self._sums.note(ratios.sum(), len(ratios), device=ratios.device)

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
