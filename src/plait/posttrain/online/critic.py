"""Models with a value head: the critic, which learns what answers are worth, and the judge, which knows."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from plait.config import PpoConfig
from plait.models import IGNORE_INDEX
from plait.posttrain.logprobs import from_bits
from plait.posttrain.online.actor import Learning, Tally
from plait.posttrain.ppo_math import value_loss
from plait.spec import LossTerm


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
