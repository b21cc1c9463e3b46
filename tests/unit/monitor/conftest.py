"""A run's events, with fresh numbers in every test."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from plait.monitor.events import Event, EventKind

RunMaker = Callable[..., list[Event]]


@pytest.fixture
def make_run() -> RunMaker:
    """`make_run(start, stop, segment=..., end=..., **train_data)`: a run that logs every step."""

    def make(
        start: int = 0, stop: int = 5, *, segment: str = "ddp · 1 rank", end: bool = True, **extra: Any
    ) -> list[Event]:
        now = time.time()
        opening = {"segment": segment, "title": "Run", "rows": [("Model", "gpt"), ("Strategy", segment)]}
        events = [Event(EventKind.RUN_START, start, 1, opening, now)]
        for step in range(start + 1, stop + 1):
            now += 0.5
            data = {
                "lr": 1e-3,
                "loss": 3.0 + random.random() - 0.1 * step,
                "time": 0.5,
                "data_time": 0.01,
                "memory": 970.0,
                "eta": 0.5 * (stop - step),
                "step_in_epoch": step,
                "steps_per_epoch": 196,
                "max_steps": stop,
                "max_epochs": 10,
                "by_epoch": True,
                "samples_per_s": 64.0,
                **extra,
            }
            events.append(Event(EventKind.TRAIN, step, 1, data, now))
        found = {"metrics": {"loss": random.random(), "accuracy/top1": 0.5}, "batches": 5, "time": 1.0}
        events.append(Event(EventKind.VALIDATE, stop, 1, found, now))
        saved = {"path": f"work/step-{stop}", "seconds": 1.5, "bytes": 3 * 2**20}
        events.append(Event(EventKind.SAVE, stop, 1, saved, now))
        if end:
            ending = {"reason": "finished", "seconds": now - events[0].time, "steps": stop - start}
            events.append(Event(EventKind.RUN_END, stop, 1, ending, now))
        return events

    return make
