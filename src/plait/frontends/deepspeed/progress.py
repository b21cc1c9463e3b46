"""What an engine says while it trains: DeepSpeed's lines, timings, and curves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from plait.config import LogConfig
from plait.monitor import Monitor, build_monitor
from plait.spec import Event, EventKind


class Clock:
    """Milliseconds by name, of one micro-batch and of one step. Waits for the device at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.micro: dict[str, float] = {}
        self.step: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        start = self._now()
        yield
        took = 1e3 * (self._now() - start)
        self.micro[name] = self.micro.get(name, 0.0) + took
        self.step[name] = self.step.get(name, 0.0) + took

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()

    def take(self, *, boundary: bool) -> list[str]:
        """DeepSpeed's lines for the micro-batch that is over and, at a boundary, for the step."""
        lines = [_line({f"{name}_microstep": took for name, took in self.micro.items()})]
        self.micro = {}
        if boundary:
            lines.append(_line(self.step))
            self.step = {}
        return lines


def _line(times: Mapping[str, float]) -> str:
    return " | ".join(["time (ms)", *(f"{name}: {took:.2f}" for name, took in times.items())])


def progress_line(step: int, skipped: int, optimizer: Optimizer) -> str:
    """DeepSpeed's line about a step."""
    return f"step={step}, skipped={skipped}, lr={rates(optimizer)}, mom={momenta(optimizer)}"


def rates(optimizer: Optimizer) -> list[float]:
    """Each group's rate."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def momenta(optimizer: Optimizer) -> list[Any]:
    """Each group's betas, or its momentum."""
    return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in optimizer.param_groups]


_MONITORS = {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb"}


def open_monitor(raw: Mapping[str, Any], rank: int) -> Monitor | None:
    """The sinks that a DeepSpeed configuration asks for, on rank 0; None where it asks for none.

    `output_path/job_name` is the folder that they write to; of several, the first one's.
    """
    asked = {name: section for name, section in raw.items() if name in _MONITORS and (section or {}).get("enabled")}
    if rank != 0 or not asked:
        return None
    places = [section for section in asked.values() if "output_path" in section or "job_name" in section]
    place = places[0] if places else {}
    folder = Path(place.get("output_path") or ".") / (place.get("job_name") or "DeepSpeedJobName")
    project = asked.get("wandb", {}).get("project")
    sinks = tuple(_MONITORS[name] for name in asked)
    log = LogConfig.model_validate({"console": "none", "sinks": sinks, "wandb_project": project})
    return build_monitor(log, folder, rank)


def emit(monitor: Monitor, step: int, numbers: Mapping[str, float]) -> None:
    """Add a step to the curves."""
    monitor.emit(Event(EventKind.TRAIN, step, 0, dict(numbers)))
