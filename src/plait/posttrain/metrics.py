"""Metrics of pairs (a chosen and a rejected answer), and an image of the model's calibration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.monitor import Scale, axes, image
from plait.trainer import Hook, Metric

if TYPE_CHECKING:
    from plait.trainer import Runner

BINS = 10
MARGIN_BINS = 30


class PairScore(NamedTuple):
    """The rewards of both answers of a pair; for DPO, the implicit ones."""

    chosen: float
    rejected: float


class Preferences(Metric):
    """How often, and by how much, the reward of the chosen answer is the higher one."""

    def __init__(self) -> None:
        self.scores: list[PairScore] = []
        """The scores of the last validation, of all ranks."""

    def measure(self, outputs: Any, inputs: Any) -> Sequence[tuple[float, float]]:
        """Return the rewards (chosen, rejected) of each pair of a micro-batch."""
        return list(zip(outputs["chosen"].tolist(), outputs["rejected"].tolist(), strict=True))

    def summarize(self, records: Sequence[tuple[float, float]]) -> Mapping[str, float]:
        """Return the accuracy, the means of margin and rewards, and the calibration error; NaN without pairs."""
        self.scores = scores = [PairScore(*record) for record in records]
        if not scores:
            return dict.fromkeys(("accuracy", "margin", "chosen", "rejected", "calibration_error"), math.nan)
        count = len(scores)
        # A pair with equal rewards counts as half right.
        right = sum((s.chosen > s.rejected) + 0.5 * (s.chosen == s.rejected) for s in scores)
        return {
            "accuracy": right / count,
            "margin": sum(s.chosen - s.rejected for s in scores) / count,
            "chosen": sum(s.chosen for s in scores) / count,
            "rejected": sum(s.rejected for s in scores) / count,
            "calibration_error": sum(abs(bin.predicted - bin.observed) * bin.count for bin in calibration(scores))
            / count,
        }


class Bin(NamedTuple):
    """Pairs for which the model's confidence is about equal."""

    predicted: float
    """Mean probability that the model gives to the answer it prefers."""
    observed: float
    """The share of pairs in which that answer is the chosen one."""
    count: int  # type: ignore[assignment]  # hides tuple.count, on purpose


def calibration(scores: Sequence[PairScore], bins: int = BINS) -> list[Bin]:
    """Return pairs grouped by the model's confidence, from 0.5 to 1, with how often it is right; no empty bins."""
    by_bin: dict[int, list[tuple[float, float]]] = {}
    for score in scores:
        margin = score.chosen - score.rejected
        sure = 1.0 / (1.0 + math.exp(-min(abs(margin), 500.0)))
        index = min(int((sure - 0.5) * 2 * bins), bins - 1)
        by_bin.setdefault(index, []).append((sure, 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0))
    return [
        Bin(sum(sure for sure, _ in pairs) / len(pairs), sum(right for _, right in pairs) / len(pairs), len(pairs))
        for _, pairs in sorted(by_bin.items())
    ]


def draw_calibration(scores: Sequence[PairScore]) -> str:
    """Return an SVG image: the accuracy by confidence of the model, and a histogram of the margins."""
    bins, margins = calibration(scores), [score.chosen - score.rejected for score in scores]
    low, high = min(margins), max(margins)
    if low == high:  # one bar, around its value
        low, high = low - 0.5, high + 0.5
    width = (high - low) / (MARGIN_BINS if len(margins) > 1 else 1)
    counts = Counter(min(int((margin - low) / width), MARGIN_BINS - 1) for margin in margins)
    bottom, top = 262.0, 40.0
    sure, correct = Scale(0.48, 1.02, 56, 380), Scale(-0.05, 1.05, bottom, top)
    margin_axis = Scale(low - width, high + width, 466, 790)
    pairs_axis = Scale(0, max(counts.values()) * 1.08, bottom, top)
    curve = " ".join(f"{sure(bin_.predicted):.1f},{correct(bin_.observed):.1f}" for bin_ in bins)
    shapes = [
        *axes(sure, correct, "how sure the model is", "how often it is right"),
        *axes(margin_axis, pairs_axis, "chosen − rejected", "pairs", whole=True),
        f'<line class="guide" x1="{sure(0.5):.1f}" y1="{correct(0.5):.1f}" x2="{sure(1):.1f}" y2="{correct(1):.1f}"/>',
        f'<polyline class="curve" points="{curve}"/>',
        *(f'<circle cx="{sure(bin_.predicted):.1f}" cy="{correct(bin_.observed):.1f}" r="3.5"/>' for bin_ in bins),
    ]
    for bar, count in sorted(counts.items()):
        start, end, level = margin_axis(low + bar * width), margin_axis(low + (bar + 1) * width), pairs_axis(count)
        size = f'width="{end - start:.1f}" height="{bottom - level:.1f}"'
        shapes.append(f'<rect x="{start:.1f}" y="{level:.1f}" {size}/>')
    if margin_axis.low < 0 < margin_axis.high:
        zero = f"{margin_axis(0):.1f}"
        shapes.append(f'<line class="guide" x1="{zero}" x2="{zero}" y1="{top}" y2="{bottom}"/>')
    heading = "1 pair" if len(scores) == 1 else f"{len(scores):,} pairs"
    title = f'<text class="title" x="410" y="22" text-anchor="middle">{heading}</text>'
    return image(820, 310, [title, *shapes], label="how sure the model is, and how often it is right")


class CalibrationPlot(Hook):
    """Writes `calibration.svg`, of the last validation, into the run's folder at the end."""

    name = "calibration"
    priority = 60

    def __init__(self, metric: Preferences) -> None:
        self._metric = metric

    def after_run(self, runner: Runner) -> None:
        """Write the image on the main rank; every rank has the scores of all pairs."""
        if runner.world.is_main and self._metric.scores:
            path = Path(runner.config.work_dir) / "calibration.svg"
            path.write_text(draw_calibration(self._metric.scores), encoding="utf-8")
