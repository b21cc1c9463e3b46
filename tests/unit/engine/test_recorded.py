"""Passes that are recorded and repeated: the same numbers as passes that are done anew.

There is no CUDA here, so a tape plays the recording. `tests/gpu/test_graphs_on_gpu.py` does the same with real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from tests.unit.engine.tape import Net, Tape
from torch import Tensor, nn

from plait.config import parse_sections
from plait.config.rules import violations
from plait.data import MicroBatch
from plait.distributed import open_world
from plait.engine import Preparation, graphs, prepare_manual, prepare_native
from plait.engine.graphs import MAX_RECORDINGS, WARM_UP, RecordedPasses
from plait.errors import ConfigError, TrainingError
from plait.models import LossTerm, build_model

STEPS = WARM_UP + 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The recordings that were made."""
    made: list[Tape] = []

    def record(work: Callable[[], None], beside: Tape | None) -> Tape:
        assert beside is None or beside in made
        made.append(Tape(work))
        return made[-1]

    monkeypatch.setattr(graphs, "capture_graph", record)
    return made


ADAM = {"type": "AdamW", "lr": 0.01, "implementation": "one-pass"}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"train": {"clip_norm": 0.5}},
    "fp32, SGD": {"optim": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
    "bf16": {"precision": "bf16"},
    "bf16, SGD": {"precision": "bf16", "optim": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
    "bf16, clipped by value": {"precision": "bf16", "train": {"clip_value": 0.01}},
    "fp16, Lion": {
        "precision": {"compute": "fp16", "scaler": {"initial_power": 4, "window": 2}},
        "optim": {"type": "Lion"},
    },
    "fp16": {"precision": {"compute": "fp16", "scaler": {"initial_power": 4, "window": 2}}},
}


def engine_of(model: nn.Module, said: list[str] | None = None, *, records: bool = True, **sections: Any) -> Any:
    unaudited = {"audit": "off", **sections.get("train", {})}  # a layer of the net is idle
    config = parse_sections(**{"optim": ADAM, "device": "cpu", **sections, "train": unaudited}).config
    say = said.append if said is not None else lambda _text: None
    engine: Any = prepare_native(Preparation(config, open_world(config), model=model, log=say))
    if records:
        engine._recorded = RecordedPasses(
            engine._both_passes, engine.model, engine.gradients, engine.world.device, "always", say
        )
    return engine


def two_nets() -> tuple[Net, Net]:
    one, other = Net(), Net()
    other.load_state_dict(one.state_dict())
    return one, other


def numbers_of(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.state_tensors().items()}


def assert_same(one: Any, other: Any) -> None:
    left, right = numbers_of(one), numbers_of(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_step_is_the_step(way: str, made: list[Tape]) -> None:
    one, other = two_nets()
    plain, repeated = engine_of(one, records=False, **WAYS[way]), engine_of(other, **WAYS[way])
    for _ in range(STEPS):
        batch = {"x": torch.randn(6, 4)}
        want, got = plain.train_step([batch]), repeated.train_step([batch])
        assert (got.loss, got.grad_norm, got.skipped, got.targets) == (
            want.loss,
            want.grad_norm,
            want.skipped,
            want.targets,
        )
    assert_same(plain, repeated)
    assert [tape.replays for tape in made] == [STEPS - WARM_UP]
    assert (one.passes, other.passes) == (STEPS, WARM_UP + 1)


def test_a_language_model(made: list[Tape]) -> None:
    config = parse_sections(
        model={"type": "llama", "vocab_size": 32, "dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "seq_len": 12}
    ).config
    one, other = build_model(config.model), build_model(config.model)
    other.load_state_dict(one.state_dict())
    plain, repeated = engine_of(one, records=False), engine_of(other)
    for _ in range(STEPS):
        ids = torch.randint(32, (2, 13))
        labels = ids[:, 1:].clone()
        labels[0, : random.randrange(12)] = -100  # the number of targets is another one in every step
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        want, got = plain.train_step([batch]), repeated.train_step([batch])
        assert (got.loss, got.targets) == (want.loss, want.targets)
    assert_same(plain, repeated)
    assert len(made) == 1


def test_a_mean_counts_its_samples(made: list[Tape]) -> None:
    def mean(outputs: LossTerm, _inputs: Any) -> Tensor:
        return outputs.sum / outputs.count

    one, other = two_nets()
    plain, repeated = engine_of(one, records=False), engine_of(other)
    plain._loss_function = repeated._loss_function = mean
    for _ in range(STEPS):
        for samples in (6, 5):
            batch = MicroBatch({"x": torch.randn(6, 4)}, samples)
            want, got = plain.train_step([batch]), repeated.train_step([batch])
            assert (got.loss, got.targets) == (want.loss, want.targets) == (want.loss, samples)
    assert_same(plain, repeated)
    assert len(made) == 2


def test_each_kind_of_inputs_has_its_own_recording(made: list[Tape]) -> None:
    one, other = two_nets()
    plain, repeated = engine_of(one, records=False), engine_of(other)
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"x": torch.randn(6, 4)},
        lambda: {"x": torch.randn(3, 4)},
        lambda: {"x": torch.randn(4, 6).t()},
        lambda: {"x": torch.randn(6, 4), "factor": 2.0},
        lambda: {"factor": 0.5, "x": torch.randn(6, 4)},
    ]
    rounds = [*range(len(kinds))] * STEPS
    random.shuffle(rounds)
    for index in rounds:
        batch = kinds[index]()
        assert repeated.train_step([batch]).loss == plain.train_step([batch]).loss
    assert_same(plain, repeated)
    assert len(made) == len(kinds)


def test_no_more_than_some_kinds_are_recorded(made: list[Tape]) -> None:
    said: list[str] = []
    engine = engine_of(Net(), said)
    for rows in range(2, MAX_RECORDINGS + 5):
        for _ in range(WARM_UP + 2):
            engine.train_step([{"x": torch.randn(rows, 4)}])
    assert len(made) == MAX_RECORDINGS
    assert len(said) == 1
    assert not missing(said[0], "strategy.graphs", f"{MAX_RECORDINGS} ")


def test_steps_of_several_micro_batches_are_not_recorded(made: list[Tape]) -> None:
    one, other = two_nets()
    plain, repeated = engine_of(one, records=False), engine_of(other)
    for count in [1] * STEPS + [2, 1, 3, 1]:
        batches = [{"x": torch.randn(6, 4)} for _ in range(count)]
        assert repeated.train_step(batches).loss == plain.train_step(batches).loss
    assert_same(plain, repeated)
    assert len(made) == 1


def freeze(net: Net) -> None:
    net.first.weight.requires_grad_(False)


def stop_the_statistics(net: Net) -> None:
    net.norm.eval()


def move_a_weight(net: Net) -> None:
    net.last.weight.data = net.last.weight.data.clone()


@pytest.mark.parametrize("change", [freeze, stop_the_statistics, move_a_weight])
def test_what_changed_is_recorded_anew(change: Callable[[Net], None], made: list[Tape]) -> None:
    one, other = two_nets()
    plain, repeated = engine_of(one, records=False), engine_of(other)
    for step in range(2 * STEPS):
        if step == STEPS:
            change(one)
            change(other)
        batch = {"x": torch.randn(6, 4)}
        assert repeated.train_step([batch]).loss == plain.train_step([batch]).loss
    assert_same(plain, repeated)
    assert len(made) == 2


def test_evaluating_in_between_changes_nothing(made: list[Tape]) -> None:
    one, other = two_nets()
    plain, repeated = engine_of(one, records=False), engine_of(other)
    for _ in range(STEPS):
        batch = {"x": torch.randn(6, 4)}
        assert repeated.train_step([batch]).loss == plain.train_step([batch]).loss
        assert repeated.evaluate_micro_batch(batch).loss_sum == plain.evaluate_micro_batch(batch).loss_sum
    assert_same(plain, repeated)
    assert len(made) == 1


def test_a_step_that_is_not_finite_is_skipped(made: list[Tape]) -> None:
    said: list[str] = []
    engine = engine_of(Net(), said)
    for _ in range(STEPS):
        assert not engine.train_step([{"x": torch.randn(6, 4)}]).skipped
    before = numbers_of(engine)["model.last.weight"]
    assert engine.train_step([{"x": torch.full((6, 4), float("inf"))}]).skipped
    assert torch.equal(numbers_of(engine)["model.last.weight"], before)
    assert any(f"step {STEPS}" in line for line in said)


@pytest.mark.parametrize("way", WAYS)
def test_passes_that_cannot_be_recorded_are_done_as_they_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: Callable[[], None], beside: Any) -> Any:
        try:
            work()
            raise RuntimeError("the host wants a number\nwhich it cannot have")
        finally:
            raise RuntimeError("the recording was ended by an error")

    monkeypatch.setattr(graphs, "capture_graph", refuse)
    said: list[str] = []
    frozen = nn.BatchNorm1d(8, track_running_stats=False)  # `refuse` computes, which a device does not
    one, other = two_nets()
    one.norm, other.norm = frozen, nn.BatchNorm1d(8, track_running_stats=False)
    plain, repeated = engine_of(one, records=False, **WAYS[way]), engine_of(other, said, **WAYS[way])
    for _ in range(STEPS):
        batch = {"x": torch.randn(6, 4)}
        assert repeated.train_step([batch]).loss == plain.train_step([batch]).loss
    assert_same(plain, repeated)
    assert len(said) == 1
    assert not missing(said[0], "strategy.graphs", "the host wants a number")
    assert "which it cannot have" not in said[0]


