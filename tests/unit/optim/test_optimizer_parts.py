"""Optimizers of one's own: how they are made, what is asked of them, what of them is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import parse_sections
from plait.config.optim import OptimConfig
from plait.errors import CheckpointError, ConfigError
from plait.optim import OptimizerGroup, base_rate, build_optimizer, param_form_of, split_groups
from plait.optim.examine import OptimizerNeeds, clone_factory, examine_optimizer
from plait.optim.state import OptimizerRecord, flatten, merge_records, unflatten

MODEL = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def section(value: Any) -> OptimConfig:
    return parse_sections(optim=value).config.optim


def made(value: Any, model: nn.Module = MODEL) -> torch.optim.Optimizer:
    config, params = section(value), dict(model.named_parameters())
    specs = split_groups(model, config)
    views = [OptimizerGroup(spec.names, [params[name] for name in spec.names], spec.options) for spec in specs]
    return build_optimizer(config, views)


def test_without_further_words_it_is_as_torch_makes_it() -> None:
    ours, theirs = made("NAdam"), torch.optim.NAdam(MODEL.parameters())
    (mine,), (expected,) = ours.param_groups, theirs.param_groups
    assert {key: mine[key] for key in expected if key not in ("params", "param_names")} == {
        key: value for key, value in expected.items() if key != "params"
    }
    assert mine["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert base_rate(section("NAdam"), ours) == mine["initial_lr"] == 2e-3


def test_weight_decay_makes_two_groups() -> None:
    groups = made({"type": "NAdam", "weight_decay": 0.1, "lr": 0.5}).param_groups
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.1, 0.5), (0.0, 0.5)]
    assert groups[1]["param_names"] == ["0.bias", "1.weight", "1.bias"]


def test_a_function_makes_one() -> None:
    optimizer = made(lambda params: torch.optim.SGD(params, lr=0.25))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["initial_lr"] == 0.25


def test_one_that_wants_a_closure_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        made(Asks)
    assert caught.value.problems[0].path == "optim.type"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("LBFGS", "optim.type"),
        ("SparseAdam", "optim.type"),
        ({"type": "Rprop", "weight_decay": 0.1}, "optim.weight_decay"),
        ({"type": "NAdam", "beta": 1}, "optim.beta"),
        (lambda params: torch.optim.SGD(params[0]["params"][:2], lr=0.1), "optim.type"),
        (lambda params: torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), "optim.type"),
        (lambda params: object(), "optim.type"),
        (torch.optim.SGD(MODEL.parameters(), lr=0.1), "optim"),  # where others are updated than the model's own
    ],
)
def test_what_cannot_update_is_refused_at_its_key(value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(value)
    assert caught.value.problems[0].path == path


class Plain(torch.optim.Optimizer):
    """Says nothing of itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.direction(group, param), alpha=group["lr"])

    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class Unlike(Plain):
    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        return super().direction(group, param) * sum(float(each.grad.norm()) for each in group["params"])


class Asks(Plain):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Noisy(Plain):
    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        return super().direction(group, param) + torch.randn_like(param)


class Counts(Plain):
    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        group["norms"] = group.get("norms", 0.0) + float(param.norm())  # of the weights that it has, and no others
        return super().direction(group, param)


class Normed(Plain):
    elementwise = True

    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        grad = super().direction(group, param)
        return grad / grad.norm()


class Keeps(Plain):
    def direction(self, group: dict[str, Any], param: Tensor) -> Tensor:
        self.state[param]["object"] = object()
        return super().direction(group, param)


def test_what_a_class_says_of_itself_decides_what_it_sees() -> None:
    seen = {type_: param_form_of(section(type_)) for type_ in (Plain, Normed, torch.optim.NAdam, "Muon", "Lion")}
    assert list(seen.values()) == ["full", "shards", "shards", "dtensors", "shards"]
    assert param_form_of(section({"type": f"{__name__}:Plain", "elementwise": True})) == "shards"


ALL = OptimizerNeeds(one_by_one=True, by_element=False, alike=True, saved=True)
PARTS = OptimizerNeeds(one_by_one=False, by_element=True, alike=True, saved=True)
ONE = OptimizerNeeds(one_by_one=False, by_element=False, alike=False, saved=False)


