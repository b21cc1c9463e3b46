"""The policy, critic and reward model of online training: model classes whose `forward` returns a loss or outputs.

A model gets such a class as an additional base class, see [Note: a model is extended, not wrapped] in
`posttrain/start.py`. Its fp32 inputs are passed as integers, see [Note: inputs that keep their precision] in
`posttrain/losses.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config import GrpoConfig, PpoConfig
from plait.distributed import is_sharded
from plait.models import IGNORE_INDEX, LossTerm
from plait.posttrain.lora import adapters_off
from plait.posttrain.losses import CHUNK_TOKENS, MetricSums, entropy, from_bits, token_logprobs
from plait.posttrain.rl.algorithms import grpo_loss, policy_loss, value_loss
from plait.posttrain.rl.settings import Online


class StepStats(NamedTuple):
    """Statistics of a step's loss over all ranks."""

    loss: float
    """The mean loss of the algorithm, without the pretraining mixture."""
    clipped: float
    """The share of clipped tokens."""


class LossStats:
    """Loss statistics of the micro-batches of a step, summed over ranks when it ends."""

    def __init__(self) -> None:
        self._sums = MetricSums()
        self._latest: Tensor | None = None

    def add(self, loss: LossTerm, clipped: Tensor, tokens: Tensor) -> None:
        """Add one micro-batch."""
        self._sums.add(loss.sum, loss.count, clipped, tokens, device=loss.sum.device)

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the ranks of `group`, which have other answers, at the end of the step."""
        sums = self._sums.finish(group)
        self._latest = self._latest if sums is None else sums

    @property
    def latest(self) -> StepStats | None:
        """Statistics of the last step, None before the first; reading them waits for the device."""
        if self._latest is None:
            return None
        total, count, clipped, tokens = self._latest.tolist()
        return StepStats(total / (count or 1.0), clipped / (tokens or 1.0))


class LossReporting(nn.Module):
    """A model that collects statistics of its loss. The base of actor and critic."""

    loss_stats: LossStats

    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor) -> None:
        """Sum the statistics of all ranks."""
        inherited = getattr(super(), "after_step", None)
        if inherited is not None:
            inherited(group, updated=updated)
        self.loss_stats.finish(group)


class PolicyModel(LossReporting):
    """The policy (actor)."""

    online: ClassVar[Online]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        old: Tensor | None = None,
        advantages: Tensor | None = None,
        reference: Tensor | None = None,
        ptx_scale: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Return logits without labels; log-probabilities and entropies with labels; the loss with advantages too.

        `old` has the log-probabilities under the policy that generated the answers. Rows after those of `old` are
        examples of the pretraining mixture (`ptx_data`).
        """
        if labels is None:
            return super().forward(input_ids, **inputs)
        if old is None or advantages is None:
            return self._outputs(input_ids, labels, **inputs)
        logits, rows = _gathered(super().forward(input_ids, **inputs)), len(old)
        logprobs, kept = self._logprobs(logits[:rows], labels[:rows]), labels[:rows] != IGNORE_INDEX
        loss = self._loss(logprobs, from_bits(old), from_bits(advantages), kept, reference)
        if ptx_scale is not None:
            likely = token_logprobs(logits[rows:], labels[rows:]).sum()
            loss = LossTerm(loss.sum - from_bits(ptx_scale)[0] * likely, loss.count)
        return {"loss": loss}

    def _loss(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, kept: Tensor, reference: Tensor | None
    ) -> LossTerm:
        method = self.online.method
        if isinstance(method, GrpoConfig):
            term = grpo_loss(
                logprobs,
                old,
                advantages[:, 0],
                kept,
                clip=method.clip,
                clip_high=method.clip_high,
                reference=None if reference is None else from_bits(reference),
                beta=method.beta,
                weighting=method.weighting,
                longest=self.online.rollout.max_new_tokens,
            )
            self.loss_stats.add(term.loss, term.clipped, term.tokens)
            return term.loss
        ppo = policy_loss(
            logprobs, old, advantages, kept, clip=method.clip, clip_high=method.clip_high, dual_clip=method.dual_clip
        )
        self.loss_stats.add(ppo.loss, ppo.clipped, kept.sum())
        return ppo.loss

    def _logprobs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log-probabilities at the sampling temperature."""
        temperature = self.online.rollout.temperature
        return token_logprobs(logits if temperature == 1.0 else logits / temperature, labels)

    def _outputs(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> dict[str, Any]:
        logits = _gathered(super().forward(input_ids, **inputs))
        logprobs = self._logprobs(logits, labels)
        outputs = {"loss": _count_only(logprobs, labels), "logprobs": logprobs, "entropy": _entropies(logits)}
        if self.online.reference == "base":
            with torch.no_grad(), adapters_off(self):
                outputs["reference"] = self._logprobs(super().forward(input_ids, **inputs), labels)
        return outputs


def _gathered(logits: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary, gathered if they are sharded."""
    return logits.full_tensor() if is_sharded(logits) else logits


def _entropies(logits: Tensor) -> Tensor:
    chunks = [entropy(chunk) for chunk in torch.split(logits.flatten(0, -2), CHUNK_TOKENS)]
    return torch.cat(chunks).view(logits.shape[:-1])


def _count_only(values: Tensor, labels: Tensor) -> LossTerm:
    """Return a loss of 0 with the count, for forward passes without training."""
    return LossTerm(values.sum() * 0.0, (labels != IGNORE_INDEX).sum())


def policy_class(model: nn.Module, online: Online) -> type[nn.Module]:
    """Return the class that extends a policy; add the loss statistics to the model."""
    model.loss_stats = LossStats()  # type: ignore[assignment]
    return type("PolicyModel", (PolicyModel,), {"online": online})


# Models with a value head: the critic and the reward model.


class CriticModel(LossReporting):
    """The critic, which predicts the return at each token of an answer."""

    ppo: ClassVar[PpoConfig]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        old: Tensor | None = None,
        returns: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Return the loss if returns are given, otherwise the value of each token."""
        values: Tensor = super().forward(input_ids, **inputs)
        if labels is None or old is None or returns is None:
            return {"loss": LossTerm(values.sum() * 0.0, len(values)), "values": values}
        kept = labels != IGNORE_INDEX
        term = value_loss(values, from_bits(old), from_bits(returns), kept, clip=self.ppo.value_clip)
        self.loss_stats.add(term.loss, term.clipped, kept.sum())
        return {"loss": term.loss}


class ScoringModel(nn.Module):
    """A reward model for scoring: one number per row, at its last token."""

    def forward(self, input_ids: Tensor, last: Tensor, **inputs: Any) -> Any:
        """Return the score of each row; `last` is the position of its last token."""
        values: Tensor = super().forward(input_ids, **inputs)
        scores = values.gather(1, last[:, None]).squeeze(1).float()
        return {"loss": LossTerm(scores.sum() * 0.0, len(scores)), "scores": scores}


def critic_class(model: nn.Module, ppo: PpoConfig) -> type[nn.Module]:
    """Return the class that extends a critic; add the loss statistics to the model."""
    model.loss_stats = LossStats()  # type: ignore[assignment]
    return type("CriticModel", (CriticModel,), {"ppo": ppo})
