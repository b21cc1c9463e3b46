"""Where models are cut, and that their parts keep their names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused
from torch import nn

from plait.config.model import GptConfig, LlamaConfig
from plait.distributed.pipeline_split import (
    LayerStack,
    LazyLayer,
    TiedLazyLayer,
    balance,
    make_stages,
    measure_layers,
    plan_stages,
    split_at,
    tie_stages,
)
from plait.errors import ConfigError, ModelError
from plait.models.gpt import Gpt
from plait.models.llama import Llama

SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 8, "layers": 4, "heads": 2, "seq_len": 8}


def llama(tied: bool = False) -> nn.Module:
    return Llama(LlamaConfig(type="llama", kv_heads=2, tie_embeddings=tied, **SIZES))


def all_stages(model: Any, ranks: int, schedule: str = "1f1b", **options: Any) -> list[Any]:
    """The stages of all ranks, from fresh copies of the model."""
    stages = []
    for rank in range(ranks):
        plan = plan_stages(model(), ranks=ranks, schedule=schedule, **options)
        stages += make_stages(plan, rank)
    return sorted(stages, key=lambda stage: stage.index)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_largest_stage_is_as_small_as_can_be(costs: list[int], stages: int) -> None:
    if stages > len(costs):
        with refused(ConfigError, f"{stages} ", f"{len(costs)} layers", key="strategy.layout.pp"):
            balance(costs, stages)
        return

    def largest(bounds: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    def cuts(start: int, left: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [(start, len(costs))]
        return [(start, *rest) for i in range(start + 1, len(costs) - left + 2) for rest in cuts(i, left - 1)]

    found = balance(costs, stages)
    assert len(found) == stages + 1
    assert found[0] == 0
    assert found[-1] == len(costs)
    assert all(a < b for a, b in pairwise(found))
    assert largest(found) == min(largest(cut) for cut in cuts(0, stages))


def test_equal_layers_are_shared_out_evenly() -> None:
    assert balance([1] * 8, 4) == (0, 2, 4, 6, 8)


def test_names_say_where_to_cut() -> None:
    layers = [f"blocks.{i}" for i in range(6)]
    assert split_at(["blocks.2", "blocks.5"], layers, 3) == (0, 2, 5, 6)
    assert split_at(["blocks.0", "2", "5"], layers, 3) == (0, 2, 5, 6)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["block.2", "blocks.5"], ["'block.2'", "'blocks.2'"]),
        (["blocks.5", "blocks.2"], ["['blocks.5', 'blocks.2']", "blocks.0, blocks.1"]),
        (["blocks.5"], ["['blocks.5']", "2 stages", "3"]),
    ],
)
def test_names_that_do_not_fit_are_explained(names: list[str], named: list[str]) -> None:
    with refused(ConfigError, *named, key="strategy.pipeline.split"):
        split_at(names, [f"blocks.{i}" for i in range(6)], 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_stages_have_the_names_of_the_model_between_them(schedule: str, ranks: int, tied: bool) -> None:
    stages = all_stages(lambda: llama(tied), ranks, schedule)
    owned = [name for stage in stages for name, _ in stage.module.named_parameters() if stage.owns(name)]
    assert sorted(owned) == sorted(name for name, _ in llama(tied).named_parameters())
    held = [name for name, _ in stages[-1].module.named_parameters()]
    assert ("embedding.weight" in held) == tied
    assert stages[0].owns("embedding.weight")
    assert not tied or not stages[-1].owns("embedding.weight")


def test_a_model_on_the_meta_device_is_split_there() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Gpt(GptConfig(type="gpt", **SIZES))

    stages = all_stages(on_meta, 2, "interleaved_1f1b")
    assert all(p.is_meta for stage in stages for p in stage.module.parameters())
    assert [name for name, _ in stages[1].module.named_children()] == ["blocks"]


def test_splitting_a_model_with_values_copies_none_of_them() -> None:
    model = llama()
    pointers = {p.data_ptr() for p in model.parameters()}
    stages = make_stages(plan_stages(model, ranks=1, schedule="interleaved_1f1b"), 0)
    assert {p.data_ptr() for stage in stages for p in stage.module.parameters()} == pointers


def test_stages_of_one_rank_can_hold_one_embedding() -> None:
    model = Gpt(GptConfig(type="gpt", **SIZES))
    stages = make_stages(plan_stages(model, ranks=2, schedule="zbv"), 0, one_copy=True)
    assert [dict(stage.tied) for stage in stages] == [{}, {}]
    first, last = (stage.module for stage in stages)
    assert first.embedding.weight is not last.embedding.weight
    tie_stages([first, last])
    assert first.embedding.weight is last.embedding.weight


def test_stages_of_one_rank_count_as_one_holder_for_the_others() -> None:
    def words() -> LazyLayer:
        return TiedLazyLayer("words", nn.Linear, 4, 4, bias=False)

    specs = [words(), LazyLayer(nn.ReLU), words(), words()]
    plan = plan_stages(specs, ranks=2, schedule="zbv", split=["1", "2", "3"])
    assert plan.tied == {"tied.words.weight": (0, 2, 3)}
    tied = [{stage.index: dict(stage.tied) for stage in make_stages(plan, rank, one_copy=True)} for rank in (0, 1)]
    holders = {"tied.words.weight": (0, 2)}
    assert tied == [{0: holders, 3: {}}, {1: {}, 2: holders}]


def test_the_head_and_the_embedding_count() -> None:
    model = Llama(LlamaConfig(type="llama", kv_heads=2, **{**SIZES, "vocab_size": 4096}))
    plan = plan_stages(model, ranks=2, schedule="interleaved_1f1b", virtual=2)
    assert [len(plan.layers_of(stage)) for stage in range(4)] == [1, 1, 1, 1]
    plan = plan_stages(llama(), ranks=2, schedule="1f1b")
    assert plan.layers_of(1) == ["blocks.2", "blocks.3"]


def test_a_sequential_is_cut_inside_the_ones_it_holds() -> None:
    def model() -> nn.Module:
        shared = nn.ReLU()
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4)), nn.Flatten(), nn.Linear(4, 2))

    stages = all_stages(model, 2, split=["0.2"])
    assert [name for name, _ in stages[0].module.named_parameters()] == ["0.0.weight", "0.0.bias"]
    assert [name for name, _ in stages[1].module.named_parameters()] == ["0.2.weight", "0.2.bias", "2.weight", "2.bias"]
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    whole = model()
    torch.manual_seed(0)
    stages = all_stages(lambda: (torch.manual_seed(0), model())[1], 2, split=["0.2"])
    middle = stages[0].call(stages[0].module, (x, "label"), None)
    assert torch.equal(stages[1].call(stages[1].module, (x, "label"), middle), whole(x))


def test_a_layer_that_is_there_twice_stays_there_twice() -> None:
    relu = nn.ReLU()
    plan = plan_stages(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu), ranks=2, schedule="1f1b")
    assert plan.outline.layers == ["0", "1", "2", "3"]


def test_parameters_shared_across_a_cut_of_a_sequential_are_refused() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    with refused(ModelError, "'0.weight'", "(0, 1)", "TiedLayerSpec"):
        plan_stages(nn.Sequential(first, nn.ReLU(), last), ranks=2, schedule="1f1b")


class Counted(nn.Linear):
    built = 0

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        if not self.weight.is_meta:
            Counted.built += 1


def test_layers_are_built_only_where_they_are_needed() -> None:
    specs = [LazyLayer(Counted, 4) for _ in range(6)]
    Counted.built = 0
    stages = make_stages(plan_stages(specs, ranks=3, schedule="1f1b"), 1)
    assert Counted.built == 2
    assert [name for name, _ in stages[0].module.named_children()] == ["2", "3"]


def test_layers_that_share_by_key_are_one_module() -> None:
    specs = [TiedLazyLayer("a", nn.Linear, 4, 4), nn.ReLU(), TiedLazyLayer("a", nn.Linear, 4, 4), torch.tanh]
    whole = LayerStack(specs)
    assert [name for name, _ in whole.named_parameters()] == ["tied.a.weight", "tied.a.bias"]
    x = torch.randn(2, 4)
    layer = whole.tied["a"]
    assert torch.equal(whole(x), layer(layer(x).relu()).tanh())
    plan = plan_stages(specs, ranks=2, schedule="1f1b")
    assert plan.tied == {"tied.a.weight": (0, 1), "tied.a.bias": (0, 1)}


def test_a_model_that_nobody_knows_how_to_cut_is_refused_with_what_to_do() -> None:
    with refused(ModelError, "LSTM", "nn.Sequential", "`hidden`"):
        plan_stages(nn.LSTM(2, 2), ranks=2, schedule="1f1b")


class Slow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(500):  # so many that no other process can make another layer seem slower
            x = super().forward(x)
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_timed_wherever_the_model_is(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 64), Slow(64, 64), nn.Linear(64, 64), nn.ReLU())
    costs = measure_layers(model, (torch.randn(64, 64), 0), device=torch.device("cpu"))
    assert max(range(4), key=lambda i: costs[i]) == 1
    assert all(p.device.type == device for p in model.parameters())
    plan = plan_stages(model, ranks=2, schedule="1f1b", split="time", costs=[1.0, 9.0, 1.0, 1.0])
    assert plan.bounds == (0, 2, 4)


def test_a_language_model_without_values_is_timed_too() -> None:
    with torch.device("meta"):
        model = llama()
    example = {"input_ids": torch.randint(0, 32, (2, 8)), "labels": torch.randint(0, 32, (2, 8))}
    costs = measure_layers(model, example, device=torch.device("cpu"))
    assert len(costs) == 4
    assert all(cost > 0 for cost in costs)
    assert all(p.is_meta for p in model.parameters())
