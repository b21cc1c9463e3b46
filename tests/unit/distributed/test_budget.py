"""`recompute: auto`: what is computed again for a step to fit, and how much memory it is expected to take."""

from __future__ import annotations

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.activation_checkpointing import Activations, RecomputeLevel, UnitMemory, count_activations
from plait.distributed.wrap import find_wrap_units
from plait.engine.recompute_budget import StateBytes, choose, kept_bytes, peak_bytes, recompute_levels, states_of
from plait.errors import ConfigError
from plait.models import build_model

LLAMA = {"type": "llama", "vocab_size": 97, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq_len": 32}
LADDER: list[RecomputeLevel] = ["none", "cheap", "attention", "full"]


def example(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 97, (rows, tokens)), "labels": torch.randint(0, 97, (rows, tokens))}


def counted(rows: int, tokens: int, *, late: bool = False) -> tuple[Activations, StateBytes]:
    config = parse_sections(model=LLAMA, device="cpu").config
    with torch.device("meta"):
        model = build_model(config.model)
    found = count_activations(model, find_wrap_units(model, config.strategy.wrap), example(rows, tokens), config)
    return found, states_of(model, found, config, open_world(config), late_gradients=late)


def cost(ways: list[RecomputeLevel]) -> list[int]:
    return [LADDER.index(way) for way in ways]


def budgets(found: Activations, states: StateBytes, count: int = 60) -> list[float]:
    """From more than a step can need to less than it can do with."""
    most, least = peak_bytes(found, states, ["none"] * 4) * 1.01, peak_bytes(found, states, ["full"] * 4) * 0.99
    return [most + (least - most) * each / (count - 1) for each in range(count)]


def test_the_smaller_the_budget_the_more_is_recomputed_and_what_is_cheap_goes_first() -> None:
    found, states = counted(16, 32)
    chosen = [choose(found, states, budget) for budget in budgets(found, states)]
    assert chosen[0] == ["none"] * 4
    assert chosen[-1] == ["full"] * 4
    assert sorted(map(cost, chosen)) == [cost(ways) for ways in chosen]
    assert len({tuple(ways) for ways in chosen}) >= 5
    for ways in chosen:  # no product is computed twice anywhere before norms and gates are everywhere
        assert not {"none"} & set(ways) or not {"attention", "full"} & set(ways)


def test_what_is_chosen_fits_and_one_step_less_would_not() -> None:
    found, states = counted(16, 32)
    for budget in budgets(found, states)[:-1]:
        ways = choose(found, states, budget)
        assert peak_bytes(found, states, ways) <= budget or ways == ["full"] * 4
        if ways != ["none"] * 4:
            last = max(range(4), key=lambda at: (cost(ways)[at], at))
            rung = LADDER[cost(ways)[last] - 1]
            less = [rung if at == last else way for at, way in enumerate(ways)]
            assert (
                peak_bytes(found, states, less) > budget
                or kept_bytes(found.units[last], rung) >= found.units[last].saved
            )


def test_attention_is_kept_to_the_end_only_where_sequences_are_long() -> None:
    for rows, tokens, expected in ((1, 512, True), (64, 8, False)):
        found, states = counted(rows, tokens)
        met = {way for budget in budgets(found, states) for way in choose(found, states, budget)}
        assert ("attention" in met) is expected


def test_larger_batches_recompute_more_under_the_same_budget() -> None:
    costs = [cost(choose(*counted(rows, 32), 4 * 2**20)) for rows in (1, 16, 64)]
    assert sorted(costs) == costs
    assert costs[0] < costs[-1]


def test_gradients_that_come_when_activations_go_leave_more_room() -> None:
    (found, always), (_, late) = counted(16, 32), counted(16, 32, late=True)
    pairs = [(choose(found, always, each), choose(found, late, each)) for each in budgets(found, always)]
    assert all(cost(second) <= cost(first) for first, second in pairs)
    assert any(cost(second) < cost(first) for first, second in pairs)


def test_the_peak_is_at_the_end_of_the_forward_pass_or_where_a_unit_runs_again() -> None:
    unit = UnitMemory(inputs=1, saved=10, products=4, attention=2, trained_params=3)
    found = Activations([unit] * 3, outside=5, transient=2)
    steady = StateBytes(steady=100, gradient=0, outside=0)
    assert [kept_bytes(unit, way) for way in LADDER] == [10, 7, 3, 1]
    assert peak_bytes(found, steady, ["none"] * 3) == 100 + 5 + 30 + 5  # and gradients inside the last unit
    assert peak_bytes(found, steady, ["full"] * 3) == 100 + 5 + 3 + 9 + 5
    late = StateBytes(steady=100, gradient=2, outside=50)
    assert peak_bytes(found, late, ["none"] * 3) == 100 + 5 + 2 * (3 * 3 + 50)  # all gradients, no activation


def test_the_expected_peak_is_what_training_keeps() -> None:
    config = parse_sections(model=LLAMA, device="cpu").config
    batch = example(8, 32)
    model = build_model(config.model)
    found = count_activations(model, find_wrap_units(model, config.strategy.wrap), batch, config)
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        if tensor.untyped_storage()._cdata not in seen:
            kept += tensor.untyped_storage().nbytes()
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    seen: dict[int, Tensor] = {param.untyped_storage()._cdata: param for param in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    at_work = 0.5 * found.units[-1].saved
    expected = peak_bytes(found, StateBytes(0, 0, 0), ["none"] * 4)
    assert expected == pytest.approx(max(kept + at_work, kept + found.transient), rel=0.05)


def test_the_budget_is_what_is_written_or_what_the_machine_has_free() -> None:
    for budget, expected in (({"budget_gib": 1e-6}, "full"), ({"budget_gib": 64.0}, "none"), ({}, "none")):
        recompute = {"mode": "auto", **budget}
        config = parse_sections(model=LLAMA, strategy={"recompute": recompute}, device="cpu").config
        with torch.device("meta"):
            model = build_model(config.model)
        units = find_wrap_units(model, config.strategy.wrap)
        world = open_world(config)
        assert recompute_levels(model, units, example(2, 32), config=config, world=world) == [expected] * 4
    with refused(ConfigError, "'auto'", "example=", key="strategy.recompute.mode"):
        recompute_levels(model, units, None, config=config, world=world)


class Looking(torch.nn.Linear):
    """Goes by the values of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


def test_a_model_that_looks_at_values_is_told_what_to_set() -> None:
    config = parse_sections(strategy={"recompute": {"mode": "auto"}}, device="cpu").config
    with refused(ConfigError, "'auto'", "Looking", "_local_scalar_dense", key="strategy.recompute.mode"):
        recompute_levels(Looking(4, 4), [], torch.ones(2, 4), config=config, world=open_world(config))


def test_a_row_of_layers_is_measured_with_the_first_input_as_it_is_called() -> None:
    config = parse_sections(device="cpu").config
    row = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    first, other = torch.ones(2, 4), torch.ones(2)
    for inputs in ({"x": first, "y": other}, (first, other), first):
        assert count_activations(row, [], inputs, config).outside > 0
