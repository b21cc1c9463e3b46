"""What the policy answers: logits while it writes, log-probabilities of what it wrote, and the loss of those.

See [Note: a model is extended, not wrapped] in `extend`; numbers come as bits, see [Note: inputs that keep their
precision] in `logprobs`.
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


class Told(NamedTuple):
    """What a step did, over all ranks."""

    loss: float
    """Of the method itself, without what is mixed in."""
    clipped: float
    """Share of tokens where the bound decided."""


class Tally:
    """What the micro-batches of a step say of themselves, brought together when it is over."""

    def __init__(self) -> None:
        self._sums = MetricSums()
        self._latest: Tensor | None = None

    def note(self, loss: LossTerm, clipped: Tensor, tokens: Tensor) -> None:
        """Take note of one micro-batch."""
        self._sums.note(loss.sum, loss.count, clipped, tokens, device=loss.sum.device)

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """The step is over, on all ranks that saw other answers."""
        sums = self._sums.finish(group)
        self._latest = self._latest if sums is None else sums

    @property
    def latest(self) -> Told | None:
        """Of the step that is over; waits for the device."""
        if self._latest is None:
            return None
        total, count, clipped, tokens = self._latest.tolist()
        return Told(total / (count or 1.0), clipped / (tokens or 1.0))


class Learning(nn.Module):
    """A model whose steps are told of. The base of actor and critic."""

    tally: Tally

    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor) -> None:
        """Bring the sums of all ranks together."""
        inherited = getattr(super(), "after_step", None)
        if inherited is not None:
            inherited(group, updated=updated)
        self.tally.finish(group)


class Acting(Learning):
    """The policy."""

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
        """Without labels: logits. With them: log-probabilities. With what the answers were worth: the loss.

        Rows behind those of `old` are examples that are to stay likely.
        """
        if labels is None:
            return super().forward(input_ids, **inputs)
        if old is None or advantages is None:
            return self._said(input_ids, labels, **inputs)
        logits, rows = _whole(super().forward(input_ids, **inputs)), len(old)
        own, kept = self._logprobs(logits[:rows], labels[:rows]), labels[:rows] != IGNORE_INDEX
        loss = self._loss(own, from_bits(old), from_bits(advantages), kept, reference)
        if ptx_scale is not None:
            likely = token_logprobs(logits[rows:], labels[rows:]).sum()
            loss = LossTerm(loss.sum - from_bits(ptx_scale)[0] * likely, loss.count)
        return {"loss": loss}

    def _loss(self, own: Tensor, old: Tensor, advantages: Tensor, kept: Tensor, reference: Tensor | None) -> LossTerm:
        method = self.online.method
        if isinstance(method, GrpoConfig):
            found = grpo_loss(
                own,
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
            self.tally.note(found.loss, found.clipped, found.tokens)
            return found.loss
        ppo = policy_loss(
            own, old, advantages, kept, clip=method.clip, clip_high=method.clip_high, dual_clip=method.dual_clip
        )
        self.tally.note(ppo.loss, ppo.clipped, kept.sum())
        return ppo.loss

    def _logprobs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of the policy at the temperature that it samples with."""
        temperature = self.online.rollout.temperature
        return token_logprobs(logits if temperature == 1.0 else logits / temperature, labels)

    def _said(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> dict[str, Any]:
        logits = _whole(super().forward(input_ids, **inputs))
        logprobs = self._logprobs(logits, labels)
        found = {"loss": _count_only(logprobs, labels), "logprobs": logprobs, "entropy": _entropies(logits)}
        if self.online.reference == "base":
            with torch.no_grad(), adapters_off(self):
                found["reference"] = self._logprobs(super().forward(input_ids, **inputs), labels)
        return found


def _whole(logits: Tensor) -> Tensor:
    """Logits of all words, where each rank has some."""
    return logits.full_tensor() if is_sharded(logits) else logits


def _entropies(logits: Tensor) -> Tensor:
    parts = [entropy(part) for part in torch.split(logits.flatten(0, -2), CHUNK_TOKENS)]
    return torch.cat(parts).view(logits.shape[:-1])


def _count_only(values: Tensor, labels: Tensor) -> LossTerm:
    """A loss for those who ask for numbers and learn nothing."""
    return LossTerm(values.sum() * 0.0, (labels != IGNORE_INDEX).sum())


def acting(model: nn.Module, online: Online) -> type[nn.Module]:
    """The class to extend a policy by; the model gets what it counts with."""
    model.tally = Tally()  # type: ignore[assignment]
    return type("Acting", (Acting,), {"online": online})


# Models with a value head: the critic, which learns what answers are worth, and the judge, which knows.


class Valuing(Learning):
    """The critic: what is still to come, at each token of an answer."""

    ppo: ClassVar[PpoConfig]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        old: Tensor | None = None,
        returns: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """With what came of the answers: the loss. Without: a value for each token."""
        values: Tensor = super().forward(input_ids, **inputs)
        if labels is None or old is None or returns is None:
            return {"loss": LossTerm(values.sum() * 0.0, len(values)), "values": values}
        kept = labels != IGNORE_INDEX
        found = value_loss(values, from_bits(old), from_bits(returns), kept, clip=self.ppo.value_clip)
        self.tally.note(found.loss, found.clipped, kept.sum())
        return {"loss": found.loss}


class Judging(nn.Module):
    """A reward model that only judges: one number for each row, read where it ends."""

    def forward(self, input_ids: Tensor, last: Tensor, **inputs: Any) -> Any:
        """`last` is the place of each row's last token."""
        values: Tensor = super().forward(input_ids, **inputs)
        scores = values.gather(1, last[:, None]).squeeze(1).float()
        return {"loss": LossTerm(scores.sum() * 0.0, len(scores)), "scores": scores}


def valuing(model: nn.Module, ppo: PpoConfig) -> type[nn.Module]:
    """The class to extend a critic by; the model gets what it counts with."""
    model.tally = Tally()  # type: ignore[assignment]
    return type("Valuing", (Valuing,), {"ppo": ppo})
