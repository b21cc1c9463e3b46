"""Activations that wait on the host change no number, alone, under sharding, and together with recomputing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.offload import activations
from plait.engine import Preparation, prepare_native
from plait.errors import ConfigError
from tests.multi.parity import MODEL, Trace, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import refused

STEPS = token_batches(31, 4)[:2]
ALL = {"offload": {"activations": "all"}}


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST", 1)


def run_strategies(rank: int, size: int, strategies: list[Any]) -> list[Trace]:
    activations.LEAST = 1
    traces = []
    for strategy in strategies:
        # Ranks of one replica see the same samples.
        share = (0, 1) if "layout" in strategy else (rank, size)
        traces.append(run_steps(*share, {"strategy": strategy}, STEPS))
    return traces


def assert_equal(found: Trace, expected: Trace) -> None:
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize(
    "strategy",
    [
        ALL,
        {"offload": {"activations": ["blocks.1", "blocks.2*"]}},
        {**ALL, "recompute": "full"},
        {**ALL, "recompute": {"mode": "every", "every": 2}},
        {**ALL, "recompute": "selective"},
        {**ALL, "compile": {"backend": "aot_eager", "scope": "block"}},
    ],
    ids=str,
)
def test_one_process_computes_the_same_bits(strategy: dict[str, Any]) -> None:
    without = {key: value for key, value in strategy.items() if key != "offload"}
    assert_equal(run_steps(0, 1, {"strategy": strategy}, STEPS), run_steps(0, 1, {"strategy": without}, STEPS))


class Attending(nn.Module):
    """Attention of torch, which looks whether query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x.square().mean()


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_an_input_that_is_given_three_times_is_one_tensor_again(recompute: str) -> None:
    strategy = {"recompute": recompute}
    steps = [[{"x": torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))}]] * 2
    found, expected = (run_steps(0, 1, {"strategy": each}, steps, Attending) for each in (strategy | ALL, {}))
    assert_equal(found, expected)


def graphs_of(strategy: dict[str, Any]) -> int:
    torch._dynamo.reset()
    counters.clear()
    run_steps(0, 1, {"strategy": strategy}, STEPS[:1])
    return counters["stats"]["unique_graphs"]


def test_a_compiler_sees_the_units_and_nothing_of_what_carries_their_activations() -> None:
    small = {"wrap": {"min_params": 1}, "compile": {"backend": "eager", "scope": "block"}}
    assert graphs_of({**small, **ALL}) == graphs_of(small) > 0


def test_every_stage_computes_the_same_bits(two_ranks: RankPool) -> None:
    layouts = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "recompute": "full"}]
    layouts += [{"layout": {"tp": 2}}, {"layout": {"pp": 2}}]
    plain, offloaded = layouts, [{**layout, **ALL} for layout in layouts]
    for traces in two_ranks.run(run_strategies, [*plain, *offloaded]):
        for expected, found in zip(traces[: len(plain)], traces[len(plain) :], strict=True):
            assert_equal(found, expected)


def saved_between(strategy: dict[str, Any]) -> int:
    """Bytes of tensors that autograd itself holds between forward and backward, weights aside."""
    config = parse_sections(model={**MODEL, "dim": 64}, strategy=strategy, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config)))
    held: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in engine.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = STEPS[0][0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine(batch)
    return sum(held.values())


def test_nothing_of_the_units_stays() -> None:
    assert saved_between(ALL) < 0.2 * saved_between({})


def test_host_memory_is_counted_and_used_again() -> None:
    config = parse_sections(model=MODEL, strategy=ALL, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config)))
    assert activations.activations_on_host(engine.model) == 0
    engine.train_step(STEPS[0][:1])
    first = activations.activations_on_host(engine.model)
    for _ in range(3):
        engine.train_step(STEPS[0][:1])
    assert activations.activations_on_host(engine.model) == first > 0


def test_a_pattern_that_fits_no_unit_is_refused() -> None:
    config = parse_sections(model=MODEL, strategy={"offload": {"activations": ["layers.*"]}}).config
    with refused(ConfigError, "'layers.*'", "blocks.0", key="strategy.offload.activations"):
        prepare_native(Preparation(config, open_world(config)))


def test_evaluation_moves_nothing() -> None:
    config = parse_sections(model=MODEL, strategy=ALL, seed=3).config
    engine = prepare_native(Preparation(config, open_world(config)))
    plain = parse_sections(model=MODEL, seed=3).config
    reference = prepare_native(Preparation(plain, open_world(plain)))
    assert engine.evaluate_micro_batch(STEPS[0][0]).loss_sum == reference.evaluate_micro_batch(STEPS[0][0]).loss_sum
