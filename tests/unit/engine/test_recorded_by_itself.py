"""`strategy.graphs: auto`: who records without being asked, when, and when not.

A tape plays the recording, and a script says whether the device is done: see `tape` and `test_recorded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.engine.tape import Net, Tape

from plait.config import parse_sections
from plait.config.rules.strategy import can_capture, resolve_graphs
from plait.distributed import open_world
from plait.engine import Preparation, graphs, prepare_native
from plait.engine.graphs import (
    IGNORED_STEPS,
    MAX_AUTO_RECORDINGS,
    MAX_MEMORY_SHARE,
    OBSERVED_STEPS,
    WARM_UP,
    LaunchBoundDetector,
    RecordedPasses,
)
from plait.plan import make_plan
from plait.plan.hardware import find_hardware

DECIDES = IGNORED_STEPS + OBSERVED_STEPS + 1
"""The step in which it is known."""
GIB = 2**30


class Device:
    """A device that is done with its passes, or is not, step by step."""

    def __init__(self) -> None:
        self.busy_in: set[int] = set()
        self.reserved = 1 * GIB
        self.marks = 0

    def event(self) -> Any:
        self.marks += 1
        number, device = self.marks, self

        class Event:
            def record(self, stream: Any) -> None:
                """Nothing runs here."""

            def query(self) -> bool:
                return number not in device.busy_in

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: made.reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 10 * GIB))
    return made


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    made: list[Tape] = []

    def record(work: Callable[[], None], beside: Any) -> Tape:
        made.append(Tape(work))
        return made[-1]

    monkeypatch.setattr(graphs, "capture_graph", record)
    return made


def engine_of(model: Net, said: list[str], *, records: bool = True) -> Any:
    optim = {"type": "AdamW", "lr": 0.01, "implementation": "one-pass"}
    config = parse_sections(optim=optim, device="cpu", train={"audit": "off"}).config  # a layer of the net is idle
    engine: Any = prepare_native(Preparation(config, open_world(config), model=model, log=said.append))
    if records:
        engine._recorded = RecordedPasses(
            engine._both_passes, engine.model, engine.gradients, engine.world.device, "where it pays", said.append
        )
    return engine


def train(engine: Any, steps: int, rows: int = 6) -> list[float]:
    return [engine.train_step([{"x": torch.randn(rows, 4)}]).loss for _ in range(steps)]


# ---- when


def test_a_device_that_waits_is_recorded_and_the_steps_are_the_same(device: Device, tapes: list[Tape]) -> None:
    one, other, said = Net(), Net(), list[str]()
    other.load_state_dict(one.state_dict())
    plain, repeated = engine_of(one, said, records=False), engine_of(other, said)
    for step in range(1, DECIDES + WARM_UP + 6):
        batch = {"x": torch.randn(6, 4)}
        assert repeated.train_step([batch]).loss == plain.train_step([batch]).loss
        assert len(tapes) == (1 if step >= DECIDES + WARM_UP else 0)
    for name, tensor in plain.state_tensors().items():
        assert torch.equal(repeated.state_tensors()[name], tensor), name
    assert len(said) == 1
    assert "strategy.graphs: auto" in said[0]
    assert tapes[0].replays == 6


@pytest.mark.parametrize("busy", range(IGNORED_STEPS + 1, IGNORED_STEPS + OBSERVED_STEPS + 1))
def test_a_device_that_is_busy_once_is_left_alone(busy: int, device: Device, tapes: list[Tape]) -> None:
    said: list[str] = []
    device.busy_in = {busy}
    engine = engine_of(Net(), said)
    train(engine, DECIDES + WARM_UP + 3)
    assert (tapes, said) == ([], [])
    assert device.marks == busy  # and nobody looks any more


def test_the_first_steps_show_nothing(device: Device, tapes: list[Tape]) -> None:
    device.busy_in = set(range(IGNORED_STEPS + 1))
    train(engine_of(Net(), []), DECIDES + WARM_UP)
    assert len(tapes) == 1


def test_a_device_without_room_for_a_recording_is_left_alone(device: Device, tapes: list[Tape]) -> None:
    device.reserved = int(MAX_MEMORY_SHARE * 10 * GIB) + 1
    train(engine_of(Net(), []), DECIDES + WARM_UP + 3)
    assert tapes == []


def test_passes_that_somebody_watches_are_not_recorded(device: Device, tapes: list[Tape]) -> None:
    net, seen = Net(), list[int]()
    net.norm.register_forward_hook(lambda *_: seen.append(1))
    train(engine_of(net, []), DECIDES + WARM_UP + 3)
    assert tapes == []
    assert len(seen) == DECIDES + WARM_UP + 3


def test_somebody_who_begins_to_watch_is_told_of_every_pass(device: Device, tapes: list[Tape]) -> None:
    net, seen = Net(), list[int]()
    engine = engine_of(net, [])
    train(engine, DECIDES + WARM_UP + 2)
    assert len(tapes) == 1
    net.norm.register_forward_hook(lambda *_: seen.append(1))
    train(engine, 10)
    assert len(seen) == 10


def test_few_kinds_are_recorded_without_a_word(device: Device, tapes: list[Tape]) -> None:
    said: list[str] = []
    engine = engine_of(Net(), said)
    train(engine, DECIDES)
    for rows in range(2, 7):
        train(engine, WARM_UP + 2, rows)
    assert len(tapes) == MAX_AUTO_RECORDINGS
    assert len(said) == 1


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, AssertionError, torch.OutOfMemoryError])
def test_what_cannot_be_recorded_goes_on_without_a_word(
    kind: type[Exception], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(work: Callable[[], None], beside: Any) -> Any:
        raise kind("no")

    monkeypatch.setattr(graphs, "capture_graph", refuse)
    said: list[str] = []
    losses = train(engine_of(Net(), said), DECIDES + WARM_UP + 3)
    assert len(losses) == DECIDES + WARM_UP + 3
    assert said == []


def test_a_loop_that_asks_for_passes_one_by_one_has_them(device: Device, tapes: list[Tape]) -> None:
    engine = engine_of(Net(), [])
    train(engine, DECIDES + WARM_UP + 2)
    for _ in range(3):
        engine.backward(engine({"x": torch.randn(6, 4)}))
        engine.step()
    train(engine, 3)
    assert tapes[0].replays == 3


def test_a_look_is_not_repeated_once_it_is_known(device: Device) -> None:
    looking = LaunchBoundDetector(torch.device("cuda"))
    for _ in range(DECIDES):
        assert looking.launch_bound is None
        looking.passes_begin()
        looking.passes_end()
    assert looking.launch_bound is True
    marks = device.marks
    looking.passes_begin()
    looking.passes_end()
    assert device.marks == marks
    assert graphs.is_watched([Net()]) is False


# ---- who

RESNET = {"type": "resnet", "depth": 18, "classes": 10, "stem": "cifar"}
LLAMA = {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 2, "seq_len": 16}


def may(*, ranks: int = 1, accumulation: int = 1, described: bool = True, **sections: Any) -> bool:
    config = parse_sections(**{"model": RESNET, **sections}).config
    return can_capture(config, ranks=ranks, accumulation=accumulation, described=described)


def test_described_models_may_be_recorded() -> None:
    assert may()
    assert may(model=LLAMA, precision="bf16", strategy={"compile": {"scope": "block"}})
    assert may(strategy={"graphs": "auto"})


@pytest.mark.parametrize(
    "given",
    [
        {"ranks": 2},
        {"accumulation": 2},
        {"described": False},
        {"strategy": {"graphs": False}},
        {"strategy": {"graphs": True}},  # which is another way
        {"strategy": {"recompute": "full"}},
        {"strategy": {"offload": "cpu"}},
        {"profile": {}},
        {"deterministic": True},
        {"model": {**LLAMA, "type": "moe", "experts": 4, "top_k": 2}},
        {"model": {"type": "import", "target": "torch.nn:Linear"}},
    ],
    ids=str,
)
def test_others_are_not(given: dict[str, Any]) -> None:
    assert not may(**given)


def test_on_a_cpu_nothing_is_recorded_and_nothing_said() -> None:
    said: list[str] = []
    config = parse_sections(model=RESNET, device="cpu").config
    engine: Any = prepare_native(Preparation(config, open_world(config), log=said.append))
    assert engine._recorded is None
    assert not [line for line in said if "graphs" in line]


def test_a_plan_knows_who_is_recorded() -> None:
    config = parse_sections(model=LLAMA, batch={"micro": 1}, precision="bf16").config
    decided = resolve_graphs(config, ranks=1, accumulation=1, described=True)
    assert decided.strategy.graphs is True
    assert resolve_graphs(config, ranks=2, accumulation=1, described=True).strategy.graphs is False
    assert resolve_graphs(decided, ranks=2, accumulation=1, described=True) is decided
    alone, two = (make_plan(config, find_hardware("h200"), ranks=ranks).ranks[0].ledger for ranks in (1, 2))
    assert alone.total("host", "forward") == 0
    assert two.total("host", "forward") > 0
