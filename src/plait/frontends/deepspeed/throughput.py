"""Samples a second, as DeepSpeed counts and tells them."""

from __future__ import annotations

import time

from plait.frontends.deepspeed.accelerator import get_accelerator

_GIB = 1024**3
_FIRST = 2
"""Steps that are not counted: what is made once is made in them."""


class ThroughputTimer:
    """Counts steps and the time that they take; scripts tell it where an epoch ends.

    Time is the host's, from one step's end to the next, and never waits for a device: a host is at most one step ahead,
    so over many steps it is the device's time as well.
    """

    def __init__(self) -> None:
        self.epoch_count = 0
        self.micro_step_count = 0
        """Of this epoch."""
        self.global_step_count = 0
        self._samples = 0
        self._latest = (0, 0.0)
        """Samples of the last step that counts, and the seconds that it took."""
        self._began: float | None = None
        self._ended: float | None = None

    def update_epoch_count(self) -> None:
        """An epoch is over."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def count(self, samples: int, micro_steps: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        self.global_step_count += 1
        self.micro_step_count += micro_steps
        if self.global_step_count == _FIRST:
            self._began = now
        if self._ended is not None and self.global_step_count > _FIRST:
            self._samples += samples
            self._latest = (samples, now - self._ended)
        self._ended = now

    def avg_samples_per_sec(self) -> float:
        """Over all steps but the first ones; minus infinity, as in DeepSpeed, while there are no others."""
        if self._began is None or self._ended is None or self._ended <= self._began:
            return float("-inf")
        return self._samples / (self._ended - self._began)

    def lines(self) -> list[str]:
        """DeepSpeed's line about it; none as long as nothing was measured."""
        samples, took = self._latest
        if not took:
            return []
        device = get_accelerator()
        held, most = (round(size / _GIB, 2) for size in (device.memory_allocated(), device.max_memory_allocated()))
        return [
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={samples / took}, "
            f"MemAllocated={held}GB, MaxMemAllocated={most}GB"
        ]
