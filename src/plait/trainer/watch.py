"""Watches every step for loss spikes, steps without targets and skipped steps; handles SIGINT and SIGTERM."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.engine import StepResult
from plait.errors import DataError, ModelError
from plait.launch import STOPPED_CODES
from plait.monitor import EventKind

if TYPE_CHECKING:
    from plait.trainer.runner import Runner

# The samples of a step that went wrong.


FILE = "suspects.jsonl"
_SHOWN = 8


def samples_at(runner: Runner, epoch: int, step: int) -> list[int]:
    """Return the indices of the samples of a step, over all ranks, in the data set or in the stream."""
    loader, total = runner.loader, runner.batch.total
    try:
        return [int(sample) for sample in loader.sample_ids(epoch, step)]
    except DataError:  # a stream has no indices: count its samples in reading order
        return list(range(step * total, (step + 1) * total))


def record_samples(runner: Runner, step: int) -> str:
    """Write the samples of a step to suspects.jsonl; return a text with them, to be appended to a message.

    `step`, counted from 0, is the latest one or shortly before it. The text is empty if a custom loop trains, whose
    position in the data is not known.
    """
    if runner.began is None or not hasattr(runner.loader, "sample_ids"):
        return ""
    latest, epoch, at = runner.began
    at -= latest - step
    if at < 0:
        if epoch == 0 or runner.steps_per_epoch is None:
            return ""
        epoch, at = epoch - 1, at + runner.steps_per_epoch
    return f"; {record_suspect(runner, epoch, at, step=step + 1, why='not finite')}"


def record_suspect(runner: Runner, epoch: int, at: int, **facts: Any) -> str:
    """Write the samples of a step to suspects.jsonl; return a text with the first of them."""
    samples = samples_at(runner, epoch, at)
    if runner.world.is_main:
        line = {**facts, "epoch": epoch + 1, "step_in_epoch": at + 1, "samples": samples}
        with (Path(runner.config.work_dir) / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    shown = ", ".join(map(str, samples[:_SHOWN]))
    more = f" and {len(samples) - _SHOWN} more, see {FILE}" if len(samples) > _SHOWN else ""
    return f"its samples: {shown}{more}"


# Ctrl-C and SIGTERM end a run cleanly: after the step in progress, with a checkpoint.


STOPPED: Mapping[str, int] = MappingProxyType(dict(zip(("Ctrl-C", "SIGTERM"), STOPPED_CODES, strict=True)))
"""Reasons why a run was stopped from outside, and the exit code of each."""


class StopSignals:
    """A context in which SIGINT and SIGTERM call the function `ask` with `Ctrl-C` or `SIGTERM`, the reason to stop.

    A second Ctrl-C raises `KeyboardInterrupt` at once.

    Signals that were ignored when the process started (`nohup`, `trap '' INT`, `command &` in a script) stay ignored.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._previous: dict[int, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            numbers = (signal.SIGINT, signal.SIGTERM)
            for number in (n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._received)
        return self

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self._ask("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_WINDOW, _LEAST = 100, 10
"""How many losses a new one is compared with, and how many of them are needed at least."""
_REFRESH = 50
"""After how many steps the limit is computed again, once there are `_WINDOW` losses; after `_LEAST` before that."""
_LEAST_SPREAD = 0.05
"""The least spread, relative to the median: without it, small changes of a nearly constant loss would be spikes."""


def spike_limit(usual: Iterable[float], threshold: float, least_spread: float) -> float:
    """Return the value above which a number is a spike: median + `threshold` × spread.

    The spread is the deviation of the earlier numbers `usual`, but at least `least_spread` × median.
    """
    known = list(usual)
    middle = median(known)
    spread = _TO_DEVIATION * median(abs(value - middle) for value in known)
    return middle + threshold * max(spread, least_spread * abs(middle))


class _WatchedStep(NamedTuple):
    """A step and its position in the data."""

    result: StepResult
    step: int
    """Counted from 1."""
    epoch: int
    at: int
    """Index of the step in its epoch, from 0."""


class StepWatch:
    """Checks every step of a run for loss spikes, missing targets and skips.

    It reads only numbers that are equal on all ranks, so all ranks log or raise the same. A step that is still running
    on the device is checked after the next one, without waiting.
    """

    def __init__(self, runner: Runner) -> None:
        guard = runner.config.train.guard
        self._runner = runner
        self._threshold = None if _goes_back(runner) else guard.spike
        self._most_empty = guard.max_skips
        self._before: _WatchedStep | None = None
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._limit = math.inf
        self._until_refresh = _LEAST
        self._high = False
        """Whether the previous step was part of a spike, which has been reported."""
        self.steps = 0
        self.skipped = 0
        self._empty = self._empty_in_a_row = 0
        self._highest_rate = self._highest_norm = 0.0
        self._skips_before = runner.engine.skips.total

    def add(self, result: StepResult) -> None:
        """Record the step just done."""
        self.steps += 1
        if result.lr > self._highest_rate:
            self._highest_rate = result.lr
        if not result.asynchronous:
            self._look(result, None)
            return
        seen, self._before = self._before, self._watched(result)
        if seen is not None:
            self._look(seen.result, seen)

    def _watched(self, result: StepResult) -> _WatchedStep:
        runner = self._runner
        return _WatchedStep(result, runner.step, runner.epoch, runner.step_in_epoch - 1)

    def _look(self, result: StepResult, seen: _WatchedStep | None) -> None:
        """Check a step; `seen` is None for the step just done, whose position is only looked up if it is needed."""
        if result.skipped:
            self.skipped += 1
        elif result.targets > 0:
            if result.grad_norm > self._highest_norm:
                self._highest_norm = result.grad_norm
            self._empty_in_a_row = 0
            if self._threshold is not None:
                self._compare(result, seen, self._threshold)
        elif result.targets == 0:
            self._count_empty(seen or self._watched(result))
        else:
            seen = seen or self._watched(result)
            raise ModelError(
                f"step {seen.step} had {result.targets:g} targets: the count of a LossTerm is 0 or more, and a smaller "
                "one turns every gradient around"
            )

    def _count_empty(self, seen: _WatchedStep) -> None:
        self._empty += 1
        self._empty_in_a_row += 1
        if self._empty_in_a_row >= self._most_empty:
            raise DataError(f"{self._empty_in_a_row} steps in a row had nothing to learn from: {_NO_TARGETS}")
        if self._empty == 1:
            self._runner.warn(f"step {seen.step} had nothing to learn from{self._samples(seen, 'no targets')}")

    def _compare(self, result: StepResult, seen: _WatchedStep | None, threshold: float) -> None:
        loss = result.loss
        if loss <= self._limit:
            self._high = False
            self._usual.append(loss)
            self._until_refresh -= 1
            if self._until_refresh == 0:
                self._until_refresh = _LEAST if len(self._usual) < _WINDOW else _REFRESH
                self._limit = spike_limit(self._usual, threshold, _LEAST_SPREAD)
        elif not self._high:
            self._high = True
            seen = seen or self._watched(result)
            usual = median(self._usual) if self._usual else math.nan
            why = f"loss {loss:.6g}, usually {usual:.6g}"
            self._runner.warn(
                f"the loss leapt from {usual:.4g} to {loss:.4g} at step {seen.step}{self._samples(seen, why)}. Lower "
                "optim.lr, set train.clip_norm, or add the hook `rollback`, which goes back to a checkpoint"
            )

    def _samples(self, seen: _WatchedStep, why: str) -> str:
        runner = self._runner
        if not hasattr(runner.loader, "sample_ids"):
            return ""
        return f"; {record_suspect(runner, seen.epoch, seen.at, step=seen.step, why=why)}"

    def end(self) -> None:
        """Check the last step, and warn of what went wrong in the whole run. Raise if the run learned nothing."""
        if self._before is not None:
            self._look(self._before.result, self._before)
            self._before = None
        if self.steps == 0:
            return
        runner, skips = self._runner, self._runner.engine.skips
        not_finite = max(skips.total - self._skips_before, 0)
        if runner.stop_reason not in STOPPED:
            skips.end_of_run(not_finite, self.steps)
        if self._empty and self._empty == self.steps - self.skipped:
            raise DataError(f"none of the {self.steps} steps had anything to learn from: {_NO_TARGETS}")
        if not_finite:
            text = f"{not_finite} of {self.steps} steps were skipped: their loss or gradient was not finite"
            runner.warn(f"{text}. The samples are in suspects.jsonl")
        if sought := self.skipped - not_finite:
            text = f"{sought} of {self.steps} steps were skipped while the loss scale was being found"
            if sought == self.steps:
                runner.warn(f"{text}: nothing was learned. Lower precision.scaler.initial_power, or train longer")
            else:
                runner.emit(EventKind.MESSAGE, level="info", text=text)
        if self._empty:
            runner.warn(f"{self._empty} of {self.steps} steps had no targets, and nothing to learn from")
        elif self._highest_norm == 0.0 and self.skipped < self.steps:
            text = f"the gradient norm was 0 at all {self.steps} steps: nothing was learned"
            runner.warn(f"{text}. Does the loss depend on the parameters that are trained?")
        if self._highest_rate == 0.0:
            runner.warn(f"the learning rate was 0 at all {self.steps} steps: nothing was learned; see `schedule`")


def warn_of_lengths(runner: Runner) -> None:
    """Warn before the first step of a batch or a warmup that is longer than the run."""
    dataset: Any = getattr(runner.loader, "dataset", None)
    batch = runner.batch.total
    if runner.steps_per_epoch == 1 and hasattr(dataset, "__len__") and len(dataset) < batch:
        runner.warn(
            f"batch.total is {batch}, and an epoch has {len(dataset)} samples: every step has {len(dataset)} samples. "
            "Write a smaller batch.total"
        )
    schedule, total = runner.config.schedule, runner.total_steps
    warmup = getattr(schedule, "warmup", 0)
    if warmup and getattr(schedule, "by", "step") == "epoch":
        warmup *= runner.steps_per_epoch or 0
    if total is not None and warmup >= total:
        runner.warn(
            f"schedule.warmup takes {warmup} steps, and the run ends at step {total}: the learning rate never comes to "
            "optim.lr. Write a shorter warmup"
        )


_NO_TARGETS = "their count of targets is 0. Are all texts empty, all labels -100, or all answers skipped?"


def _goes_back(runner: Runner) -> bool:
    """Return whether the hook `rollback` is present, which watches and reports the loss itself."""
    return any(hook.type == "rollback" for hook in runner.config.hooks)
