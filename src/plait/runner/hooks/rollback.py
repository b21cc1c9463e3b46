"""Go back to a checkpoint where the loss leaps and stays up."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.config import RollbackConfig
from plait.errors import TrainingError
from plait.runner.hooks.base import Hook
from plait.runner.suspects import note
from plait.runner.watch import spike_limit
from plait.strategy import StepResult

if TYPE_CHECKING:
    from plait.runner.runner import Runner

_LEAST_SPREAD = 0.01
"""Of the median: a loss that hardly moves does not leap by moving a little."""


class _Seen(NamedTuple):
    """A step, and where in the data it was."""

    result: StepResult
    step: int
    """Counted from 1."""
    epoch: int
    at: int


class Rollback(Hook):
    """After `patience` spikes in a row, weights, optimizer, generators and step go back; the data go on.

    What is judged is equal on every rank, so all of them go back together. Steps that were skipped are not judged:
    they changed nothing. The numbers that a new one is compared with are saved, and go back too.
    """

    name = "rollback"
    priority = 90  # the others have looked at the step by then

    def __init__(self, config: RollbackConfig) -> None:
        self._config = config
        self._usual: deque[float] = deque(maxlen=config.window)
        self._spikes: list[_Seen] = []
        self._usually: _Seen | None = None
        """The latest step that was none: it may have done the harm that the next ones show."""
        self._done = 0
        self._before: _Seen | None = None

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Judge the step; one whose numbers are on their way is judged after the next."""
        seen: _Seen | None = _Seen(result, runner.step, runner.epoch, runner.step_in_epoch - 1)
        if result.late:
            seen, self._before = self._before, seen
        if seen is None or seen.result.skipped:
            return
        value: float = getattr(seen.result, self._config.metric)
        if not self._leaps(value):
            self._usual.append(value)
            self._usually = seen
            self._spikes.clear()
            return
        self._spikes.append(seen)
        if len(self._spikes) >= self._config.patience:
            self._go_back(runner)

    def _leaps(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        if len(self._usual) < self._config.window / 2:
            return False
        return value > spike_limit(self._usual, self._config.threshold, _LEAST_SPREAD)

    def _go_back(self, runner: Runner) -> None:
        spikes, self._spikes, self._before = self._spikes, [], None
        words = self._tell(runner, spikes)
        if self._done == self._config.most:
            raise TrainingError(
                f"{words}. The run went back {self._done} times already, which is all that the hook's `most` allows: "
                "lower optim.lr, set train.clip_norm, or look at these samples"
            )
        self._done += 1
        path = runner.saver.go_back(spikes[0].step - 2)  # the step before it has changed the weights too
        if path is None:
            self._done -= 1
            self._usual.clear()  # it is as it is: what comes is compared with what comes
            runner.warn(f"{words}; there is no checkpoint from before it, so training goes on")
            return
        times = f"{self._done} of at most {self._config.most} times"
        runner.warn(f"{words}; went back to {path.name}, and on with the data that come next ({times})")

    def _tell(self, runner: Runner, spikes: list[_Seen]) -> str:
        metric, usual = self._config.metric, median(self._usual) if self._usual else math.nan
        first = getattr(spikes[0].result, metric)
        samples = []
        for seen in [*([self._usually] if self._usually else []), *spikes]:
            why = f"{metric} {getattr(seen.result, metric):.6g}, usually {usual:.6g}"
            samples.append(note(runner, seen.epoch, seen.at, step=seen.step, why=why))
        rest = f", and stayed up for {len(spikes) - 1} more" if len(spikes) > 1 else ""
        before = f"; the step before it, which may have done the harm: {samples[0]}" if self._usually else ""
        what = samples[-len(spikes)]
        return f"{metric} leapt from {usual:.4g} to {first:.4g} at step {spikes[0].step}{rest}; {what}{before}"

    def state(self) -> dict[str, Any]:
        """What is usual, and how often the run went back."""
        return {"usual": list(self._usual), "done": self._done}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on comparing."""
        self._usual = deque(state["usual"], maxlen=self._config.window)
        self._done = max(self._done, state["done"])  # a checkpoint that it went back to knows nothing of that
