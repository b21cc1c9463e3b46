"""Beside the real MMEngine, where it is installed: the same losses step by step, and its classes are accepted here."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import plait.frontends.mmengine as ours

pytest.importorskip("mmengine", reason="needs mmengine")
pytestmark = pytest.mark.filterwarnings("ignore")


def classes(base_model: Any, base_metric: Any, base_hook: Any) -> tuple[Any, Any, Any]:
    """A model, a metric and a hook, made from whichever classes are given."""

    class Net(base_model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)  # its gradient would be rounding alone
            self.norm = nn.BatchNorm2d(6)
            self.fc = nn.Linear(6, 4)

        def forward(self, imgs: Tensor, labels: Tensor, mode: str) -> Any:
            x = self.fc(F.relu(self.norm(self.conv(imgs))).mean((2, 3)))
            return {"loss": F.cross_entropy(x, labels)} if mode == "loss" else (x, labels)

    class Accuracy(base_metric):  # type: ignore[misc]
        def process(self, data_batch: Any, data_samples: Any) -> None:
            score, gt = data_samples
            self.results.append({"size": len(gt), "correct": (score.argmax(1) == gt).sum().cpu()})

        def compute_metrics(self, results: Any) -> dict[str, float]:
            return {"accuracy": float(sum(r["correct"] for r in results)) / sum(r["size"] for r in results)}

    class Note(base_hook):  # type: ignore[misc]
        priority = "VERY_LOW"

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.rates: list[list[float]] = []
            self.metrics: list[float] = []

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            self.rates.append(runner.optim_wrapper.get_lr()["lr"])

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            self.losses.append(float(outputs["loss"].detach()))

        def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
            self.metrics.append(metrics["accuracy"])

    return Net, Accuracy, Note


def train(runner_class: Any, kinds: tuple[Any, Any, Any], work_dir: Path, options: dict[str, Any], seed: int) -> Any:
    net, accuracy, note = kinds
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(26, 3, 6, 6), torch.randint(0, 4, (26,)))
    noted = note()

    def loader(shuffle: bool) -> dict[str, Any]:
        sampler = {"type": "DefaultSampler", "shuffle": shuffle}
        return {"batch_size": 4, "dataset": data, "sampler": sampler, "collate_fn": {"type": "default_collate"}}

    runner = runner_class(
        model=net(),
        work_dir=str(work_dir),
        train_dataloader=loader(True),
        val_dataloader=loader(False),
        val_cfg={},
        val_evaluator={"type": accuracy},
        train_cfg={"by_epoch": True, "max_epochs": 3, "val_interval": 2},
        custom_hooks=[noted],
        default_hooks={"logger": {"type": "LoggerHook", "interval": 3}},
        randomness={"seed": seed},
        experiment_name=f"parity{random.getrandbits(64)}",
        **options,
    )
    runner.train()
    log = next(work_dir.glob("*/*.log")).read_text()
    return noted, [line for line in log.splitlines() if "Epoch(" in line]


WRAPPERS: dict[str, dict[str, Any]] = {
    "AdamW": {
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1},
            "paramwise_cfg": {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0},
            "clip_grad": {"max_norm": 0.5},
        },
        "param_scheduler": [
            {"type": "LinearLR", "begin": 0, "end": 5, "by_epoch": False},
            {"type": "CosineAnnealingLR", "T_max": 3, "convert_to_iter_based": True},
        ],
    },
    "SGD, accumulated": {
        "optim_wrapper": {
            "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True},
            "accumulative_counts": 4,
        },
        "param_scheduler": {"type": "MultiStepLR", "milestones": [1, 2], "gamma": 0.3},
    },
}


def form(line: str) -> str:
    """A log line without what differs between two runs: the moment, times, and the memory that a CPU has not there."""
    text = line.partition(" - INFO - ")[2]
    text = re.sub(r"  memory: \d+", "", text)
    return re.sub(r"(eta|time|data_time): [\d:.]+", r"\1: #", text).rstrip()


@pytest.mark.parametrize("case", WRAPPERS)
def test_training_is_step_by_step_that_of_mmengine(tmp_path: Path, case: str) -> None:
    from mmengine.evaluator import BaseMetric
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    seed = random.randint(0, 10_000)
    theirs = classes(BaseModel, BaseMetric, Hook)
    own = classes(ours.BaseModel, ours.BaseMetric, ours.Hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real, real_log = train(Runner, theirs, tmp_path / "real", WRAPPERS[case], seed)
        for name, kinds in (("own", own), ("mixed", theirs)):
            noted, log = train(ours.Runner, kinds, tmp_path / name, WRAPPERS[case], seed)
            assert noted.losses == pytest.approx(real.losses, rel=1e-4), (name, seed)
            assert noted.rates == [pytest.approx(rates, rel=1e-9) for rates in real.rates]
            assert noted.metrics == real.metrics
            numbers = re.compile(r"(loss|grad_norm): (\d+\.\d+)")
            for mine, other in zip(map(form, log), map(form, real_log), strict=True):
                assert numbers.sub(r"\1: #", mine) == numbers.sub(r"\1: #", other)
                found = [float(value) for _, value in numbers.findall(mine)]
                assert found == pytest.approx([float(value) for _, value in numbers.findall(other)], abs=2e-4)
