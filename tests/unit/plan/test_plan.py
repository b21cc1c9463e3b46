"""A plan: from a few layers, of first and last stage, with what to change where it does not fit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.models import LossTerm
from plait.plan.gate import RunPlan, plan_run
from plait.plan.hardware import find_hardware
from plait.plan.plan import make_plan
from plait.plan.quick import Quick, estimate_all
from plait.plan.rankplan import plan_rank
from plait.plan.search import SearchResult, order_by_estimate, search
from plait.plan.simulate import TimeBudget, example_of
from plait.plan.space import Candidate, Space, candidates

H100 = find_hardware("h100")


def small(**sections: Any) -> RunConfig:
    heads = random.choice([2, 4])
    model = {
        "type": "llama",
        "vocab_size": random.choice([500, 1000]),
        "dim": 32 * heads,
        "layers": random.choice([7, 9]),
        "heads": heads,
        "kv_heads": random.choice([1, heads]),
        "ffn_dim": random.choice([96, 200]),
        "seq_len": random.choice([32, 64]),
    }
    return parse_sections(**{"model": model, "batch": {"micro": 2}, "precision": "bf16", **sections}).config


def short(**sections: Any) -> RunConfig:
    """So few layers that all are simulated, once: for what does not ask how a few stand for many."""
    config = small(**sections)
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": 2})})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("strategy", "batch", "ranks"),
    [
        ("single", {"micro": 2}, 1),
        ({"recompute": "full"}, {"micro": 1}, 1),
        ({"compile": {"scope": "block"}}, {"micro": 2}, 1),
        ({"zero": 3}, {"micro": 1}, 8),
        ({"zero": 1, "layout": {"tp": 2}}, {"micro": 2, "accumulation": 5}, 64),
    ],
    ids=["eager", "recompute", "compiled", "zero3", "tp2-accumulation"],
)
def test_a_few_layers_and_micro_batches_give_the_same_account_as_all(strategy: Any, batch: Any, ranks: int) -> None:
    config = small(strategy=strategy, batch=batch)
    if "tp" in str(strategy):
        config = config.model_copy(update={"model": config.model.model_copy(update={"kv_heads": 2})})  # type: ignore[union-attr]
    quick = plan_rank(config, H100, ranks=ranks).ledger
    whole = plan_rank(config, H100, ranks=ranks, exact=True).ledger
    assert quick.peak[0] == whole.peak[0]
    assert quick.peak[1] == pytest.approx(whole.peak[1], rel=1e-4)
    for prefix in ("state", "flops", "tokens", "sent"):
        assert quick.total(prefix) == pytest.approx(whole.total(prefix), rel=1e-6)
    for prefix in ("compute", "hidden", "waited", "host"):
        assert quick.total(prefix) == pytest.approx(whole.total(prefix), rel=0.02)


@pytest.mark.parametrize("layers", [6, 12], ids=["few-micro-batches", "few-layers-too"])
def test_a_pipeline_is_planned_from_its_first_and_last_stage(layers: int) -> None:
    strategy = {"zero": 1, "layout": {"pp": 2}, "pipeline": {"micro_batches": 6}}
    config = small(strategy=strategy, batch={"micro": 1})
    config = config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})  # type: ignore[union-attr]
    quick, whole = make_plan(config, H100, ranks=4), make_plan(config, H100, ranks=4, exact=True)
    assert [rank.name for rank in quick.ranks] == ["first pipeline stage", "last pipeline stage"]
    for short, full in zip(quick.ranks, whole.ranks, strict=True):
        assert short.ledger.peak[1] == pytest.approx(full.ledger.peak[1], rel=2e-3)
        assert short.ledger.seconds() == pytest.approx(full.ledger.seconds(), rel=0.02)
    assert quick.bubble > 0
    assert quick.seconds > max(rank.ledger.seconds() for rank in quick.ranks)


@pytest.mark.parametrize("ffn", [96, 200])
def test_the_parts_at_the_peak_add_up_to_it_also_where_a_longer_model_has_another_peak(ffn: int) -> None:
    config = small(strategy={"zero": 2})
    sizes = {"vocab_size": 1000, "dim": 128, "heads": 4, "kv_heads": 1, "layers": 9, "ffn_dim": ffn, "seq_len": 32}
    config = config.model_copy(update={"model": config.model.model_copy(update=sizes)})  # type: ignore[union-attr]
    account = make_plan(config, H100, ranks=8).fullest.ledger
    assert sum(account.under("part").values()) == pytest.approx(account.peak[1])
    assert {"parameters", "optimizer", "activations"} <= account.under("part").keys()


def test_a_note_that_counts_layers_is_left_out_where_a_few_stand_for_all() -> None:
    counted, few = plan_rank(small(), H100, ranks=1, exact=True), plan_rank(small(), H100, ranks=1)
    assert any("norms" in note for note in counted.notes)
    assert not any("norms" in note for note in few.notes)


def test_more_memory_is_needed_than_tensors_take() -> None:
    plan = make_plan(short(), H100, ranks=1)
    assert plan.needed_gib * 2**30 > plan.fullest.ledger.peak[1] + H100.context_gib * 2**30 * 0.99


def test_a_search_finds_the_fastest_that_fits_and_gives_a_reason_for_every_other() -> None:
    config = small(batch={"total": 8}, strategy="ddp")
    result = search(config, H100, ranks=2, close=2)
    assert result.best is not None
    assert result.best.plan is not None
    assert result.best.plan.fits
    simulated = [each for each in result.results if each.plan is not None and not each.reason]
    assert result.best is simulated[0]
    assert result.best.score == max(each.score for each in simulated)
    assert all(each.reason for each in result.results if each.plan is None)
    nothing = search(config, replace(H100, memory_gib=0.001), ranks=2, close=2, space=Space(2, ("zero", "micro")))
    assert nothing.best is None
    assert all(each.reason for each in nothing.results)


def test_a_quick_look_at_many_small_samples_is_about_the_plan() -> None:
    sizes = (4, 64, 256)  # of texts so short that a device waits for its host
    run = short(batch={"total": 256}, strategy="single")
    ways = [run.model_copy(update={"batch": run.batch.model_copy(update={"micro": micro})}) for micro in sizes]
    looked = estimate_all([SearchResult(Candidate({}), way, "") for way in ways], H100, 1, example_of)
    for way, quick in zip(ways, looked, strict=True):
        assert isinstance(quick, Quick)
        plan = make_plan(way, H100, ranks=1, detailed=False)
        assert quick.needed_gib == pytest.approx(plan.needed_gib, rel=0.15)
        assert quick.seconds == pytest.approx(plan.seconds, rel=0.4)


def test_what_is_kept_off_the_device_must_be_faster_by_more_than_a_plan_can_tell() -> None:
    def way(speed: float, **offload: str) -> SearchResult:
        config = small(strategy={"zero": 2, "offload": offload})
        return SearchResult(Candidate({}), config, "", quick=Quick(1.0, 1.0, 1.0, speed, 0.0))

    here, host, files = way(100), way(102, optimizer="cpu"), way(105, optimizer="nvme")
    assert max(here, host, files, key=lambda each: each.score) is here
    much_faster = way(110, optimizer="cpu")
    assert max(here, much_faster, key=lambda each: each.score) is much_faster


def test_the_plan_orders_candidates_for_the_tuner() -> None:
    config = small(batch={"total": 8}, strategy="ddp")
    found = candidates(config, Space(2, ("recompute",)))
    order = order_by_estimate(config, found, H100, 2)
    ordered = [each.settings.get("strategy.recompute.mode", "none") for each in order]
    assert ordered.index("none") < ordered.index("full")


# ---- the gate


def gate(config: RunConfig, **options: Any) -> RunPlan | str:
    return plan_run(config, ranks=1, local_ranks=1, **options)


@pytest.mark.parametrize("in_time", [True, False], ids=["in-time", "time-up"])
def test_a_run_that_cannot_fit_is_refused_with_the_change_that_would_make_it_fit(
    in_time: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeBudget, "over", not in_time)
    monkeypatch.setattr(TimeBudget, "half_over", not in_time)
    config = small(batch={"total": 64, "micro": 64}, strategy="single")
    needed = make_plan(config, H100, ranks=1).fullest.ledger.peak[1] / 2**30
    machine = tmp_path / "machine.yaml"
    data = replace(H100, memory_gib=needed * 0.7, context_gib=0.0).to_dict()
    machine.write_text(str(data).replace("'", '"').replace("(", "[").replace(")", "]"))
    found = gate(config.model_copy(update={"plan": config.plan.model_copy(update={"hardware": str(machine)})}))
    assert isinstance(found, RunPlan)
    assert found.refusal is not None
    named = ["`batch.micro="] if in_time else ["40 s", "`batch.micro=1`"]
    with refused(ConfigError, " GiB", "`plan=warn`", *named, key="strategy"):
        raise found.refusal
    assert ("40 s" in str(found.refusal)) != in_time


def test_a_forecast_leaves_the_process_as_it_was() -> None:
    before = torch.get_rng_state()
    found = gate(short())
    assert isinstance(found, RunPlan)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.distributed.is_initialized()
    assert torch.ones(2).sum().item() == 2.0


def test_a_schedule_that_needs_the_length_of_the_run_is_planned_too() -> None:
    found = gate(short(schedule={"type": "CosineAnnealingLR"}, train={"max_epochs": 2}))
    assert isinstance(found, RunPlan)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> LossTerm:
        return LossTerm(self.linear(x).square().sum(), x.shape[0])


class LooksAtValues(Own):
    def forward(self, x: torch.Tensor) -> LossTerm:
        return super().forward(x[x[:, 0] > 0])


def test_a_model_given_as_an_object_is_planned_and_not_touched() -> None:
    model = Own()
    weight = model.linear.weight.detach().clone()
    config = parse_sections(batch={"micro": 4}).config
    assert isinstance(gate(config, model=model, example=torch.randn(4, 8)), RunPlan)
    assert torch.equal(model.linear.weight, weight)


def test_a_model_that_looks_at_values_is_told_as_the_reason() -> None:
    config = parse_sections(batch={"micro": 4}).config
    found = gate(config, model=LooksAtValues(), example=torch.randn(4, 8))
    assert isinstance(found, str)
