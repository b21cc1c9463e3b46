"""Optimizers of other people under every way of spreading: equal to one process, or refused with the reason.

[Note: SOAP and rounding] It turns gradients into the directions of a decomposition. Early on most of these are
arbitrary, so that sums in another order give another decomposition, and other steps. Where gradients are the same to
the bit, as under ZeRO, it is compared as it is. Elsewhere `eps` makes steps proportional to momentum, whatever the
directions, and what the directions are is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import CheckpointError, ConfigError
from tests.multi.parity import Trace, assert_same, errors_of, run_steps, token_batches
from tests.multi.ranks import RankFailedError, RankPool
from tests.multi.toys import Classifier, Outcome, assert_close, fit, fit_with
from tests.refusals import refused

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "NAdam": {"type": "NAdam", "lr": 1e-2, "eps": 0.1},
    "RAdam": {"type": "torch.optim:RAdam", "lr": 1e-2, "eps": 0.1},
    "Adafactor": {"type": "torch.optim:Adafactor", "lr": 1e-2},
    "AdamWScheduleFree": {"type": "schedulefree:AdamWScheduleFree", "lr": 1e-2, "eps": 0.1},
    "SGDScheduleFree": {"type": "schedulefree:SGDScheduleFree", "lr": 1e-2, "elementwise": True},
    "RAdamScheduleFree": {"type": "schedulefree:RAdamScheduleFree", "lr": 1e-2, "eps": 0.1},
    "SOAP": {"type": "pytorch_optimizer:SOAP", "lr": 1e-2, "eps": 0.1, "precondition_frequency": 2},
    "CAME": {"type": "pytorch_optimizer:CAME", "lr": 1e-3},
    "Adan": {"type": "pytorch_optimizer:Adan", "lr": 1e-2, "eps": 0.1, "weight_decay": 0.1},
    "ADOPT": {"type": "pytorch_optimizer:ADOPT", "lr": 1e-2, "eps": 0.1, "elementwise": True},
    "Lamb": {"type": "pytorch_optimizer:Lamb", "lr": 1e-2, "eps": 0.1},
    "Prodigy": {"type": "pytorch_optimizer:Prodigy", "lr": 1.0},
    "Kron": {"type": "pytorch_optimizer:Kron", "lr": 1e-3},
    "ScalableShampoo": {"type": "pytorch_optimizer:ScalableShampoo", "lr": 1e-3},
}
GENTLE_SOAP = {**OPTIMIZERS["SOAP"], "lr": 1e4, "eps": 1e5, "weight_decay": 0.0}
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "tp2": {"layout": {"tp": 2}},
}
SPREAD = ("zero1", "zero2", "zero3", "tp2")
REFUSED: dict[tuple[str, str], str] = {
    **{("Prodigy", strategy): "strategy.zero: 0" for strategy in SPREAD},
    **{("Kron", strategy): "random" for strategy in STRATEGIES},
    **{("ScalableShampoo", strategy): "PreConditioner" for strategy in STRATEGIES},
}
"""Which pairs are refused, and what the reason names. All others are equal to one process."""
SAVES = {"checkpoint": {"last": True}}


def steps() -> list[list[Any]]:
    return token_batches(5, 2)


def own_share(rank: int, size: int, sections: dict[str, Any], steps: list[list[Any]]) -> Trace:
    """Those along `tp` see the same micro-batches."""
    together = isinstance(sections["strategy"], dict) and "tp" in sections["strategy"].get("layout", {})
    return run_steps(*((0, 1) if together else (rank, size)), sections, steps)


def as_one(traces: Sequence[Any]) -> Any:
    """What ranks keep, together: an optimizer that gets whole parameters has the state of each on one rank."""
    for trace in reversed(traces):
        traces[0].tensors = {**trace.tensors, **traces[0].tensors}
    return traces[0]


ONE: dict[str, Trace] = {}


def one_process(optim: dict[str, Any]) -> Trace:
    if str(optim) not in ONE:
        ONE[str(optim)] = run_steps(0, 1, {"optim": optim}, steps())
    return ONE[str(optim)]


def is_turned(key: str) -> bool:
    """Whether a tensor of SOAP's lies along its decomposition, or is that."""
    return "Q/" in key or key.endswith("exp_avg_sq")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_equals_one_process_or_is_refused_with_the_reason(two_ranks: RankPool, name: str, strategy: str) -> None:
    turned = name == "SOAP" and strategy == "tp2"
    optim = GENTLE_SOAP if turned else OPTIMIZERS[name]
    sections = {"optim": optim, "strategy": STRATEGIES[strategy], **SAVES}
    if (named := REFUSED.get((name, strategy))) is not None:
        with refused(RankFailedError, "optim.type: ", name, named):
            two_ranks.run(own_share, sections, steps())
        return
    found, expected = as_one(two_ranks.run(own_share, sections, steps())), one_process(optim)
    assert found.tensors.keys() == expected.tensors.keys()
    errors = errors_of(found, expected)
    errors = {key: error for key, error in errors.items() if not (turned and is_turned(key))}
    worst = max(errors, key=lambda key: errors[key])
    assert errors[worst] <= 1e-5, worst