def test_inputs_that_are_no_plain_tensors_are_told_of(made: list[Tape]) -> None:
    class Wrapped:
        def __init__(self) -> None:
            self.x = torch.randn(6, 4)

    class Unwrapping(Net):
        def forward(self, x: Wrapped, factor: float = 1.0) -> LossTerm:  # type: ignore[override]
            return super().forward(x.x, factor)

    said: list[str] = []
    engine = engine_of(Unwrapping(), said)
    for _ in range(STEPS):
        engine.train_step([{"x": Wrapped()}])
    assert made == []
    assert len(said) == 1
    assert not missing(said[0], "strategy.graphs", "Wrapped")


# ---- asking for it


def test_where_there_is_no_gpu_training_goes_on() -> None:
    said: list[str] = []
    engine = engine_of(Net(), said, records=False, strategy={"graphs": True})
    engine.train_step([{"x": torch.randn(6, 4)}])
    assert len(said) == 1
    assert not missing(said[0], "strategy.graphs", "CUDA")


def test_a_recorded_engine_takes_whole_steps(made: list[Tape]) -> None:
    with refused(TrainingError, "engine(batch)", "strategy.graphs", "engine.train_step(micro_batches)"):
        engine_of(Net())({"x": torch.randn(6, 4)})


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"strategy": {"offload": "cpu"}}, "strategy.offload"),
        ({"strategy": {"offload": {"activations": "all"}}}, "strategy.offload"),
        ({"strategy": {"recompute": "full"}}, "strategy.recompute"),
        ({"strategy": {"tiles": {"names": ["blocks.*.ffn"]}}}, "strategy.tiles"),
        ({"precision": {"compute": "bf16", "fp8": {"scales": "earlier"}}}, "precision.fp8.scales"),
        ({"strategy": {"compile": {"mode": "reduce-overhead"}}}, "reduce-overhead"),
        ({"profile": {}}, "profile"),
        ({"strategy": {"engine": "deepspeed"}}, "deepspeed"),
    ],
)
def test_what_cannot_repeat_itself_is_refused(sections: dict[str, Any], named: str) -> None:
    strategy = {"graphs": True, **sections.get("strategy", {})}
    config = parse_sections(**{"optim": ADAM, **sections, "strategy": strategy}).config
    found = [each for each in violations(config, has_val=False, require_length=False) if each.path == "strategy.graphs"]
    assert len(found) == 1
    assert named in found[0].message


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": "bf16"},
        {"precision": "fp8"},
        {"precision": "tf32", "optim": {"type": "SGD", "lr": 0.1}},
        {"precision": "fp16", "optim": {"type": "Lion"}},
        {"strategy": {"compile": {"mode": "max-autotune-no-cudagraphs"}}},
    ],
)
def test_what_repeats_itself_is_not_refused(sections: dict[str, Any]) -> None:
    strategy = {"graphs": True, **sections.get("strategy", {})}
    config = parse_sections(**{**sections, "strategy": strategy}).config
    assert list(violations(config, has_val=False, require_length=False)) == []


def test_a_loop_of_ones_own_is_refused() -> None:
    config = parse_sections(optim=ADAM, device="cpu", strategy={"graphs": True}).config
    with refused(ConfigError, "true", "Runner", key="strategy.graphs"):
        prepare_manual(Preparation(config, open_world(config), model=Net()))


def test_several_micro_batches_are_refused() -> None:
    config = parse_sections(optim=ADAM, device="cpu", strategy={"graphs": True}).config
    with refused(ConfigError, "true", "2", "`batch.accumulation: 1`", key="strategy.graphs"):
        prepare_native(Preparation(config, open_world(config), model=Net(), accumulation=2))
