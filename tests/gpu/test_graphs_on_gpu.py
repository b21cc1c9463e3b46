"""On a real device: passes that are recorded and repeated train like passes that are done anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native
from plait.engine.graphs import IGNORED_STEPS, OBSERVED_STEPS, WARM_UP
from plait.models import LossTerm, build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = WARM_UP + 5
LLAMA = {"type": "llama", "vocab_size": 512, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 128}
RESNET = {"type": "resnet", "depth": 18, "classes": 10, "stem": "cifar"}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32, SGD": {"precision": "tf32", "optim": {"type": "SGD", "lr": 0.05, "momentum": 0.9}},
    "bf16": {"precision": "bf16"},
    "bf16, SGD": {"precision": "bf16", "optim": {"type": "SGD", "lr": 0.05, "momentum": 0.9}},
    "fp16": {"precision": {"compute": "fp16", "scaler": {"initial_power": 8, "window": 3}}},
    "bf16, compiled": {"precision": "bf16", "strategy": {"compile": {"scope": "block"}}},
    "fp8": {"precision": "fp8"},
}


def engine_of(model: nn.Module, said: list[str], *, graphs: bool, **sections: Any) -> Any:
    settings = {"optim": {"type": "AdamW", "lr": 1e-3}, "device": "cuda", "train": {"clip_norm": 1.0}, **sections}
    settings["strategy"] = {**settings.get("strategy", {}), "graphs": graphs}
    config = parse_sections(**settings).config
    return prepare_native(Preparation(config, open_world(config), model=model, log=said.append))


def pair_of(make: Any, **sections: Any) -> tuple[Any, Any, list[str]]:
    one, other, said = make(), make(), []
    other.load_state_dict(one.state_dict())
    return engine_of(one, said, graphs=False, **sections), engine_of(other, said, graphs=True, **sections), said


def llama() -> nn.Module:
    return build_model(parse_sections(model=LLAMA).config.model)


def resnet() -> nn.Module:
    return build_model(parse_sections(model=RESNET).config.model)


def tokens(rows: int = 2, length: int = 128) -> dict[str, Tensor]:
    ids = torch.randint(512, (rows, length + 1))
    labels = ids[:, 1:].clone()
    labels[0, : random.randrange(length)] = -100  # the number of targets is another one in every step
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}


def images() -> dict[str, Tensor]:
    return {"image": torch.randn(16, 3, 32, 32), "label": torch.randint(10, (16,))}


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    left, right = one.state_tensors(), other.state_tensors()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name].float(), tensor.float(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_step_is_the_step(way: str) -> None:
    plain, recorded, said = pair_of(llama, **WAYS[way])
    for _ in range(STEPS):
        batch = tokens()
        want, got = plain.train_step([batch]), recorded.train_step([batch])
        assert got.targets == want.targets
        assert got.loss == pytest.approx(want.loss, rel=1e-3)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=2e-2)
    assert not [line for line in said if "graphs" in line]
    assert len(recorded._recorded._recordings) == 1
    assert_close(plain, recorded, 1e-4 if way.startswith("fp32") else 2e-3)


def test_statistics_of_images_are_kept_once_a_step() -> None:
    plain, recorded, said = pair_of(resnet)
    for _ in range(STEPS):
        batch = images()
        assert recorded.train_step([batch]).loss == pytest.approx(plain.train_step([batch]).loss, rel=1e-2)
    assert not [line for line in said if "graphs" in line]
    counts = {name: int(t) for name, t in recorded.model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts
    assert set(counts.values()) == {STEPS}


def test_shapes_have_their_own_recordings_and_share_their_memory() -> None:
    plain, recorded, said = pair_of(llama, precision="bf16")
    shapes = [(2, 128), (4, 64), (1, 96)]
    for rows, length in shapes * STEPS:
        batch = tokens(rows, length)
        assert recorded.train_step([batch]).loss == pytest.approx(plain.train_step([batch]).loss, rel=1e-3)
    assert not [line for line in said if "graphs" in line]
    assert len(recorded._recorded._recordings) == len(shapes)
    assert len({found.graph.pool() for found in recorded._recorded._recordings.values()}) == 1


def test_nobody_waits_for_a_recorded_step() -> None:
    engine = engine_of(llama(), [], graphs=True, precision="bf16")
    batches = [{name: tensor.pin_memory() for name, tensor in tokens().items()} for _ in range(4)]
    for _ in range(WARM_UP + 2):
        engine.train_step([batches[0]])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [engine.train_step([batch]) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.asynchronous for result in results)
    assert all(result.loss > 0 for result in results)


class Dropping(nn.Module):
    """Its loss says how much was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> LossTerm:
        kept = nn.functional.dropout(x, 0.5, self.training) * self.scale
        return LossTerm(kept.sum(), x.numel())


