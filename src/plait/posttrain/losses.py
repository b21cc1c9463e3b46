"""The losses of reward models and DPO, and the classes that let a model return them instead of logits.

A model gets such a class as an additional base class: see [Note: a model is extended, not wrapped] in
`posttrain/start.py`. A pair is a chosen and a rejected answer to the same prompt.
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

# Losses of pairs, one value per pair. A pair's loss does not depend on other pairs, so it is the same for every way to
# split a batch.
#
# In the DPO losses `chosen` and `rejected` are log-ratios: the log-probability of an answer under the policy minus that
# under the reference. Without a reference they are the log-probabilities under the policy.


def reward_loss(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, center: float = 0.0) -> Tensor:
    """Return the Bradley-Terry loss: the reward of the chosen answer should exceed the other one by `margin`.

    `center` is the weight of a penalty, the square of their sum, which keeps rewards around zero.
    """
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center * (chosen + rejected) ** 2 if center else loss


def parted(chosen: Tensor, rejected: Tensor, chosen_last: Tensor, rejected_last: Tensor) -> Tensor:
    """Return a mask (pairs, tokens): true from where two rows of tokens first differ to the end of the longer one.

    `…_last` are the positions of their last tokens. Where one row has ended and the other has not, they differ.
    """
    positions = torch.arange(chosen.shape[1], device=chosen.device)
    shorter, longer = torch.minimum(chosen_last, rejected_last), torch.maximum(chosen_last, rejected_last)
    same = (chosen == rejected) & (positions <= shorter[:, None])
    return (same.cumprod(1) == 0) & (positions <= longer[:, None])


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the DPO loss (Rafailov et al., 2023).

    `label_smoothing` is the assumed probability that the answers of a pair are swapped (conservative DPO).
    """
    ahead = beta * (chosen - rejected)
    return -F.logsigmoid(ahead) * (1.0 - label_smoothing) - F.logsigmoid(-ahead) * label_smoothing


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the IPO loss (Azar et al., 2023): the squared distance of the margin from `1 / (2 beta)`.

    So a pair with a margin that is large enough is not pushed further apart.
    """
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2


def hinge_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the hinge loss (SLiC; Zhao et al., 2023): zero once the margin is `1 / beta`."""
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
    """Return the KTO loss (Ethayarajh et al., 2024), the sum of a loss of each answer alone.

    Each log-ratio is compared with `point`, an estimate of the KL divergence of the policy from the reference, which is
    not negative and gets no gradient. `desirable` and `undesirable` are the weights of chosen and rejected answers.
    """
    good = desirable * (1.0 - (beta * (chosen - point)).sigmoid())
    bad = undesirable * (1.0 - (beta * (point - rejected)).sigmoid())
    return good + bad


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the APO-zero loss (D'Oosterlinck et al., 2024): chosen answers become likelier, rejected ones less."""
    return (1.0 - (beta * chosen).sigmoid()) + (beta * rejected).sigmoid()


# Log-probabilities of given tokens.


CHUNK_TOKENS = 4096
"""The number of tokens whose logits are converted to fp32 at one time, to save memory."""


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, in fp32; zero where the label is -100.

    Shapes are (…, vocabulary) and (…). Logits that are sharded along the vocabulary are gathered first.
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
    """Return the entropy of the distribution at each position, in fp32."""
    logs = logits.float().log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def as_bits(numbers: Tensor) -> Tensor:
    """Return fp32 numbers as int32 with the same bits, for inputs of a model that must not be cast.

    [Note: inputs that keep their precision]
    Floating-point inputs of a model are cast to the compute dtype. In bf16 a log-probability of −200 has a rounding
    error of up to 0.5, and the loss depends on its small difference from another log-probability. So such inputs are
    passed as integers, which are not cast; `from_bits` restores them.
    """
    return numbers.float().contiguous().view(torch.int32)


def from_bits(numbers: Tensor) -> Tensor:
    """Return the fp32 numbers that `as_bits` was given; fp32 numbers are returned unchanged."""
    return numbers.view(torch.float32) if numbers.dtype == torch.int32 else numbers


# Metrics of a step: sums over its micro-batches, and over ranks when the step ends.


class MetricSums:
    """Sums of metrics over the micro-batches of a step, kept on the device; one all-reduce per step."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def add(self, *values: Tensor | float, device: torch.device) -> None:
        """Add the values of one micro-batch, in the same order each time."""
        numbers = [torch.as_tensor(value).detach().to(device, torch.float64) for value in values]
        self._seen.append(torch.stack(numbers))

    def finish(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """Return the sums over the step and the ranks of `group`, in the order of `add`; None if nothing was added."""
        if not self._seen:
            return None
        sums = torch.stack(self._seen).sum(0)
        self._seen.clear()
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums


class Rewarding(nn.Module):
    """A reward model in training: a model with a value head, which returns values or the loss of pairs."""

    reward: ClassVar[RewardConfig]

    def forward(self, input_ids: Tensor, last: Tensor | None = None, **inputs: Any) -> Any:
        """Return the loss and the rewards of pairs if `last` is given, otherwise the value of each token.

        `last` is the position of each row's last token; the rows of all chosen answers come before the rejected ones.
        """
        values: Tensor = super().forward(input_ids, **inputs)
        if last is None:
            return values
        reward = self.reward
        chosen, rejected = values.gather(1, last[:, None]).squeeze(1).float().chunk(2)
        if reward.tokens == "last":
            losses = reward_loss(chosen, rejected, margin=reward.margin, center=reward.center)
        else:
            # After its last token, an answer keeps the value of that token.
            positions = torch.arange(values.shape[1], device=values.device).minimum(last[:, None])
            per_token = reward_loss(
                *values.gather(1, positions).float().chunk(2), margin=reward.margin, center=reward.center
            )
            compared = parted(*input_ids.chunk(2), *last.chunk(2))
            losses = (per_token * compared).sum(1) / compared.sum(1).clamp(min=1)
        return {"loss": LossTerm(losses.sum(), len(losses)), "chosen": chosen.detach(), "rejected": rejected.detach()}


class Preferring(nn.Module):
    """A policy in DPO: a model that returns the loss of pairs."""

    dpo: ClassVar[DpoConfig]

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, reference: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Return the loss and the log-probabilities of pairs if there are labels, otherwise logits.

        The rows of all chosen answers come before those of the rejected ones. `reference` has the log-probability of
        each row under the reference, as bits.
        """
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
    """The reference point of KTO: the mean log-ratio over all answers of the previous step, at least zero.

    As a mean over a whole step, it does not depend on the number of ranks and micro-batches; as that of the previous
    step, it needs no additional forward pass.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self._sums = MetricSums()

    def reset_parameters(self) -> None:
        """Set the mean to zero: at first policy and reference are equal."""
        self.mean.zero_()

    def add(self, chosen: Tensor, rejected: Tensor) -> None:
        """Add the log-ratios of one micro-batch."""
        ratios = torch.cat((chosen, rejected)).detach().double()
        self._sums.add(ratios.sum(), len(ratios), device=ratios.device)

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Set the mean from the sums over the step, and over the ranks of `group`, which have other data."""
        sums = self._sums.finish(group)
        if sums is not None:
            with torch.no_grad():
                self.mean.copy_((sums[0] / sums[1]).clamp(min=0.0))


class Drifting(Preferring):
    """A policy with the KTO loss, which needs a reference point."""

    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor) -> None:
        """Update the reference point at the end of a step."""
        inherited = getattr(super(), "after_step", None)
        if inherited is not None:
            inherited(group, updated=updated)
        drift = self.drift
        assert isinstance(drift, Drift)
        drift.finish(group)


def rewarding(config: RewardConfig) -> type[nn.Module]:
    """Return the class that a model is extended by in `plait reward`."""
    return type("Rewarding", (Rewarding,), {"reward": config})


def preferring(model: nn.Module, config: DpoConfig) -> type[nn.Module]:
    """Return the class that a model is extended by in `plait dpo`; for KTO, add the reference point to the model."""
    if config.loss != "kto":
        return type("Preferring", (Preferring,), {"dpo": config})
    if hasattr(model, "drift"):
        raise ModelError("the model has something called `drift` already, where dpo.loss: kto keeps its point")
    model.drift = Drift().to(next(model.parameters()).device)
    return type("Drifting", (Drifting,), {"dpo": config})
