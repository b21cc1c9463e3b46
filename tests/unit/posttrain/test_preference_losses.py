"""Losses over pairs: closed forms, and what models make of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from plait.config.posttrain import DpoConfig, RewardConfig
from plait.posttrain.losses import (
    Drift,
    apo_zero_loss,
    dpo_loss,
    entropy,
    hinge_loss,
    ipo_loss,
    kto_loss,
    parted,
    preferring,
    reward_loss,
    rewarding,
    token_logprobs,
)
from plait.posttrain.start import extend


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_a_pair_that_nothing_tells_apart_costs_log_two() -> None:
    assert float(reward_loss(one(3.0), one(3.0))) == pytest.approx(math.log(2))
    assert float(dpo_loss(one(-1.0), one(-1.0), beta=0.3)) == pytest.approx(math.log(2))


def test_closed_forms() -> None:
    assert float(reward_loss(one(1.0), one(0.0), margin=0.5)) == pytest.approx(math.log1p(math.exp(-0.5)))
    assert float(reward_loss(one(1.0), one(2.0), center=0.1) - reward_loss(one(1.0), one(2.0))) == pytest.approx(0.9)
    assert float(dpo_loss(one(2.0), one(-1.0), beta=0.5)) == pytest.approx(math.log1p(math.exp(-1.5)))
    smoothed = 0.9 * math.log1p(math.exp(-1.5)) + 0.1 * math.log1p(math.exp(1.5))
    assert float(dpo_loss(one(2.0), one(-1.0), beta=0.5, label_smoothing=0.1)) == pytest.approx(smoothed)
    assert float(ipo_loss(one(2.0), one(-1.0), beta=0.25)) == pytest.approx((3.0 - 2.0) ** 2)
    assert float(hinge_loss(one(2.0), one(-1.0), beta=0.1)) == pytest.approx(0.7)
    assert float(hinge_loss(one(20.0), one(0.0), beta=0.1)) == 0.0
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = 2.0 * (1 - sigmoid(0.1 * (2.0 - 0.5))) + 3.0 * (1 - sigmoid(0.1 * (0.5 + 1.0)))
    found = kto_loss(one(2.0), one(-1.0), beta=0.1, point=0.5, desirable=2.0, undesirable=3.0)
    assert float(found) == pytest.approx(expected)
    assert float(apo_zero_loss(one(2.0), one(-1.0), beta=0.1)) == pytest.approx(1 - sigmoid(0.2) + sigmoid(-0.1))


def test_log_probabilities_are_those_of_the_labels_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    labels[0, :2] = -100
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels >= 0)
    assert torch.allclose(token_logprobs(logits, labels), expected, atol=1e-6)
    monkeypatch.setattr("plait.posttrain.losses.CHUNK_TOKENS", 4)
    assert torch.allclose(token_logprobs(logits, labels), expected, atol=1e-6)
    assert torch.allclose(entropy(torch.zeros(2, 8)), torch.full((2,), math.log(8)))


class Words(nn.Module):
    """A language model that does not look at what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)  # type: ignore[no-any-return]


def pairs() -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 7, (4, 6))
    labels[:, :2] = -100
    labels[1, 4:] = -100
    return {"input_ids": torch.randint(0, 7, (4, 6)), "labels": labels, "reference": torch.randn(4) - 8}


def test_a_model_answers_with_the_loss_of_its_pairs() -> None:
    batch, model = pairs(), Words()
    own = token_logprobs(model(batch["input_ids"]), batch["labels"]).sum(-1)
    ratio = own - batch["reference"]
    extend(model, mixins=(preferring(model, DpoConfig(beta=0.2, sft_weight=0.5)),))
    found = model(**batch)
    lengths = (batch["labels"] >= 0).sum(-1)
    expected = dpo_loss(ratio[:2], ratio[2:], beta=0.2) - 0.5 * own[:2] / lengths[:2]
    assert torch.allclose(found["loss"].sum, expected.sum())
    assert found["loss"].count == 2
    assert torch.allclose(found["chosen"], 0.2 * ratio[:2])
    assert model(batch["input_ids"]).shape == (4, 6, 7)


def test_the_reference_point_of_kto_is_the_mean_of_the_step_before() -> None:
    batch, model = pairs(), Words()
    ratio = token_logprobs(model(batch["input_ids"]), batch["labels"]).sum(-1) - batch["reference"]
    extend(model, mixins=(preferring(model, DpoConfig(loss="kto")),))
    first = model(**batch)["loss"].sum
    assert torch.allclose(first, kto_loss(ratio[:2], ratio[2:], beta=0.1, point=0.0).sum())
    model.eval()
    model(**batch)  # a validation moves nothing
    model.train().after_step(None, updated=True)
    drift: Any = model.drift
    assert isinstance(drift, Drift)
    assert float(drift.mean.detach()) == pytest.approx(max(float(ratio.detach().mean()), 0.0), rel=1e-5)


class Numbers(nn.Module):
    """A reward model that does not look at what came before: a number for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids).squeeze(-1)  # type: ignore[no-any-return]


def test_rewards_are_compared_at_the_end_or_from_where_the_answers_part() -> None:
    chosen, rejected = [[1, 2, 3, 4, 0, 0], [1, 5, 6, 0, 0, 0]], [[1, 2, 4, 3, 7, 0], [1, 5, 0, 0, 0, 0]]
    last = torch.tensor([3, 2, 4, 1])
    where = parted(torch.tensor(chosen), torch.tensor(rejected), last[:2], last[2:])
    # The second pair parts where one goes on and the other has ended, whatever it is padded with.
    assert where.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]]

    batch = {"input_ids": torch.tensor(chosen + rejected), "last": last}
    model = Numbers()
    of = model.table.weight.detach().squeeze(1)
    extend(model, mixins=(rewarding(RewardConfig(margin=0.1)),))
    assert torch.allclose(model(**batch)["loss"].sum, reward_loss(of[[4, 6]], of[[7, 5]], margin=0.1).sum())
    model = Numbers()
    model.table.weight.data.copy_(of[:, None])
    extend(model, mixins=(rewarding(RewardConfig(tokens="all", margin=0.1)),))
    first = reward_loss(of[[3, 4, 4]], of[[4, 3, 7]], margin=0.1).mean()  # an ended answer keeps its last number
    second = reward_loss(of[6], of[5], margin=0.1)
    found = model(**batch)
    assert torch.allclose(found["loss"].sum, first + second)
    assert found["loss"].count == 2
    assert torch.equal(found["chosen"], of[[4, 6]])
    assert torch.equal(found["rejected"], of[[7, 5]])