@pytest.mark.parametrize(
    ("kind", "asked", "named"),
    [
        (Plain, ALL, None),
        (Plain, PARTS, None),
        (Normed, ALL, None),
        (Normed, PARTS, "optim.elementwise"),
        (Unlike, ALL, "strategy.zero: 0"),
        (Unlike, ONE, None),
        (Counts, ALL, "strategy.zero: 0"),
        (Noisy, ALL, "random"),
        (Noisy, ONE, None),
        (Keeps, ALL, "checkpoint.last: false"),
        (Keeps, ONE, None),
    ],
)
def test_a_trial_finds_out_what_an_optimizer_does(kind: type[Plain], asked: OptimizerNeeds, named: str | None) -> None:
    optimizer = kind(MODEL.parameters())
    before = torch.random.get_rng_state()
    for make in (lambda groups: kind(groups), clone_factory(optimizer)):
        if named is None:
            examine_optimizer(optimizer, make, asked)
        else:
            with refused(ConfigError, kind.__name__, named, key="optim.type"):
                examine_optimizer(optimizer, make, asked)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not optimizer.state


def test_a_state_of_any_shape_comes_back() -> None:
    state = {"GG": [torch.ones(2, 2), []], "Q": None, 3: (1.5, float("inf"), torch.bfloat16, "a", True)}
    tensors, outline = flatten("kept", state)
    assert list(tensors) == ["kept/GG/0"]
    back = unflatten(json.loads(json.dumps(outline)), dict(tensors).pop)
    assert back.keys() == state.keys()
    assert torch.equal(back["GG"][0], torch.ones(2, 2))
    assert back["GG"][1] == []
    assert back[3] == state[3]
    assert type(back[3]) is tuple
    with refused(TypeError, "Module", "'kept/0'"):
        flatten("kept", [nn.Module()])


def test_numbers_that_change_are_kept_and_settings_are_not() -> None:
    one = Plain(MODEL.parameters())
    record = OptimizerRecord(one)
    one.param_groups[0].update(k=3, lr=0.7, big=torch.ones(1))
    one.rounds = 4  # type: ignore[attr-defined]
    weight = MODEL[0].weight
    one.state[weight] = {"count": 2, "pair": [torch.ones(3)]}
    kept = json.loads(json.dumps(record.state([("0.weight", weight)])))
    two = Plain(MODEL.parameters())
    fresh = OptimizerRecord(two)
    two.param_groups[0]["left"] = True  # since it was made: not in the checkpoint
    two.state[weight] = {"pair/0": torch.ones(3)}
    fresh.restore(kept, [("0.weight", weight)])
    group = two.param_groups[0]
    assert (group["k"], group["lr"], "left" in group, two.rounds) == (3, 0.1, False, 4)  # type: ignore[attr-defined]
    assert torch.equal(group["big"], torch.ones(1))
    assert two.state[weight]["count"] == 2
    assert torch.equal(two.state[weight]["pair"][0], torch.ones(3))


def test_what_belongs_to_no_parameter_is_not_left_out_in_silence() -> None:
    one = Plain(MODEL.parameters())
    record = OptimizerRecord(one)
    one.state["whole"] = {"sum": torch.ones(1)}  # type: ignore[index]
    with refused(CheckpointError, "Plain", "'whole'"):
        record.state([])
    other = Plain(MODEL.parameters())
    record = OptimizerRecord(other)
    other.sums = torch.ones(1000)  # type: ignore[attr-defined]
    with refused(CheckpointError, "'sums'", "1000"):
        record.state([])


def test_groups_that_differ_between_ranks_are_an_error() -> None:
    def part(value: int) -> dict[str, Any]:
        return {"groups": [{"d": {"plain": value}}], "attributes": {}, "state": {}}

    assert merge_records([part(1), {**part(2), "groups": [None]}], "Prodigy") == part(1)
    with refused(CheckpointError, "Prodigy", "'d'", "group 0", "strategy.zero: 0"):
        merge_records([part(1), part(2)], "Prodigy")
