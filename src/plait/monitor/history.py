"""The history of a run, built from its events: segments and curves, for reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from plait.monitor.events import Event, EventKind
from plait.monitor.format import as_number, scalars

Point = tuple[int, float]


@dataclass(slots=True)
class Segment:
    """The events between one start (or resume) and the next."""

    label: str
    start: int
    """The step it began at: 0, or that of the checkpoint it resumed."""
    opening: Event | None = None
    events: list[Event] = field(default_factory=list)
    _numbers: dict[EventKind, list[tuple[Event, dict[str, float]]]] = field(default_factory=dict)

    def curve(self, key: str, event_kind: EventKind = EventKind.TRAIN) -> list[Point]:
        """Return (step, value) of one measurement, non-finite values included."""
        return [(event.step, values[key]) for event, values in self._measured(event_kind) if key in values]

    def keys(self, event_kind: EventKind) -> list[str]:
        """Return the names of all measurements of that kind, in order of first appearance."""
        return list(dict.fromkeys(key for _, values in self._measured(event_kind) for key in values))

    def _measured(self, event_kind: EventKind) -> list[tuple[Event, dict[str, float]]]:
        if event_kind not in self._numbers:
            self._numbers[event_kind] = [(event, scalars(event)) for event in self.events if event.kind is event_kind]
        return self._numbers[event_kind]

    @property
    def ending(self) -> Event | None:
        """Its RUN_END, or None where it was killed or still runs."""
        return next((event for event in self.events if event.kind is EventKind.RUN_END), None)

    @property
    def last_step(self) -> int:
        """The last step that has an event."""
        return max((event.step for event in self.events), default=self.start)

    @property
    def seconds(self) -> float:
        """Its duration: that in its RUN_END, else the time from its first to its last event."""
        reported = as_number(self.ending.data.get("seconds")) if self.ending else None
        if reported is not None:
            return reported
        times = [event.time for event in (self.opening, *self.events) if event is not None]
        return max(times) - min(times) if times else 0.0


@dataclass(frozen=True, slots=True)
class History:
    """All segments of a run, and the messages of all ranks, in order of time."""

    segments: tuple[Segment, ...]
    messages: tuple[Event, ...]

    @property
    def domain(self) -> tuple[int, int]:
        """The first and the last step of the run."""
        starts = [segment.start for segment in self.segments]
        return min(starts, default=0), max((segment.last_step for segment in self.segments), default=0)

    def of_kind(self, event_kind: EventKind) -> list[Event]:
        """Return every event of that kind, over all segments."""
        return [event for segment in self.segments for event in segment.events if event.kind is event_kind]

    def values(self, key: str, event_kind: EventKind = EventKind.TRAIN) -> list[Point]:
        """Return one measurement over all segments: finite values, except of steps that a later segment repeated."""
        points: list[Point] = []
        for index, segment in enumerate(self.segments):
            until = self.superseded_after(index)
            points += [(step, v) for step, v in segment.curve(key, event_kind) if math.isfinite(v) and step <= until]
        return points

    def metric_keys(self, event_kind: EventKind) -> list[str]:
        """Return the names of all measurements of that kind, over all segments."""
        return list(dict.fromkeys(key for segment in self.segments for key in segment.keys(event_kind)))

    def superseded_after(self, index: int) -> float:
        """Return the first step that a later segment was resumed from, after which steps were repeated; or infinity."""
        later = self.segments[index + 1 :]
        return min((segment.start for segment in later), default=math.inf)


def history(events: Iterable[Event]) -> History:
    """Return the history of events, with a new segment at every RUN_START."""
    segments: list[Segment] = []
    messages: list[Event] = []
    for event in events:
        if event.kind is EventKind.MESSAGE:
            messages.append(event)
        elif event.kind is EventKind.RUN_START:
            label = str(event.data.get("segment") or f"run {len(segments) + 1}")
            segments.append(Segment(label, event.step, event))
        else:
            if not segments:
                segments.append(Segment("run 1", 0))
            segments[-1].events.append(event)
    return History(tuple(segments), tuple(sorted(messages, key=lambda event: event.time)))
