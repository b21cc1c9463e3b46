"""What learning from preferences and rewards is watched by: which charts there are, and the first figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.monitor.history import History
from plait.monitor.units import decimal
from plait.spec import EventKind


def percent(value: float) -> str:
    """A share in percent."""
    return f"{value:.1%}"


@dataclass(frozen=True, slots=True)
class Measure:
    """One measurement of answers, by the name that it has in events."""

    key: str
    title: str
    note: str
    form: Callable[[float], str] = decimal
    signed: bool = False
    """It may be negative, so zero is no ground to stand on."""


MEASURES = (
    Measure("reward", "Reward", "mean over answers", signed=True),
    Measure("accuracy", "Accuracy", "share", percent),
    Measure("kl", "KL", "from the reference"),
    Measure("beta", "Weight of the KL", "beta"),
    Measure("length", "Length", "tokens an answer"),
    Measure("entropy", "Entropy", "nats a token"),
    Measure("policy_loss", "Policy loss", "", signed=True),
    Measure("value_loss", "Value loss", ""),
    Measure("clip_fraction", "Clipped", "share of tokens", percent),
    Measure("reward_std", "Spread of rewards", "standard deviation"),
    Measure("margin", "Margin", "chosen less rejected", signed=True),
    Measure("chosen", "Chosen answers", "mean score", signed=True),
    Measure("rejected", "Rejected answers", "mean score", signed=True),
    Measure("calibration_error", "Calibration error", "", percent),
    Measure("zero_std_groups", "Groups with equal rewards", "share of prompts", percent),
    Measure("skipped_answers", "Answers left out", "", lambda value: f"{value:g}"),
)
"""In the order of their charts."""


def learned(story: History) -> Iterator[tuple[str, str, str]]:
    """The figures to open a report with: what held-out prompts gave last, and what they gave first."""
    for measure in MEASURES[:2]:
        held = story.values(measure.key, EventKind.VALIDATE)
        found = held or story.values(measure.key)
        if found and story.values("reward"):
            name = f"Held-out {measure.title.lower()}" if held else measure.title
            (first_step, first), (_, last) = found[0], found[-1]
            yield name, measure.form(last), f"{measure.form(first)} at step {first_step:,}"
