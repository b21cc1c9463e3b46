"""The Runner on several ranks does what it does on one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from plait import Runner
from plait.errors import PlaitError
from plait.trainer import Accuracy
from tests.multi.ranks import RankPool
from tests.multi.toys import Classifier, Outcome, Points, Seen, assert_close, fit, fit_with

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
}


def lengths() -> tuple[int, int]:
    """A training and a validation set whose last batches are, mostly, uneven."""
    found = random.randint(9, 30), random.randint(1, 21)
    print(f"{found[0]} training and {found[1]} validation samples")
    return found


def assert_same_run(parts: list[Outcome], expected: Outcome) -> None:
    for part in parts:
        assert part.losses == pytest.approx(expected.losses, rel=1e-5)
        assert part.rates == expected.rates
        assert part.metrics == parts[0].metrics  # every rank knows the same numbers
        for found, wanted in zip(part.metrics, expected.metrics, strict=True):
            assert {**found, "loss": 0.0} == {**wanted, "loss": 0.0}
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert_close(part, expected, tolerance=1e-5)
        assert (part.steps, part.epochs) == (expected.steps, expected.epochs)
    assert sorted(number for part in parts for number in part.numbers) == sorted(expected.numbers)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_and_validate_as_one_process_does(two_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    samples, validation = lengths()
    options = {"samples": samples, "validation": validation}
    common = {
        "batch": {"total": 4, "micro": random.choice([1, 2])},
        "train": {"max_epochs": 2, "clip_norm": 1.0},
        # Validation swaps the weights for their average and back: training must not notice.
        "hooks": [{"type": "ema", "decay": 0.6}],
    }
    expected = fit(0, 1, {**common, "work_dir": tmp_path / "one"}, **options)
    sections = {**common, "strategy": STRATEGIES[strategy], "work_dir": tmp_path / "two"}
    parts = two_ranks.run(fit_with, sections, options)
    assert expected.metrics[0]["distinct"] == expected.metrics[0]["samples"] == validation
    assert_same_run(parts, expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_four_ranks_train_and_validate_as_one_process_does(four_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    samples, validation = lengths()
    options = {"samples": samples, "validation": validation}
    common = {"batch": {"total": 8}, "train": {"max_epochs": 1}}
    expected = fit(0, 1, {**common, "work_dir": tmp_path / "one"}, **options)
    sections = {**common, "strategy": STRATEGIES[strategy], "work_dir": tmp_path / "four"}
    assert_same_run(four_ranks.run(fit_with, sections, options), expected)


def measure(rank: int, size: int, work_dir: str, strategy: Any, counts: list[int]) -> list[dict[str, float]]:
    results = []
    for count in counts:
        runner = Runner(
            model=Classifier(),
            val_data=Points(count, seed=count),
            metrics=[Accuracy(), Accuracy(top=2), Seen()],
            strategy=strategy,
            batch={"micro": 3},
            work_dir=work_dir,
            device="cpu",
            log={"console": "none", "sinks": []},
        )
        results.append(runner.validate())
    return results


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_every_sample_is_measured_exactly_once(
    request: pytest.FixtureRequest, tmp_path: Path, ranks: str, strategy: str
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    counts = sorted(random.sample(range(1, 40), 5))
    print(f"lengths {counts}")
    expected = measure(0, 1, str(tmp_path), "single", counts)
    for part in pool.run(measure, str(tmp_path), strategy, counts):
        for found, wanted, count in zip(part, expected, counts, strict=True):
            assert found["samples"] == found["distinct"] == count
            assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
            assert {**found, "loss": 0.0} == {**wanted, "loss": 0.0}


def test_val_batches_cover_the_same_samples_on_any_number_of_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    sections = {"batch": {"total": 4, "micro": 1}, "train": {"max_epochs": 1, "val_batches": 2}}
    expected = fit(0, 1, {**sections, "work_dir": tmp_path / "one"}, validation=20)
    for part in two_ranks.run(fit_with, {**sections, "work_dir": tmp_path / "two"}, {"validation": 20}):
        assert part.metrics[0]["samples"] == 8
        assert part.metrics[0]["loss"] == pytest.approx(expected.metrics[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("asking", [0, 1])
def test_one_rank_that_asks_to_stop_stops_all_and_all_know_why(
    two_ranks: RankPool, tmp_path: Path, asking: int
) -> None:
    options = {"stop_at": 5, "stop_rank": asking}
    parts = two_ranks.run(fit_with, {"work_dir": tmp_path, "strategy": "zero3"}, options)
    assert [(part.steps, part.reason) for part in parts] == [(5, "the test said so")] * 2
    assert (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").exists()


def fail(rank: int, size: int, sections: dict[str, Any]) -> str:
    try:
        fit(rank, size, sections)
    except PlaitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_what_one_rank_finds_wrong_is_raised_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    """Nobody waits for a rank that is gone."""
    (tmp_path / "file").write_text("")
    fit(0, 1, {"work_dir": tmp_path / "held"})
    wrong: dict[str, dict[str, Any]] = {
        "no complete checkpoint": {"work_dir": tmp_path / "a", "checkpoint": {"resume": str(tmp_path / "nowhere")}},
        "already holds a run": {"work_dir": tmp_path / "held"},
        "cannot be written to": {"work_dir": tmp_path / "file" / "inside"},
    }
    for words, sections in wrong.items():
        first, second = two_ranks.run(fail, sections)
        assert words in first
        assert second == first


def read_text(rank: int, size: int, path: str, cache: str) -> tuple[int, str]:
    data = {"type": "text", "path": path, "vocab_size": 270, "seq_len": 8, "cache": cache}
    model = {"type": "gpt", "vocab_size": 300, "dim": 8, "layers": 1, "heads": 1, "seq_len": 8}
    sections = {"log": {"console": "none", "sinks": []}, "work_dir": cache, "device": "cpu", "batch": {"total": 4}}
    runner = Runner(model=model, data=data, train={"max_steps": 2}, **sections)
    try:
        runner.train()
    except PlaitError as error:
        return 0, f"{type(error).__name__}: {error}"
    return runner.step, runner.loader.dataset.tokens.meta.tokenizer


def test_one_rank_prepares_text_for_all(two_ranks: RankPool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{random.random()} and more\n" for _ in range(50)))
    first, second = two_ranks.run(read_text, str(text), str(tmp_path / "cache"))
    assert first == second
    assert first[0] == 2
    first, second = two_ranks.run(read_text, str(tmp_path / "missing.txt"), str(tmp_path / "other"))
    assert first == second
    assert "DataError" in first[1]
