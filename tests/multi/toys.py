"""A small classification task, and one function that trains it in any way a test asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from plait.engine import StepResult
from plait.models import LossTerm
from plait.trainer import Accuracy, Hook, Metric, Runner
from tests.multi.parity import full_tensors

WIDTH, CLASSES = 8, 4


class Points(Dataset[dict[str, Tensor]]):
    """`count` random points, each with a label and its own number."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.label = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index], "number": torch.tensor(index)}


class Classifier(nn.Module):
    """Two layers. The loss is summed over samples of unequal weight, so that a wrong mean shows."""

    def __init__(self, dropout: float = 0.0, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(WIDTH, 16)
        self.out = nn.Linear(16, CLASSES)
        self.dropout = dropout

    def forward(self, x: Tensor, label: Tensor, number: Tensor) -> dict[str, Any]:
        hidden = F.dropout(self.hidden(x).relu(), self.dropout, self.training)
        logits = self.out(hidden)
        weight = 1.0 + number % 3
        loss = (F.cross_entropy(logits.float(), label, reduction="none") * weight).sum()
        return {"loss": LossTerm(loss, weight.sum()), "logits": logits}


class Seen(Metric):
    """The number of every sample that was measured."""

    def measure(self, outputs: Any, inputs: Any) -> Sequence[int]:
        return [int(number) for number in inputs["number"].tolist()]

    def summarize(self, records: Sequence[int]) -> Mapping[str, float]:
        return {"samples": float(len(records)), "distinct": float(len(set(records)))}


class Trace(Hook):
    """What every step did, and which samples this rank trained on."""

    name = "trace"
    priority = 0

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.skipped: list[bool] = []
        self.numbers: list[int] = []
        self.epochs: list[int] = []
        """That of each of the numbers."""
        self.metrics: list[dict[str, float]] = []

    def before_run(self, runner: Runner) -> None:
        step = runner.engine.train_step

        def train_step(micro_batches: Sequence[Any]) -> StepResult:
            for batch in micro_batches:
                if batch.samples and "number" in batch.inputs:
                    self.numbers += batch.inputs["number"].tolist()
                    self.epochs += [runner.epoch] * len(batch.inputs["number"])
            return step(micro_batches)

        runner.engine.train_step = train_step  # type: ignore[method-assign]

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.losses.append(result.loss)
        self.rates.append(result.lr)
        self.skipped.append(result.skipped)

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        self.metrics.append(dict(metrics))


class StopAt(Hook):
    """Asks to stop during one step, on one rank alone."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step = step
        self.rank = rank

    def before_step(self, runner: Runner) -> None:
        if runner.step == self.step - 1 and runner.world.rank == self.rank:
            runner.stop("the test said so")


@dataclass
class Outcome:
    """What a run did, as plain values."""

    losses: list[float]
    rates: list[float]
    skipped: list[bool]
    numbers: list[int]
    metrics: list[dict[str, float]]
    tensors: dict[str, Tensor]
    steps: int
    epochs: int
    reason: str | None
    extra: dict[str, Any] = field(default_factory=dict)


def fit(
    rank: int,
    size: int,
    sections: dict[str, Any],
    *,
    samples: int = 22,
    validation: int = 0,
    dropout: float = 0.0,
    stop_at: int | None = None,
    stop_rank: int = 0,
) -> Outcome:
    """Train the classifier as `sections` say, by default two epochs in batches of four."""
    settings: dict[str, Any] = {
        "seed": 3,
        "device": "cpu",
        "optim": {"type": "AdamW", "lr": 1e-2, "eps": 0.1},
        "schedule": {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.1},
        "train": {"by_epoch": True, "max_epochs": 2},
        "batch": {"total": 4},
        "log": {"console": "none", "sinks": []},
    }
    settings.update(sections)
    hooks = list(settings.pop("hooks", []))
    trace = Trace()
    hooks.append(trace)
    if stop_at is not None:
        hooks.append(StopAt(stop_at, stop_rank))
    runner = Runner(
        model=Classifier(dropout),
        data=Points(samples),
        val_data=Points(validation, seed=1) if validation else None,
        metrics=[Accuracy(), Seen()],
        hooks=hooks,
        **settings,
    )
    with runner:
        runner.train()
        return Outcome(
            trace.losses,
            trace.rates,
            trace.skipped,
            trace.numbers,
            trace.metrics,
            whole_tensors(runner),
            runner.step,
            runner.epoch,
            runner.stop_reason,
            {"engine": runner.engine.state()},
        )


def fit_with(rank: int, size: int, sections: dict[str, Any], options: dict[str, Any]) -> Outcome:
    """`fit` for `RankPool.run`, which passes arguments by position."""
    return fit(rank, size, sections, **options)


def whole_tensors(runner: Runner) -> dict[str, Tensor]:
    """Weights and optimizer state, gathered; with those of the hooks."""
    tensors = runner.engine.state_tensors()
    for name, hook in runner.hooks.named().items():
        tensors.update({f"hook.{name}.{key}": tensor for key, tensor in hook.tensors(runner).items()})
    return full_tensors(tensors)


def assert_close(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Weights and optimizer state of two runs agree; with a tolerance of 0, bit by bit."""
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        if tolerance == 0:
            assert torch.equal(found.tensors[name], tensor), name
        else:
            difference = float((found.tensors[name] - tensor).abs().max())
            scale = max(float(tensor.abs().max()), 1e-3)
            assert difference <= tolerance * scale, f"{name} differs by {difference:.2e} of {scale:.2e}"
