"""Offloading in one process: any elementwise optimizer, late updates, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn

from plait.config import parse_sections
from plait.config.rules import violations
from plait.distributed import open_world
from plait.distributed.offload.layout import plan_spans
from plait.distributed.offload.streams import CopyStreams
from plait.engine import Preparation, prepare_native
from plait.engine.offload import OffloadedParams
from plait.errors import ConfigError
from plait.optim import offload as visit
from plait.optim.offload import BucketRows, Offload, OffloadOptions, split_into_pieces
from plait.optim.swapper import updates_on_device


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def run(offload: dict[str, Any], batches: list[Tensor], **sections: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of a run from the same weights."""
    config = parse_sections(**{"strategy": {"offload": offload}, "seed": 1, **sections}).config
    engine = prepare_native(Preparation(config, open_world(config), model=Net, log=lambda _: None))
    assert isinstance(engine.master_weights, OffloadedParams) == (offload.get("optimizer", "none") != "none")
    losses = [engine.train_step([batch]).loss for batch in batches]
    return losses, {name: tensor.clone() for name, tensor in engine.state_tensors().items()}


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(4, 8) for _ in range(4)]


OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "AdamW", "amsgrad": True},
    {"type": "AdamW", "implementation": "foreach"},
    {"type": "Adam", "weight_decay": 0.1},
    {"type": "SGD", "momentum": 0.9},
    {"type": "Lion"},
    {"type": "Adagrad"},
]


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: "-".join(str(each) for each in optim.values()))
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_any_elementwise_optimizer_is_itself_when_offloaded(
    optim: dict[str, Any], tier: str, batches: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload: dict[str, Any] = {"optimizer": tier, "bucket_mb": 0.0004}
    if tier == "nvme":
        offload["path"] = str(tmp_path)
    monkeypatch.setattr(visit, "PIECE", 50)  # parameters have 64 and 8 numbers
    for train in ({}, {"clip_value": 1e-3}):
        expected, state = run({}, batches, optim=optim, train=train)
        for update in ("cpu", "device"):
            found, same = run({**offload, "update": update}, batches, optim=optim, train=train)
            assert found == expected
            assert state.keys() == same.keys()
            assert all(torch.equal(same[name], tensor) for name, tensor in state.items())


class WideNet(Net):
    """Rows that are long enough for 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))


@pytest.mark.parametrize("update", ["cpu", "device"])
@pytest.mark.parametrize("optim", ["AdamW", "AdamW8bit"])
def test_one_run_may_use_device_memory_host_memory_and_files(
    optim: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit, "PIECE", 5000)  # a weight has 9,216 numbers
    rows = [torch.randn(4, 96) for _ in range(4)]
    offload = {"optimizer": "nvme", "ratio": 0.35, "host_ratio": 0.35, "bucket_mb": 0.04, "path": str(tmp_path)}
    offload["update"] = update
    found = []
    for strategy in ({}, {"offload": offload}):
        config = parse_sections(strategy=strategy, seed=1, optim={"type": optim}).config
        engine = prepare_native(Preparation(config, open_world(config), model=WideNet, log=lambda _: None))
        losses = [engine.train_step([row]).loss for row in rows[:2]]
        early = engine.state_tensors()  # what a checkpoint would hold, in the middle
        losses += [engine.train_step([row]).loss for row in rows[2:]]
        found.append((losses, {name: t.clone() for name, t in engine.state_tensors().items()}))
    assert {bucket.span.home for bucket in engine.master_weights.store.buckets} == {"device", "cpu", "nvme"}  # type: ignore[attr-defined]
    assert early.keys() == found[0][1].keys()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], tensor) for name, tensor in found[0][1].items())


def test_a_delayed_update_reaches_the_model_one_step_late(batches: list[Tensor]) -> None:
    found, state = run({"optimizer": "cpu", "delayed": True}, batches, optim={"type": "SGD", "lr": 0.5})
    torch.manual_seed(0)
    config = parse_sections(seed=1).config
    net = prepare_native(Preparation(config, open_world(config), model=Net, log=lambda _: None)).model
    newest = {name: param.detach().clone() for name, param in net.named_parameters()}
    for batch, loss in zip(batches, found, strict=True):
        net.zero_grad()
        out = net(batch)
        out.backward()
        assert out.item() == pytest.approx(loss)
        with torch.no_grad():
            for name, param in net.named_parameters():
                before = newest[name].clone()
                newest[name] -= 0.5 * param.grad  # type: ignore[operator]
                param.copy_(before)  # what the next step computes with: without this update
    for name, weight in newest.items():
        torch.testing.assert_close(state[f"model.{name}"], weight)


def test_buckets_keep_the_order_and_the_first_share_stays_on_the_device() -> None:
    spans = plan_spans([5, 4, 3, 9, 1], [4, 0, 1, 2, 3], limit=8, shares=[("device", 0.3), ("cpu", 0.3), ("nvme", 1.0)])
    assert [(span.indices, span.home) for span in spans] == [
        ((4, 0), "device"),
        ((1, 2), "cpu"),
        ((3,), "nvme"),  # larger than a bucket by itself
    ]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rank_may_have_nothing_to_update(on_device: bool) -> None:
    params, options = [nn.Parameter(torch.empty(0, 4))], OffloadOptions("cpu", 8, ratio=0.3, on_device=on_device)
    store = Offload(
        params,
        [torch.float32],
        order=[0],
        streams=CopyStreams(torch.device("cpu"), fake=False),
        options=options,
        log=lambda _: None,
    )
    store.attach(torch.optim.AdamW(store.masters, fused=True))
    store.gradient_queue.take(0, torch.empty(0, 4))
    store.begin(1.0, None)
    store.settle()


def test_a_budget_below_one_parameter_is_refused_with_the_number(tmp_path: Path, batches: list[Tensor]) -> None:
    offload = {"optimizer": "nvme", "budget_gib": 1e-7, "path": str(tmp_path)}
    with refused(ConfigError, "1e-07", "layers.0.weight", "64", key="strategy.offload.budget_gib"):
        run(offload, batches)


def test_state_that_does_not_fit_the_host_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, batches: list[Tensor]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with refused(ConfigError, "1000 B", "`strategy.offload.ratio`", key="strategy.offload.optimizer"):
        run({"optimizer": "cpu"}, batches)


def test_pieces_have_every_row_once_and_no_more_than_there_is_room_for() -> None:
    for _ in range(200):
        shapes = [torch.Size(random.choices(range(9), k=random.randint(0, 3))) for _ in range(random.randint(1, 6))]
        most = random.randint(1, 60)
        pieces = split_into_pieces(shapes, most)
        rows: dict[int, list[int]] = {tensor_index: [] for tensor_index in range(len(shapes))}
        for piece in pieces:
            sizes = [
                torch.empty(shapes[tensor_index])[part].numel() if shapes[tensor_index] else 1
                for tensor_index, part in piece
            ]
            rows_of = [part.stop - part.start for (_, part), size in zip(piece, sizes, strict=True) if size]
            assert sum(sizes) <= most or rows_of == [1]  # a row that is larger by itself
            for tensor_index, part in piece:
                rows[tensor_index] += range(part.start, part.stop)
        for tensor_index, shape in enumerate(shapes):
            assert rows[tensor_index] == list(range(shape[0] if shape else 1))


def test_a_number_by_itself_and_an_empty_shard_are_taken_along() -> None:
    pieces = split_into_pieces([torch.Size(()), torch.Size((0, 4)), torch.Size((2, 3))], 100)
    assert pieces == [[BucketRows(0, slice(0, 1)), BucketRows(1, slice(0, 0)), BucketRows(2, slice(0, 2))]]


@pytest.mark.parametrize(
    ("offload", "optim", "kind", "cores", "link", "expected"),
    [
        ({}, "AdamW", "cuda", 16, 50, True),
        ({}, "AdamW", "cuda", 16, 25, False),
        ({}, "AdamW", "cuda", 28, 50, False),
        ({}, "AdamW", "cuda", 8, 25, True),
        ({}, "AdamW8bit", "cuda", 64, 10, True),
        ({}, "AdamW8bit", "cpu", 2, 50, False),
        ({"delayed": True}, "AdamW", "cuda", 4, 50, False),
        ({"update": "cpu"}, "AdamW8bit", "cuda", 4, 50, False),
        ({"update": "device"}, "AdamW", "cuda", 64, 10, True),
        ({"update": "device"}, "AdamW", "cpu", 2, 10, True),
    ],
)
def test_who_computes_the_update(
    offload: dict[str, Any], optim: str, kind: str, cores: int, link: float, expected: bool
) -> None:
    strategy = {"offload": {"optimizer": "cpu", **offload}}
    config = parse_sections(strategy=strategy, optim={"type": optim}).config
    assert updates_on_device(config, kind, cores=cores, link_gbps=lambda: link) is expected


OFFLOAD = "strategy.offload"

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "params below stage 3": (
        {"zero": 2, "offload": {"optimizer": "cpu", "params": "cpu"}},
        {},
        f"{OFFLOAD}.params",
        ["stage 2", "strategy.zero: 3"],
    ),
    "params alone": (
        {"zero": 3, "offload": {"params": "cpu"}},
        {},
        f"{OFFLOAD}.params",
        ["cpu", f"{OFFLOAD}.optimizer: cpu"],
    ),
    "a whole-matrix optimizer": ({"offload": "cpu"}, {"optim": {"type": "Muon"}}, "optim.type", ["Muon", OFFLOAD]),
    "a delay for some": (
        {"offload": {"optimizer": "cpu", "delayed": True, "ratio": 0.1}},
        {},
        f"{OFFLOAD}.delayed",
        ["true", f"{OFFLOAD}.ratio"],
    ),
    "a budget without files": (
        {"offload": {"optimizer": "cpu", "budget_gib": 1.0}},
        {},
        f"{OFFLOAD}.budget_gib",
        ["1.0", "nvme"],
    ),
    "nothing for files": (
        {"offload": {"optimizer": "nvme", "ratio": 0.5, "host_ratio": 0.5}},
        {},
        f"{OFFLOAD}.host_ratio",
        ["0.5", f"{OFFLOAD}.ratio: 0.5"],
    ),
    "a late update by the device": (
        {"offload": {"optimizer": "cpu", "update": "device", "delayed": True}},
        {},
        f"{OFFLOAD}.update",
        ["device", f"{OFFLOAD}.delayed", "update: cpu"],
    ),
    "the device, for weights of the host": (
        {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu", "update": "device"}},
        {},
        f"{OFFLOAD}.update",
        ["device", f"{OFFLOAD}.params: cpu", "update: cpu"],
    ),
    "a share of weights that live on the host": (
        {"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu", "ratio": 0.3}},
        {},
        f"{OFFLOAD}.ratio",
        ["0.3", f"{OFFLOAD}.params: cpu"],
    ),
    "an update of nothing": (
        {"offload": {"update": "device"}},
        {},
        f"{OFFLOAD}.update",
        ["device", f"{OFFLOAD}.optimizer"],
    ),
    "a share of nothing": ({"offload": {"ratio": 0.5}}, {}, f"{OFFLOAD}.ratio", ["0.5", f"{OFFLOAD}.optimizer"]),
    "a copy of what is in files": (
        {"offload": "nvme"},
        {"checkpoint": {"async_save": True}},
        "checkpoint.async_save",
        ["true", f"{OFFLOAD}.optimizer: nvme"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_each_other_are_refused(case: str) -> None:
    strategy, others, key, named = REFUSED[case]
    config = parse_sections(strategy=strategy, **others).config
    found = violations(config, has_val=False, require_length=False)
    assert any(problem.path == key and not missing(str(problem), *named) for problem in found), found


@pytest.mark.parametrize("update", ["cpu", "device"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_gradient(
    tier: str, update: str, tmp_path: Path
) -> None:
    said: list[str] = []
    offload = {"optimizer": tier, "update": update, **({"path": str(tmp_path)} if tier == "nvme" else {})}
    config = parse_sections(strategy={"offload": offload}, precision="bf16", seed=1).config
    engine = prepare_native(Preparation(config, open_world(config), model=Net, log=said.append))
    engine.train_step([torch.randn(4, 8)])
    before = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    weight = engine.model.get_parameter("layers.1.weight")
    handle = weight.register_hook(lambda grad: grad * float("inf"))
    result = engine.train_step([torch.randn(4, 8)])
    handle.remove()
    assert result.skipped
    assert not missing(said[-1], "step 1", "gradient", "layers.1.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_tensors().items())
    assert not engine.train_step([torch.randn(4, 8)]).skipped
