"""Techniques together: sharding with recomputing, with compiling, and with a look aside in between."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import register_backend

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.errors import PlaitError
from plait.models import LossTerm
from tests.multi.parity import MODEL, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import missing

STEPS = token_batches(21, 4)[:2]


@pytest.fixture(scope="module")
def expected() -> Any:
    return run_steps(0, 1, {}, STEPS)


@pytest.mark.parametrize("recompute", ["full", "selective", {"mode": "every", "every": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_recomputing_blocks_under_sharding(two_ranks: RankPool, expected: Any, zero: int, recompute: Any) -> None:
    for found in two_ranks.run(run_steps, {"strategy": {"zero": zero, "recompute": recompute}}, STEPS):
        assert_same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_an_embedding_that_is_also_the_head_is_no_unit(two_ranks: RankPool, kind: str) -> None:
    model = {**{key: value for key, value in MODEL.items() if key != "kv_heads"}, "type": kind, "tie_embeddings": True}
    alone = run_steps(0, 1, {"model": model}, STEPS)
    strategy = {"zero": 3, "wrap": {"classes": ["Embedding", "Linear"]}}
    for found in two_ranks.run(run_steps, {"model": model, "strategy": strategy}, STEPS):
        assert_same(found, alone, tolerance=1e-5, noise="k.bias")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_blocks_under_sharding(two_ranks: RankPool, expected: Any, zero: int, recompute: str) -> None:
    strategy = {"zero": zero, "recompute": recompute, "compile": {"backend": "aot_eager", "scope": "block"}}
    for found in two_ranks.run(run_steps, {"strategy": strategy}, STEPS):
        assert_same(found, expected, tolerance=1e-5)


def failing_compiler(rank: int, size: int, strategy: dict[str, Any]) -> tuple[Any, list[str]]:
    torch._dynamo.reset()

    @register_backend(name=f"plait_failing_{rank}_{id(strategy)}")
    def failing(_graph: Any, _inputs: Any) -> Any:
        raise ValueError("not on this machine")

    said: list[str] = []
    section = {**strategy, "compile": {"backend": f"plait_failing_{rank}_{id(strategy)}"}}
    config = parse_sections(model=MODEL, strategy=section, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config), log=said.append))
    return [engine.train_step(step[rank::size]).loss for step in STEPS], said


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_compiler_that_fails_on_every_rank_leaves_training_as_it_is(
    two_ranks: RankPool, expected: Any, zero: int
) -> None:
    config = {"optim": {"type": "AdamW"}}
    losses = run_steps(0, 1, config, STEPS).losses
    for found, said in two_ranks.run(failing_compiler, {"zero": zero}):
        assert found == pytest.approx(losses, rel=1e-5)
        assert len(said) == 1
        assert "not on this machine" in said[0]


def look_aside(rank: int, size: int, strategy: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Train with evaluations in between, then change the weights by hand, and look again."""
    config = parse_sections(model=MODEL, strategy=strategy, seed=3, optim={"type": "AdamW", "eps": 1e-3}).config
    engine = prepare_native(Preparation(config, open_world(config)))
    evaluated, trained = [], []
    for step in STEPS:
        evaluated.append(engine.evaluate_micro_batch(STEPS[0][0]).loss_sum)
        trained.append(engine.train_step(step[rank::size]).loss)
    evaluated.append(engine.evaluate_micro_batch(STEPS[0][0]).loss_sum)
    for part in engine.weights().values():
        part.mul_(0.5)
    engine.weights_changed()
    evaluated.append(engine.evaluate_micro_batch(STEPS[0][0]).loss_sum)
    for part in engine.weights().values():
        part.mul_(2.0)
    engine.weights_changed()
    return evaluated, trained, [engine.train_step(STEPS[0][rank::size]).loss]


