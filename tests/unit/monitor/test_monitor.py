from __future__ import annotations

import io

import pytest
from tests.refusals import missing

from plait.monitor.console import ConsoleSink
from plait.monitor.events import Event, EventKind
from plait.monitor.sinks import Monitor


class Kept:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticks: list[int] = []
        self.closed = 0

    def write(self, event: Event) -> None:
        self.events.append(event)

    def tick(self, step: int) -> None:
        self.ticks.append(step)

    def close(self) -> None:
        self.closed += 1


class Broken:
    """Fails from the second event on, and again when it is closed."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, event: Event) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError("No space left on device")

    def close(self) -> None:
        raise OSError("still no space")


def train(step: int) -> Event:
    return Event(EventKind.TRAIN, step, 1, {"loss": 1.0})


def test_every_sink_sees_every_event_in_order() -> None:
    sinks = Kept(), Kept()
    with Monitor(sinks) as monitor:
        for step in range(3):
            monitor.emit(train(step))
            monitor.tick(step)
    for sink in sinks:
        assert [event.step for event in sink.events] == [0, 1, 2]
        assert sink.ticks == [0, 1, 2]
        assert sink.closed == 1


def test_a_broken_sink_is_left_out_with_one_warning() -> None:
    broken, kept = Broken(), Kept()
    stream = io.StringIO()
    with Monitor([broken, ConsoleSink("plain", stream), kept]) as monitor:
        for step in range(5):
            monitor.emit(train(step))
        assert broken not in monitor.sinks
    assert broken.calls == 2
    assert [event.step for event in kept.events if event.kind is EventKind.TRAIN] == [0, 1, 2, 3, 4]
    (warning,) = [event for event in kept.events if event.kind is EventKind.MESSAGE]
    assert (warning.data["level"], warning.step) == ("warning", 1)
    assert stream.getvalue().count("Broken") == 1
    assert stream.getvalue().count("OSError: No space") == 1


def test_without_a_console_the_warning_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor([Broken()]) as monitor:
        for step in range(5):
            monitor.emit(train(step))
    captured = capsys.readouterr()
    assert captured.err.count("No space left on device") == 1
    assert captured.out == ""


def test_several_broken_sinks_cannot_stop_the_run() -> None:
    kept = Kept()
    with Monitor([Broken(), Broken(), kept, Broken()]) as monitor:
        for step in range(4):
            monitor.emit(train(step))
    assert sum(event.kind is EventKind.TRAIN for event in kept.events) == 4
    assert sum(event.kind is EventKind.MESSAGE for event in kept.events) == 3


def test_a_sink_that_cannot_close_does_not_keep_the_others_open(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept()
    Monitor([kept, Broken()]).close()
    assert kept.closed == 1
    (text,) = [event.data["text"] for event in kept.events]
    assert not missing(text, "Broken", "OSError: still no space")
    capsys.readouterr()


def test_an_interrupt_passes_through() -> None:
    class Interrupted(Kept):
        def write(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Monitor([Interrupted()]).emit(train(0))
