"""What came of each step, in a few figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.monitor import History, clock, events_path, history, read_events, write_report
from plait.posttrain.pipeline.chain import WRITES, Step
from plait.posttrain.pipeline.folder import State, state_of
from plait.spec import EventKind

_SHOWN = {
    "reward": ("accuracy", "margin"),
    "dpo": ("accuracy", "margin"),
    "ppo": ("reward", "accuracy"),
    "grpo": ("reward", "accuracy"),
}
"""Of held-out examples, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the table."""

    step: Step
    state: State
    figures: str
    seconds: float

    @property
    def time(self) -> str:
        """How long it took, over all attempts."""
        return clock(self.seconds)


def outcome_of(step: Step) -> Outcome:
    """What a step has come to so far."""
    path = events_path(step.folder, 0)
    story = history(read_events([path]) if path.is_file() else [])
    seconds = sum(segment.seconds for segment in story.segments)
    return Outcome(step, state_of(step), ", ".join(_figures(step.phase, story)), seconds)


def draw_report(step: Step) -> Path | None:
    """Draw what a step has come to as a page in its folder; None where nothing was recorded."""
    records = sorted(step.folder.glob("events-rank*.jsonl"), key=lambda path: path != events_path(step.folder, 0))
    if not records:
        return None
    page = step.folder / "report.html"
    write_report(records, page, f"{step.number}. {step.phase}", folder=step.folder)
    return page


def _figures(phase: str, story: History) -> Iterator[str]:
    for key in _SHOWN.get(phase, ()):
        if found := story.values(key, EventKind.VALIDATE) or story.values(key):
            first, last = found[0][1], found[-1][1]
            yield f"{key} {last:.3f}" if len(found) == 1 else f"{key} {first:.3f} → {last:.3f}"
    if phase in ("ppo", "grpo") and (kl := story.values("kl")):
        yield f"kl {kl[-1][1]:.3f}"
    if phase not in _SHOWN and (losses := story.values("loss", EventKind.VALIDATE) or story.values("loss")):
        loss = losses[-1][1]
        yield f"loss {loss:.3f}, perplexity {math.exp(min(loss, 700.0)):.4g}"


def next_commands(steps: Sequence[Step]) -> list[str]:
    """What to do with the result: talk to it, and look at it beside what it began as."""
    written = [step for step in steps if step.phase in WRITES and state_of(step) is State.COMPLETE]
    if not written:
        return []
    last = written[-1]
    found = [f"plait chat --path {last.folder}"]
    before = next((step for step in last.after if step.phase in WRITES), None)
    if before is not None:
        page = last.folder.parent / "side_by_side.html"
        found.append(f"plait generate {last.folder} --against {before.folder} --held-out 20 --html {page}")
    return found