@pytest.mark.parametrize("strategy", [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}], ids=str)
def test_evaluating_and_changing_weights_in_between_is_seen_by_every_layout(two_ranks: RankPool, strategy: Any) -> None:
    alone = look_aside(0, 1, {})
    assert alone[0][-1] != pytest.approx(alone[0][-2], rel=1e-3)
    for found in two_ranks.run(look_aside, strategy):
        for mine, reference in zip(found, alone, strict=True):
            assert mine == pytest.approx(reference, rel=1e-5)


def auto(rank: int, size: int, budget_gib: float) -> tuple[list[str], float]:
    recompute = {"mode": "auto", "budget_gib": budget_gib}
    config = parse_sections(model=MODEL, strategy={"zero": 3, "recompute": recompute}, seed=3).config
    example: dict[str, Tensor] = STEPS[0][0]
    engine = prepare_native(Preparation(config, open_world(config), example=example))
    chosen = [name for name, module in engine.model.named_modules() if "forward" in vars(module)]
    return chosen, engine.train_step(STEPS[0][rank::size]).loss


def test_auto_recomputes_as_little_as_the_budget_allows_and_changes_no_number(
    two_ranks: RankPool, expected: Any
) -> None:
    for budget, blocks in ((16.0, 0), (1e-6, 3)):
        for chosen, loss in two_ranks.run(auto, budget):
            assert len(chosen) == blocks
            assert loss == pytest.approx(expected.losses[0], rel=1e-6)


MIXTURE = {**MODEL, "type": "moe", "experts": 4, "expert_dim": 16}


def auto_spread(rank: int, size: int, model: dict[str, Any], layout: dict[str, int]) -> tuple[list[str], float]:
    """What is said where nothing fits, and the loss."""
    strategy = {"layout": layout, "recompute": {"mode": "auto", "budget_gib": 1e-6}}
    config = parse_sections(model=model, strategy=strategy, seed=3).config
    world = open_world(config)
    mine = STEPS[0][world.data_rank :: world.layout.data_parallel]
    said: list[str] = []
    engine = prepare_native(Preparation(config, world, example=mine[0], accumulation=len(mine), log=said.append))
    return said, engine.train_step(mine).loss


@pytest.mark.parametrize(
    ("model", "axis"), [(MODEL, "cp"), (MODEL, "pp"), (MODEL, "tp"), (MIXTURE, "tp"), (MIXTURE, "ep")]
)
def test_auto_measures_models_that_are_spread(two_ranks: RankPool, model: dict[str, Any], axis: str) -> None:
    config = parse_sections(model=model, seed=3).config
    alone = prepare_native(Preparation(config, open_world(config))).train_step(STEPS[0]).loss
    for said, loss in two_ranks.run(auto_spread, model, {axis: 2}):
        (measured,) = (text for text in said if "recompute" in text)
        assert re.search(r"auto\b.*\b(\d) of \1\b", measured)
        assert loss == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("zero", [1, 3])
def test_experts_may_be_units(two_ranks: RankPool, zero: int) -> None:
    alone = run_steps(0, 1, {"model": MIXTURE}, STEPS)
    strategy = {"zero": zero, "layout": {"ep": 2}, "wrap": {"classes": ["Experts"]}}
    for found in two_ranks.run(run_steps, {"model": MIXTURE, "strategy": strategy}, STEPS):
        assert_same(found, alone, tolerance=1e-5)


def refusal(rank: int, size: int, sections: dict[str, Any], model: Any) -> str:
    config = parse_sections(**sections).config
    with pytest.raises(PlaitError) as caught:
        prepare_native(Preparation(config, open_world(config), model=model))
    return str(caught.value)


@pytest.mark.parametrize("optim", ["Lamb", "Adafactor", "Muon"])
def test_an_optimizer_of_whole_parameters_is_refused_before_the_first_step(two_ranks: RankPool, optim: str) -> None:
    sections = {"model": MODEL, "optim": {"type": optim}, "strategy": {"layout": {"tp": 2}}}
    for message in two_ranks.run(refusal, sections, None):
        assert not missing(message, f"optim.type: {optim}", "blocks.0.", "`strategy.layout.tp`")


