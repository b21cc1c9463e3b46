"""Parts of the DeepSpeed front end: schedules, the loss scale, a user's own state, whole weights."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn

from plait.config.precision import ScalerConfig
from plait.errors import CheckpointError, ConfigError
from plait.frontends.deepspeed.initialization import DeepSpeedScaler
from plait.frontends.deepspeed.runtime import lr_schedules
from plait.frontends.deepspeed.saving import decode, encode
from plait.frontends.deepspeed.utils import zero_to_fp32

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_min_lr": 1e-4}),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": [0.1, 0.2], "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 0.05}),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
]


def optimizer() -> torch.optim.Optimizer:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.AdamW([{"params": [one], "lr": 0.01}, {"params": [two], "lr": 0.03}])


def rates(module: Any, kind: str, options: dict[str, Any]) -> list[list[float]]:
    updating = optimizer()
    scheduler = getattr(module, kind)(updating, **options)
    found = []
    for _ in range(16):
        found.append([float(group["lr"]) for group in updating.param_groups])
        scheduler.step()
    return found


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("kind", "options"), SCHEDULES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(SCHEDULES)])
def test_schedules_have_deepspeeds_rates_in_every_update(kind: str, options: dict[str, Any]) -> None:
    theirs = importlib.import_module("deepspeed.runtime.lr_schedules")
    for mine, its in zip(rates(lr_schedules, kind, options), rates(theirs, kind, options), strict=True):
        assert mine == pytest.approx(its)


@pytest.mark.parametrize(("kind", "options"), SCHEDULES, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(SCHEDULES)])
def test_a_schedule_goes_on_from_its_state(kind: str, options: dict[str, Any]) -> None:
    first, second = optimizer(), optimizer()
    before, after = (getattr(lr_schedules, kind)(each, **options) for each in (first, second))
    for _ in range(7):
        before.step()
    after.load_state_dict(before.state_dict())
    assert after.get_last_lr() == before.get_last_lr()
    assert [group["lr"] for group in second.param_groups] == [group["lr"] for group in first.param_groups]


def test_a_list_of_rates_has_one_for_each_group() -> None:
    with refused(ConfigError, 3, 2, key="warmup_max_lr"):
        lr_schedules.WarmupLR(optimizer(), warmup_max_lr=[0.1, 0.2, 0.3])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_loss_scale_moves_as_deepspeeds(consecutive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 1)
    window, hysteresis = random.randint(1, 4), random.randint(1, 3)
    its = theirs.DynamicLossScaler(2.0**16, window, 1.0, hysteresis, consecutive, raise_error_at_min_scale=False)
    config = ScalerConfig(window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
    mine = DeepSpeedScaler(config)
    for _ in range(60):
        overflow = random.random() < 0.3
        its.update_scale(overflow)
        mine.update(overflow=overflow)
        assert mine.scale == its.cur_scale, (window, hysteresis)
        again = DeepSpeedScaler(config)
        again.restore(mine.state())
        mine = again


# ---- a user's own state


def there_and_back(value: Any) -> Any:
    import json

    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors, "client"))
    return decode(json.loads(text), lambda name: tensors[name])


def test_plain_values_come_back_as_they_were() -> None:
    state = {
        "epoch": 3,
        "loss": 0.1 + random.random(),
        "done": None,
        "shape": (1, (2, 3)),
        "names": {"a", "b"},
        3: "a number as a key",
        ("x", 1): [True, False],
        "raw": bytes(range(7)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "python": random.getstate(),
        "small": np.float32(0.5),
        "@": "a key that means something here",
    }
    back = there_and_back(state)
    assert back == state
    assert there_and_back(argparse.Namespace(lr=1e-3, tags=["a"])) == argparse.Namespace(lr=1e-3, tags=["a"])


def test_tensors_and_arrays_come_back_as_they_were() -> None:
    state = {"generator": torch.get_rng_state(), "many": [torch.randn(2, 3), torch.tensor(1.5)], "a": np.arange(6.0)}
    back = there_and_back(state)
    assert torch.equal(back["generator"], state["generator"])
    assert all(torch.equal(mine, its) for mine, its in zip(back["many"], state["many"], strict=True))
    assert np.array_equal(back["a"], state["a"])


def test_what_would_have_to_be_pickled_is_refused_by_its_place() -> None:
    with refused(CheckpointError, "client.a.b", "Linear"):
        encode({"a": {"b": nn.Linear(1, 1)}}, {}, "client")


# ---- whole weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.embedding(tokens))).square().mean()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Tied]:
    import plait.frontends.deepspeed as deepspeed

    model = Tied()
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.backward(engine(torch.tensor([1, 2])))
    engine.step()
    engine.save_checkpoint(tmp_path / "run")
    deepspeed.comm.destroy_process_group()
    return tmp_path, engine.module


def test_whole_weights_have_every_name(saved: tuple[Path, Tied]) -> None:
    folder, model = saved
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "run")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "run", exclude_frozen_parameters=True)
    assert trained.keys() == {"embedding.weight", "head.weight"}
    fresh = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), folder / "run", tag="global_step1")
    assert torch.equal(fresh.frozen.weight, model.frozen.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("safe", [False, True])
def test_whole_weights_are_written_in_pieces_with_an_index(saved: tuple[Path, Tied], safe: bool) -> None:
    folder, model = saved
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(folder / "run", folder / "one", safe_serialization=safe)
    convert(folder / "run", folder / "many", max_shard_size="64B", safe_serialization=safe)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    assert [path.name for path in (folder / "one").iterdir()] == [f"{stem}.{ending}"]
    names = sorted(path.name for path in (folder / "many").iterdir())
    assert f"{stem}.{ending}.index.json" in names
    assert len(names) == 4
    found: dict[str, Tensor] = {}
    for name in names[:-1]:
        found |= read(folder / "many" / name)
    assert all(torch.equal(found[name], model.state_dict()[name]) for name in found)
    assert "embedding.weight" in found


def test_the_script_takes_deepspeeds_words(saved: tuple[Path, Tied], capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = saved
    zero_to_fp32.main([str(folder / "run"), str(folder / "权重"), "-t", "global_step1", "--safe_serialization"])
    found = read(folder / "权重" / "model.safetensors")
    assert torch.equal(found["embedding.weight"], model.state_dict()["embedding.weight"])
    with pytest.raises(SystemExit, match="2"):
        zero_to_fp32.main([str(folder / "nowhere"), str(folder / "out")])
    assert capsys.readouterr().err.startswith("plait: ")


def test_the_script_lies_beside_the_checkpoints(saved: tuple[Path, Tied]) -> None:
    folder, model = saved
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", "whole"], cwd=folder / "run", check=True, timeout=120)
    found = read(folder / "run" / "whole" / "pytorch_model.bin")
    assert torch.equal(found["embedding.weight"], model.state_dict()["embedding.weight"])


def read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found: dict[str, Tensor] = torch.load(path)
    return found
