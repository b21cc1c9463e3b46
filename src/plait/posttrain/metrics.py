"""Measures of pairs, and the picture of how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.runner.hooks import Hook
from plait.runner.metrics import Metric

if TYPE_CHECKING:
    from plait.runner import Runner

BINS = 10


class PairScore(NamedTuple):
    """What a model gave both answers of a pair."""

    chosen: float
    rejected: float


class Preferences(Metric):
    """How often, and by how much, the chosen answer is ahead."""

    def __init__(self) -> None:
        self.scores: list[PairScore] = []
        """Of the pairs that were measured last, on every rank."""

    def measure(self, outputs: Any, inputs: Any) -> Sequence[tuple[float, float]]:
        """The two numbers of each pair."""
        return list(zip(outputs["chosen"].tolist(), outputs["rejected"].tolist(), strict=True))

    def summarize(self, records: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        """Accuracy, mean margin, means of both, and the error of calibration."""
        self.scores = scores = [PairScore(*record) for record in records]
        if not scores:
            return dict.fromkeys(("accuracy", "margin", "chosen", "rejected", "calibration_error"), math.nan)
        count = len(scores)
        # A pair that is equal tells nothing: half right.
        right = sum((s.chosen > s.rejected) + 0.5 * (s.chosen == s.rejected) for s in scores)
        return {
            "accuracy": right / count,
            "margin": sum(s.chosen - s.rejected for s in scores) / count,
            "chosen": sum(s.chosen for s in scores) / count,
            "rejected": sum(s.rejected for s in scores) / count,
            "calibration_error": sum(abs(bin.said - bin.found) * bin.count for bin in calibration(scores)) / count,
        }


class Bin(NamedTuple):
    """Pairs about which a model is about equally sure."""

    said: float
    """Mean probability that the one it prefers is the better one."""
    found: float
    """How often it is."""
    count: int  # type: ignore[assignment]  # hides tuple.count, on purpose


def calibration(scores: Sequence[PairScore], bins: int = BINS) -> list[Bin]:
    """How sure a model is, from even to certain, beside how often it is right; bins without a pair are left out."""
    found: dict[int, list[tuple[float, float]]] = {}
    for score in scores:
        margin = score.chosen - score.rejected
        sure = 1.0 / (1.0 + math.exp(-min(abs(margin), 500.0)))
        place = min(int((sure - 0.5) * 2 * bins), bins - 1)
        found.setdefault(place, []).append((sure, 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0))
    return [
        Bin(sum(sure for sure, _ in pairs) / len(pairs), sum(right for _, right in pairs) / len(pairs), len(pairs))
        for _, pairs in sorted(found.items())
    ]


def draw_calibration(scores: Sequence[PairScore], path: Path) -> None:
    """A PNG: how sure the model is against how often it is right, and how margins are spread."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no screen

    bins = calibration(scores)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0.5, 1.0], [0.5, 1.0], color="0.7", linestyle="--")
    left.plot([bin.said for bin in bins], [bin.found for bin in bins], marker="o")
    left.set(xlabel="how sure the model is", ylabel="how often it is right", xlim=(0.48, 1.02), ylim=(-0.05, 1.05))
    right.hist([score.chosen - score.rejected for score in scores], bins=30)
    right.axvline(0.0, color="0.4", linestyle="--")
    right.set(xlabel="chosen − rejected", ylabel="pairs")
    right.yaxis.get_major_locator().set_params(integer=True)  # there are no half pairs
    figure.suptitle(f"{len(scores)} pairs")
    figure.savefig(path, dpi=120)


class CalibrationPlot(Hook):
    """Draws `calibration.png` into the run's folder at the end, of the last validation."""

    name = "calibration"
    priority = 60

    def __init__(self, metric: Preferences) -> None:
        self._metric = metric

    def after_run(self, runner: Runner) -> None:
        """The main rank draws; all ranks have all pairs."""
        if runner.world.is_main and self._metric.scores:
            draw_calibration(self._metric.scores, Path(runner.config.work_dir) / "calibration.png")