class Scaled(torch.nn.Module):
    """Has parameters without dimensions: in a layer, at the root, cast and frozen ones; one is used on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(ScaledLayer() for _ in range(3))
        self.temperature = torch.nn.Parameter(torch.tensor(1.3))
        self.shift = torch.nn.Parameter(torch.tensor(0.4), requires_grad=False)
        self.sometimes = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, first: bool) -> LossTerm:
        for block in self.blocks:
            x = block(x)
        loss = ((x * self.temperature.exp() - self.shift) ** 2).sum()
        return LossTerm(loss * self.sometimes if first else loss, torch.tensor(float(len(x))))


class ScaledLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.gain = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.linear(x))


def scaled_steps() -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(5)
    return [[{"x": torch.randn(3, 8, generator=generator), "first": i % 2 == 0} for i in range(4)] for _ in range(4)]


@pytest.mark.parametrize(
    "sections",
    [
        {"strategy": {"zero": 1}},
        {"strategy": {"zero": 2, "recompute": "full"}},
        {"strategy": {"zero": 3}, "train": {"clip_norm": 0.1}},
        {"strategy": {"zero": 3, "offload": {"optimizer": "cpu"}}},
        {"strategy": {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu"}}},
        {"strategy": {"zero": 1}, "optim": {"type": "Lamb", "lr": 0.01}},
        {"strategy": {"zero": 3}, "precision": "bf16"},
        {"strategy": {"zero": 2}, "precision": "bf16", "train": {"clip_norm": 0.1}},
    ],
    ids=lambda sections: "-".join(f"{key}={value}" for key, value in sections.items()),
)
def test_scalar_parameters_stay_replicated_beside_sharded_ones(two_ranks: RankPool, sections: dict[str, Any]) -> None:
    steps = scaled_steps()
    plain = {key: value for key, value in sections.items() if key != "strategy"}
    alone = run_steps(0, 1, plain, steps, model=Scaled)
    assert alone.tensors["model.blocks.0.gain"].shape == ()
    assert not torch.equal(alone.tensors["model.temperature"], torch.tensor(1.3))
    for found in two_ranks.run(run_steps, sections, steps, Scaled):
        assert_same(found, alone, tolerance=3e-2 if "precision" in sections else 1e-5)


def short_step(rank: int, size: int, schedule: str, count: int) -> tuple[float, float]:
    """A step with fewer micro-batches than the run's own eight."""
    strategy = {"layout": {"pp": 2}, "pipeline": {"schedule": schedule}} if size > 1 else {}
    config = parse_sections(model={**MODEL, "layers": 4}, strategy=strategy, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config), accumulation=8))
    result = engine.train_step([*STEPS[0], *STEPS[1]][:count])
    return result.loss, result.grad_norm


@pytest.mark.parametrize(
    ("schedule", "count"), [("interleaved_zb", 7), ("interleaved_1f1b", 5), ("dualpipev", 1), ("zbv", 1)]
)
def test_the_last_step_of_an_epoch_may_be_short_for_its_schedule(
    two_ranks: RankPool, schedule: str, count: int
) -> None:
    alone = short_step(0, 1, schedule, count)
    for found in two_ranks.run(short_step, schedule, count):
        assert found == pytest.approx(alone, rel=1e-5)


def transformers_stages(rank: int, size: int) -> float:
    pytest.importorskip("transformers")
    described = {"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 32}
    model = {"type": "hf", "config": {**described, "num_hidden_layers": 4, "num_attention_heads": 4}}
    stages = {"zero": 1, "layout": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "zbv"}}
    config = parse_sections(model=model, strategy=stages if size > 1 else {}, seed=3).config
    world = open_world(config)
    mine = STEPS[0][world.data_rank :: world.layout.data_parallel]
    return prepare_native(Preparation(config, world, accumulation=len(mine))).train_step(mine).loss


def test_several_stages_of_a_transformers_model_begin_with_its_values(four_ranks: RankPool) -> None:
    alone = transformers_stages(0, 1)
    assert four_ranks.run(transformers_stages) == pytest.approx([alone] * 4, rel=1e-5)
