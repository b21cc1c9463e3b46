"""What became of the latest step, for whoever asks, and what follows from it: counts, rates, curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from plait.frontends.deepspeed import progress
from plait.frontends.deepspeed.saving import groups_of, restore_groups
from plait.monitor import Monitor
from plait.strategy import StepResult


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run was after a step."""

    step: int
    samples: int
    scale: float | None
    """The loss scale of the next step; None except in fp16."""


class LatestStep:
    """The latest step of an engine, which may still be on its way.

    [Note: rates wait, and the host does not] A scheduler steps only if the optimizer did, and a device may tell that
    later (see [Note: one step behind]). Then the scheduler steps as if all were well, and is put back if it was not:
    before the next update, by which time the device has a whole backward pass to do. So every update has the rate that
    it would have had, and a script that asks the engine waits and gets what is true.
    """

    def __init__(self, optimizer: Optimizer | None, scheduler: Any, monitor: Monitor | None) -> None:
        self.skipped = 0
        """Steps so far that were left out."""
        self.result: StepResult | None = None
        self._optimizer = optimizer
        self.scheduler = scheduler
        self._monitor = monitor
        self._before: tuple[Any, list[dict[str, Any]]] | None = None
        """The scheduler and the groups as they were, in case that it has to go back."""
        self._place: Place | None = None
        """Of a step that nobody has looked at yet."""

    def take(self, result: StepResult, place: Place, lr_kwargs: Mapping[str, Any] | None) -> None:
        """A step was done: step the scheduler, and look at the rest when it has come."""
        assert self._optimizer is not None
        self.result, self._place, self._before = result, place, None
        if self.scheduler is not None:
            if result.late and hasattr(self.scheduler, "state_dict") and hasattr(self.scheduler, "load_state_dict"):
                self._before = self.scheduler.state_dict(), [_copied(group) for group in groups_of(self._optimizer)]
            if self._before is not None or not result.skipped:
                self.scheduler.step(**(lr_kwargs or {}))
        if not result.late:
            self.settle()

    def settle(self) -> None:
        """See how it went. Waits for the device where it has not told yet."""
        if self._place is None:
            return
        place, self._place = self._place, None
        assert self.result is not None
        assert self._optimizer is not None
        if self.result.skipped:
            self.skipped += 1
            if self._before is not None:
                state, groups = self._before
                self.scheduler.load_state_dict(state)
                restore_groups(self._optimizer, groups)
        if self._monitor is not None:
            rate, norm = progress.rates(self._optimizer)[0], self.result.grad_norm
            numbers = {"loss": self.result.loss, "lr": rate, "samples": float(place.samples), "grad_norm": norm}
            scale = {} if place.scale is None else {"loss_scale": place.scale}
            progress.emit(self._monitor, place.step, {**numbers, **scale})

    def close(self) -> None:
        """Draw the last step, and close the curves."""
        self.settle()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A rate that is a tensor is written to where it stands."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
