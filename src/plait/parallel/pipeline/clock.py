"""How long this rank worked, and how long its steps took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class _Step:
    """When one step and the work in it began and ended."""

    start: Any
    end: Any = None
    work: list[tuple[Any, Any]] = field(default_factory=list)


class Clock:
    """Adds up the time in which something is computed, and that of whole steps.

    On CUDA it is the device's time, and nobody waits for the device: steps that it has not finished yet are added
    up when a later one begins. The first step is left out as soon as there is another. It learns shapes and warms
    up, and would say little of a run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: list[_Step] = []
        self._added = 0
        self._busy = self._whole = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that a step does."""
        while self._pending and self._is_over(self._pending[0]):
            self._add(self._pending.pop(0))
        step = _Step(self._now())
        self._pending.append(step)
        try:
            yield
        except BaseException:
            self._pending.remove(step)  # half a step has no length
            raise
        step.end = self._now()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around something that is computed, in a step."""
        start = self._now()
        yield
        self._pending[-1].work.append((start, self._now()))

    def busy_and_whole(self) -> tuple[float, float]:
        """Seconds of work and of everything, over all steps but the first; zeros before any. Waits for the device."""
        for step in self._pending:
            if self._cuda:
                step.end.synchronize()
            self._add(step)
        self._pending.clear()
        return self._busy, self._whole

    def _add(self, step: _Step) -> None:
        if self._added == 1:
            self._busy = self._whole = 0.0
        self._added += 1
        self._busy += sum(self._seconds(*span) for span in step.work)
        self._whole += self._seconds(step.start, step.end)

    def _is_over(self, step: _Step) -> bool:
        return not self._cuda or bool(step.end.query())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._cuda else end - start)