def test_every_step_drops_something_else() -> None:
    engine = engine_of(Dropping(), [], graphs=True, optim={"type": "SGD", "lr": 1e-9})
    x = torch.ones(4096)
    losses = [engine.train_step([{"x": x}]).loss for _ in range(WARM_UP + 10)]
    assert len(engine._recorded._recordings) == 1
    assert len({round(loss, 6) for loss in losses[WARM_UP:]}) > 5
    assert all(0.8 < loss < 1.2 for loss in losses)


class Asking(nn.Module):
    """Looks at a number of the device on its way, as no recording can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> LossTerm:
        error = self.layer(x).square()
        if error.sum().item() < 0:
            error = error * 2
        return LossTerm(error.sum(), error.numel())


def test_a_model_that_asks_its_device_is_not_recorded_and_goes_on() -> None:
    plain, recorded, said = pair_of(Asking)
    for _ in range(STEPS):
        batch = {"x": torch.randn(4, 8)}
        assert recorded.train_step([batch]).loss == pytest.approx(plain.train_step([batch]).loss, rel=1e-5)
    assert_close(plain, recorded, 1e-5)
    assert len(said) == 1
    assert "strategy.graphs" in said[0]
    torch.cuda.synchronize()


def test_a_checkpoint_is_taken_and_loaded_between_recorded_steps() -> None:
    engine = engine_of(llama(), [], graphs=True, precision="bf16")
    batch = tokens()
    for _ in range(WARM_UP + 2):
        engine.train_step([batch])
    engine.settle()
    kept = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    first = [engine.train_step([batch]).loss for _ in range(3)]
    engine.settle()
    with torch.no_grad():
        for name, tensor in engine.state_tensors().items():
            tensor.copy_(kept[name])
    engine.state_loaded()
    again = [engine.train_step([batch]).loss for _ in range(3)]
    assert again == pytest.approx(first, rel=1e-3)
    assert len(engine._recorded._recordings) == 1


GPT = {"type": "gpt", "vocab_size": 512, "dim": 128, "layers": 2, "heads": 4, "seq_len": 128, "dropout": 0.2}


def described(said: list[str], **sections: Any) -> Any:
    """An engine for a model that the configuration describes; seeds and first values are its own."""
    config = parse_sections(optim={"type": "AdamW", "lr": 1e-3}, device="cuda", **sections).config
    return prepare_native(Preparation(config, open_world(config), log=said.append))


def test_a_recorded_step_drops_what_the_step_would_have_dropped() -> None:
    batches = [tokens() for _ in range(STEPS)]
    losses = []
    for graphs in (False, True):
        engine = described([], model=GPT, strategy={"graphs": graphs})
        losses.append([engine.train_step([batch]).loss for batch in batches])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("model", [RESNET, GPT], ids=["resnet", "gpt"])
def test_a_small_model_is_recorded_by_itself(model: dict[str, Any]) -> None:
    steps = IGNORED_STEPS + OBSERVED_STEPS + 1 + WARM_UP + 5
    batches = [images() if model is RESNET else tokens() for _ in range(steps)]
    losses, lines = [], []
    for graphs in (False, "auto"):
        said: list[str] = []
        engine = described(said, model=model, precision="bf16", strategy={"graphs": graphs})
        results = [engine.train_step([batch]) for batch in batches]
        losses.append([result.loss for result in results])
        lines.append([line for line in said if "strategy.graphs: auto" in line])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert [len(found) for found in lines] == [0, 1]
    assert len(engine._recorded._recordings) == 1


def test_a_large_model_keeps_its_device_busy_and_is_left_alone() -> None:
    said: list[str] = []
    wide = {**LLAMA, "dim": 2048, "layers": 4, "heads": 16, "kv_heads": 4, "seq_len": 2048}
    engine = described(said, model=wide, precision="bf16")
    batch = {name: tensor.cuda() for name, tensor in tokens(16, 2048).items()}
    results = [engine.train_step([batch]) for _ in range(IGNORED_STEPS + OBSERVED_STEPS + WARM_UP + 5)]
    assert results[-1].loss < results[0].loss
    assert engine._recorded._recordings == {}
    assert not [line for line in said if "graphs" in line]
