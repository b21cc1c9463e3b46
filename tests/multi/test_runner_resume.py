"""Promise 2: a checkpoint saved under any layout is resumed under any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from plait import Runner
from tests.multi.ranks import RankPool
from tests.multi.toys import Classifier, Outcome, Points, Trace, assert_close, fit, fit_with

SAMPLES = 22
EMA = {"type": "ema", "decay": 0.8}


def numbers(parts: list[Outcome]) -> list[int]:
    return [number for part in parts for number in part.numbers]


def assert_one_run(first: list[Outcome], second: list[Outcome], whole: Outcome, *, tolerance: float) -> None:
    """The two parts together did what the whole did, sample by sample."""
    assert sorted(numbers(first) + numbers(second)) == sorted(whole.numbers)
    for part in second:
        assert part.losses == pytest.approx(whole.losses[first[0].steps :], rel=tolerance)
        assert part.rates == whole.rates[first[0].steps :]
        assert (part.steps, part.epochs) == (whole.steps, whole.epochs)
        assert_close(part, whole, tolerance=tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("optim", ["AdamW", "Lamb"])
def test_on_the_same_ranks_nothing_differs_by_a_bit(
    two_ranks: RankPool, tmp_path: Path, strategy: str, optim: str
) -> None:
    sections: dict[str, Any] = {"strategy": strategy, "optim": {"type": optim, "lr": 0.01}, "hooks": [EMA]}
    options = {"dropout": 0.3, "samples": SAMPLES}
    stop = random.randint(1, 11)
    print(f"stop at {stop}")
    whole = two_ranks.run(fit_with, {**sections, "work_dir": tmp_path / "whole"}, options)
    first = two_ranks.run(fit_with, {**sections, "work_dir": tmp_path / "parts"}, {**options, "stop_at": stop})
    resume = {**sections, "work_dir": tmp_path / "parts", "checkpoint": {"resume": "auto"}}
    second = two_ranks.run(fit_with, resume, options)
    assert first[0].steps == stop
    for early, late, expected in zip(first, second, whole, strict=True):
        assert early.losses + late.losses == expected.losses
        assert early.numbers + late.numbers == expected.numbers
        assert_close(late, expected, tolerance=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [("zero3", "ddp"), ("ddp", "zero2"), ("zero1", "zero3"), ("zero3", "one"), ("one", "zero3"), ("zero3", "four")],
)
def test_on_another_layout_the_run_goes_on_as_if_nothing_had_happened(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, before: str, after: str
) -> None:
    def run(layout: str, sections: dict[str, Any], **options: Any) -> list[Outcome]:
        sections = {"hooks": [EMA], **sections}
        if layout == "one":
            return [fit(0, 1, sections, **options)]
        pool = four_ranks if layout == "four" else two_ranks
        strategy = "zero3" if layout == "four" else layout
        return pool.run(fit_with, {**sections, "strategy": strategy}, options)

    stop = random.randint(1, 11)
    print(f"stop at {stop}")
    whole = run("one", {"work_dir": tmp_path / "whole"}, samples=SAMPLES)[0]
    first = run(before, {"work_dir": tmp_path / "parts"}, samples=SAMPLES, stop_at=stop)
    resume = {"work_dir": tmp_path / "parts", "checkpoint": {"resume": "auto"}}
    second = run(after, resume, samples=SAMPLES)
    assert_one_run(first, second, whole, tolerance=1e-5)
    assert any(name.startswith("hook.ema.") for name in second[0].tensors)
    assert any(name.startswith("optim.") for name in second[0].tensors)


def test_the_loss_scale_of_fp16_travels_too(two_ranks: RankPool, tmp_path: Path) -> None:
    scaler = {"initial_power": 24, "window": 3, "hysteresis": 1}
    sections: dict[str, Any] = {
        "precision": {"compute": "fp16", "scaler": scaler},
        "train": {"max_steps": 16, "guard": {"max_skips": 30}},
        "strategy": "zero3",
    }
    first = two_ranks.run(fit_with, {**sections, "work_dir": tmp_path}, {"stop_at": 14})
    resume = {**sections, "work_dir": tmp_path, "train": {"max_steps": 14}, "checkpoint": {"resume": "auto"}}
    second = fit(0, 1, {**resume, "strategy": {}, "train": {**sections["train"], "max_steps": 14}})
    assert second.losses == []  # it was at its end already
    assert second.extra == first[0].extra
    assert any(first[0].skipped)
    assert second.extra["engine"]["scaler"]["scale"] < 2.0**24


@pytest.mark.parametrize("optim", ["AdamW", "Lamb", "Adafactor", "AdamW8bit"])
@pytest.mark.parametrize("master", [True, False])
def test_the_format_of_the_weights_may_change_too(
    two_ranks: RankPool, tmp_path: Path, optim: str, master: bool
) -> None:
    def sections(master: bool) -> dict[str, Any]:
        precision = {"compute": "bf16", "master": master}
        return {"precision": precision, "optim": {"type": optim, "lr": 0.01}, "hooks": [EMA], "work_dir": tmp_path}

    first = two_ranks.run(fit_with, {**sections(master), "strategy": "zero3"}, {"stop_at": 5})
    second = fit(0, 1, {**sections(not master), "checkpoint": {"resume": "auto"}, "train": {"max_steps": 5}})
    for name, tensor in first[0].tensors.items():
        assert torch.equal(second.tensors[name].bfloat16(), tensor.bfloat16()), name
    third = fit(0, 1, {**sections(not master), "checkpoint": {"resume": "auto"}})
    weight = next(name for name in third.tensors if name.startswith("model."))
    assert {third.tensors[name].dtype for name in third.tensors if name.endswith(("avg", "avg_sq", "var"))} <= {
        third.tensors[weight].dtype
    }


def test_the_average_is_restored_whole_under_another_layout(two_ranks: RankPool, tmp_path: Path) -> None:
    sections = {"hooks": [EMA], "train": {"max_epochs": 1}}
    saved = two_ranks.run(fit_with, {**sections, "strategy": "zero3", "work_dir": tmp_path}, {})[0]
    loaded = fit(0, 1, {**sections, "work_dir": tmp_path, "checkpoint": {"resume": "auto"}})
    names = [name for name in saved.tensors if name.startswith("hook.ema.")]
    assert len(names) == 4
    for name in names:
        assert torch.equal(saved.tensors[name], loaded.tensors[name])
        assert not torch.equal(saved.tensors[name], saved.tensors[name.replace("hook.ema", "model")])


def count_samples(rank: int, size: int, run: str, workers: int, stop: int) -> list[tuple[int, int]]:
    """Train on, from wherever the run is, with so many worker processes a rank; epoch and number of each sample."""
    loader = DataLoader(Points(SAMPLES), batch_size=4 // size, shuffle=True, num_workers=workers)
    trace = Trace()
    runner = Runner(
        model=Classifier(),
        data=loader,
        strategy="ddp" if size == 1 else "zero3",
        train={"max_epochs": 2, "stop_after": stop},
        checkpoint={"resume": "auto"},
        hooks=[trace],
        work_dir=run,
        device="cpu",
        log={"console": "none", "sinks": []},
    )
    with runner:
        runner.train()
    return list(zip(trace.epochs, trace.numbers, strict=True))


def test_no_sample_is_lost_or_repeated_when_ranks_and_workers_change(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    run, seen = str(tmp_path), []
    stops = sorted(random.sample(range(1, 12), 3))
    print(f"stops at {stops}")
    seen += [sample for part in two_ranks.run(count_samples, run, 1, stops[0]) for sample in part]
    seen += count_samples(0, 1, run, 2, stops[1])
    seen += [sample for part in four_ranks.run(count_samples, run, 0, stops[2]) for sample in part]
    seen += count_samples(0, 1, run, 0, 12)
    assert sorted(seen) == [(epoch, number) for epoch in range(2) for number in range(SAMPLES)]
