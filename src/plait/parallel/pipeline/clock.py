"""How long this rank worked, and how long a step took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Adds up the time in which something is computed; on CUDA, the device's time, and without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that a step does."""
        self._spans = []
        start = self._now()
        yield
        self._whole = (start, self._now())

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around something that is computed."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def busy_and_whole(self) -> tuple[float, float]:
        """Seconds of work and of everything in the last step; zeros where there was none. Waits for the device."""
        if self._whole is None:
            return 0.0, 0.0
        if self._cuda:
            self._whole[1].synchronize()
        return sum(self._seconds(*span) for span in self._spans), self._seconds(*self._whole)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._cuda else end - start)