LAYOUTS: dict[str, Any] = {
    "zero3 × tp2": {"zero": 3, "layout": {"tp": 2}},
    "hybrid": {"zero": 3, "layout": {"dp_replicate": 2, "dp_shard": 2}},
    "pp2 × tp2": {"layout": {"pp": 2, "tp": 2}},
}


def share_of_four(rank: int, size: int, name: str, layout: str, steps: list[list[Any]]) -> Trace:
    """Those along `tp` and `pp` see the same micro-batches."""
    place = {"zero3 × tp2": (rank // 2, 2), "hybrid": (rank, 4), "pp2 × tp2": (0, 1)}[layout]
    return run_steps(*place, {"optim": OPTIMIZERS[name], "strategy": LAYOUTS[layout]}, steps)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["CAME", "AdamWScheduleFree"])
def test_layouts_that_cut_twice_and_stages_equal_one_process(four_ranks: RankPool, name: str, layout: str) -> None:
    batches = token_batches(5, 4)
    found = as_one(four_ranks.run(share_of_four, name, layout, batches))
    assert_same(found, run_steps(0, 1, {"optim": OPTIMIZERS[name]}, batches), tolerance=1e-5)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SOAP", "NAdam"])
def test_what_two_ranks_saved_one_goes_on_with_under_another_strategy(
    two_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    optim = GENTLE_SOAP if name == "SOAP" else OPTIMIZERS[name]
    sections: dict[str, Any] = {"optim": optim, "schedule": {"type": "WSD", "decay": 4}}
    options = {"samples": 22, "validation": 6}
    whole = fit(0, 1, {**sections, "work_dir": str(tmp_path / "whole")}, **options)
    parts = {**sections, "work_dir": str(tmp_path / "parts")}
    first = two_ranks.run(fit_with, {**parts, "strategy": "zero2"}, {**options, "stop_at": 5})
    assert first[0].steps == 5
    second = fit(0, 1, {**parts, "checkpoint": {"resume": "auto"}}, **options)
    assert second.losses == pytest.approx(whole.losses[5:], rel=1e-5)
    assert second.metrics[-1] == pytest.approx(whole.metrics[-1], rel=1e-4)
    assert second.tensors.keys() == whole.tensors.keys()
    for outcome in (second, whole):
        outcome.tensors = {key: each for key, each in outcome.tensors.items() if name != "SOAP" or not is_turned(key)}
    assert_close(second, whole, tolerance=1e-4)
    assert second.extra["engine"].get("optimizer", {}).keys() == whole.extra["engine"].get("optimizer", {}).keys()
    # And the other way: one saved, two go on.
    third = {**sections, "work_dir": str(tmp_path / "whole"), "strategy": "zero3", "train": {"max_steps": 14}}
    more = {**third, "schedule": None, "checkpoint": {"resume": "auto"}}
    found = two_ranks.run(fit_with, more, options)
    assert as_one(found).tensors.keys() >= whole.tensors.keys()


class Tame(torch.optim.Optimizer):
    """Keeps numbers of every kind: for each parameter, for its groups, and of its own."""

    def __init__(self, params: Any, lr: float = 0.1, calm: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "calm": calm, "seen": 0})
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        for group in self.param_groups:
            group["seen"] += 1
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["pair"] = (state.get("pair", (0.0, None))[0] + float(param.grad.norm()), torch.float32)
                state.setdefault("nested", {"row": [torch.zeros(len(param))]})["row"][0].add_(1)
                param.sub_(param.grad, alpha=group["lr"] * group["calm"] / (1 + state["pair"][0] / self.total))


TAME = {"type": f"{__name__}:Tame", "calm": 0.3}


def test_numbers_lists_and_mappings_are_saved_and_taken_up(two_ranks: RankPool, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"optim": TAME, "schedule": None}
    whole = fit(0, 1, {**sections, "work_dir": str(tmp_path / "whole")})
    parts = {**sections, "work_dir": str(tmp_path / "parts")}
    two_ranks.run(fit_with, {**parts, "strategy": "zero1"}, {"stop_at": 5})
    second = fit(0, 1, {**parts, "checkpoint": {"resume": "auto"}})
    assert second.losses == pytest.approx(whole.losses[5:], rel=1e-5)
    mine, expected = second.extra["engine"]["optimizer"], whole.extra["engine"]["optimizer"]
    assert mine["groups"] == expected["groups"] == [{"seen": {"plain": whole.steps}}]
    assert mine["attributes"] == expected["attributes"] == {"total": {"plain": whole.steps}}
    state = mine["state"]["hidden.weight"]
    assert state["count"] == {"plain": whole.steps}
    assert second.tensors["optim.hidden.weight.nested/row/0"].tolist() == [whole.steps] * 16


def train_with_object(rank: int, size: int, folder: str) -> Outcome:
    """An optimizer object over the parameters of the model that is given, with a rate of its own."""
    import tests.multi.toys as toys

    model = Classifier()
    made = Tame(model.parameters(), lr=0.05, calm=0.3)
    runner = toys.Runner(
        model=model,
        data=toys.Points(22),
        optim=made,
        strategy="zero3" if size > 1 else "ddp",
        work_dir=folder,
        seed=3,
        device="cpu",
        train={"max_steps": 4},
        batch={"total": 4},
        log={"console": "none", "sinks": []},
    )
    with runner:
        runner.train()
        assert runner.engine.updater.optimizer is made  # type: ignore[attr-defined]
        return Outcome([], [], [], [], [], toys.whole_tensors(runner), runner.step, 0, None)


def test_an_object_goes_the_same_way(two_ranks: RankPool, tmp_path: Path) -> None:
    one = train_with_object(0, 1, str(tmp_path / "one"))
    two = as_one(two_ranks.run(train_with_object, str(tmp_path / "two")))
    assert_close(two, one, tolerance=1e-5)


class Square(Tame):
    """Says of itself what is not so."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm().clamp(min=1e-6), alpha=group["lr"])


def test_what_a_class_says_of_itself_is_tried(two_ranks: RankPool) -> None:
    sections = {"optim": {"type": f"{__name__}:Square", "lr": 0.1}, "strategy": "zero1"}
    with refused(RankFailedError, "optim.type: ", "Square", "`optim.elementwise`"):
        two_ranks.run(own_share, sections, steps())


def test_what_cannot_be_saved_is_refused_before_the_first_step() -> None:
    sections = {"optim": OPTIMIZERS["ScalableShampoo"], **SAVES}
    with pytest.raises(ConfigError) as caught:
        run_steps(0, 1, sections, steps())
    assert caught.value.problems[0].path == "optim.type"
    with refused(CheckpointError, "PreConditioner"):  # or where somebody asks
        run_steps(0, 1, {**sections, "checkpoint": {"last": False}}, steps())


def weights_seen(rank: int, size: int, sections: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The weights while training, to use, and after that."""
    import tests.multi.toys as toys

    runner = toys.Runner(model=Classifier(), data=toys.Points(22), **sections)
    with runner:
        runner.train()
        engine = runner.engine

        def weight() -> Tensor:
            return toys.full_tensors(engine.state_tensors())["model.hidden.weight"]

        before = weight()
        with engine.evaluation_weights(), engine.evaluation_weights():
            used = weight()
        return before, used, weight()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_schedule_free_optimizer_shows_its_average_while_it_is_asked_for(
    two_ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    sections = {
        "optim": OPTIMIZERS["AdamWScheduleFree"],
        "strategy": strategy,
        "work_dir": str(tmp_path),
        "device": "cpu",
        "precision": {"compute": "bf16"},
        "train": {"max_steps": 6},
        "batch": {"total": 4},
        "log": {"console": "none", "sinks": []},
    }
    for before, used, after in two_ranks.run(weights_seen, sections):
        assert (before - used).abs().max() > 1e-5
        torch.testing.assert_close(after, before)


def test_one_that_leaves_parameters_out_is_refused() -> None:
    def half(params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params[0]["params"][:1], lr=0.1)

    with pytest.raises(ConfigError) as caught:
        run_steps(0, 1, {"optim": half}, steps(), model=lambda: nn.Linear(2, 2), loss_fn=None)
    assert caught.value.problems[0].path == "optim.type"
