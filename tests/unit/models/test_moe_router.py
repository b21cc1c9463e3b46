from __future__ import annotations

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait.config import check, parse_sections
from plait.config.model import MoeConfig
from plait.errors import ConfigError, ModelError
from plait.models import build_model, preset
from plait.models.moe import Router


def router(**changes):
    made = Router(MoeConfig(**{"dim": 12, "experts": 6, "top_k": 2, **changes}))
    nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_token_goes_to_the_experts_with_the_best_scores_weighted_by_them(score, normalize):
    made = router(score=score, normalize=normalize, top_k=3)
    x = torch.randn(2, 5, 12)
    logits = x.reshape(10, 12).double() @ made.weight.double().t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    weights, choices = scores.topk(3)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    routing = made(x)
    assert torch.equal(routing.choices, choices)
    torch.testing.assert_close(routing.weights, weights.float())


def test_the_bias_decides_who_is_chosen_and_not_how_much_it_counts():
    made, plain = router(bias_rate=0.1), router()
    plain.weight = made.weight
    made.bias[4] = 100.0
    x = torch.randn(2, 5, 12)
    routing = made(x)
    assert (routing.choices[:, 0] == 4).all()
    scores = torch.nn.functional.linear(x.flatten(0, 1), made.weight).softmax(-1)
    weights = scores.gather(1, routing.choices)
    torch.testing.assert_close(routing.weights, weights / weights.sum(1, keepdim=True))


def test_it_computes_in_fp32_whatever_the_run_computes_in():
    made = router()
    x = torch.randn(2, 5, 12).bfloat16()
    made.weight.data = made.weight.data.bfloat16().float()
    expected = made(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x)
    assert torch.equal(found.weights, expected.weights)
    made.bfloat16()
    assert torch.equal(made(x).weights, expected.weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_of_a_row_is_load_times_score_over_experts(score):
    made = router(balance_loss=0.25, score=score)
    x = torch.randn(3, 7, 12)
    routing = made(x)
    logits = x @ made.weight.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    shares = (scores / scores.sum(-1, keepdim=True)).mean(1)
    for row, choices in enumerate(routing.choices.view(3, 14)):
        load = choices.bincount(minlength=6) / 14 * 6
        torch.testing.assert_close(routing.penalty[row], 0.25 * (load * shares[row]).sum())


def test_a_balanced_row_is_charged_the_weight_of_the_balance_loss():
    made = router(balance_loss=0.25, experts=4, dim=4, top_k=1, normalize=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(4))
    assert made(torch.eye(4)[None]).penalty.item() == pytest.approx(0.25)


def test_the_z_loss_of_a_row_is_the_mean_square_of_the_log_of_its_sums():
    made = router(z_loss=0.5)
    x = torch.randn(3, 7, 12)
    expected = 0.5 * (x @ made.weight.t()).logsumexp(-1).square().mean(1)
    torch.testing.assert_close(made(x).penalty, expected)


def test_the_penalties_train_the_router():
    made = router(balance_loss=1.0)
    x = torch.randn(4, 200, 12) + 3.0  # skewed
    optimizer = torch.optim.Adam(made.parameters(), lr=0.03)
    before = made(x).penalty.sum().item()
    for _ in range(40):
        optimizer.zero_grad()
        made(x).penalty.sum().backward()
        optimizer.step()
    assert made(x).penalty.sum().item() < before - 0.2


def test_an_expert_takes_what_comes_first_in_each_row_up_to_its_capacity():
    made, free = router(capacity_factor=1.0), router()
    free.weight = made.weight
    x = torch.randn(3, 9, 12) + 0.5
    wanted, kept = (r(x).choices.view(3, 18).tolist() for r in (free, made))
    for row in range(3):
        taken = [0] * 6
        for expert, found in zip(wanted[row], kept[row], strict=True):
            taken[expert] += 1
            assert found == (expert if taken[expert] <= 3 else 6)  # 9 tokens × 2 choices ÷ 6 experts
    assert any(6 in row for row in kept)
    assert made.eval()(x).choices.view(3, 18).tolist() == wanted


def test_more_choices_than_experts_are_refused():
    with refused(ModelError, "model.top_k=3", "model.experts=2"):
        build_model(preset("moe", "tiny", experts=2, top_k=3))


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"experts": 2, "top_k": 3}, "model.top_k", ["3", "2", "`model.experts`"]),
        ({"top_k": 1}, "model.normalize", ["`model.top_k: 1`", "`model.normalize: false`"]),
        ({"layers": 2, "moe_every": 3}, "model.moe_every", ["3", "2 layers", "`model.type: llama`"]),
        ({"heads": 7}, "model.dim", ["64", "7 heads", "`model.dim: 63`", "`70`", "`model.heads`"]),
    ],
)
def test_settings_that_cannot_work_are_found_before_the_start(changes, key, named):
    config = parse_sections(model={"type": "moe", "dim": 64, "layers": 2, "heads": 4, **changes}).config
    with refused(ConfigError, *named, key=key):
        check(config, has_val=False, require_length=False)
