"""Hooks: code that runs at named points of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plait.config import CUSTOM_HOOKS, EarlyStopConfig, EmaConfig, HookConfig, ProfileConfig, RollbackConfig
from plait.engine import Engine, StepResult
from plait.errors import ConfigError, Problem, TrainingError
from plait.plugins import build_instance
from plait.torch_internals import foreach_copy_, foreach_lerp_
from plait.trainer.watch import record_suspect, spike_limit

if TYPE_CHECKING:
    from plait.trainer.runner import Runner

POINTS = (
    "before_run",
    "after_run",
    "before_epoch",
    "after_epoch",
    "before_step",
    "after_step",
    "before_validate",
    "after_validate",
    "before_test",
    "after_test",
    "before_save",
    "after_save",
)


class Hook:
    """Base class of hooks: override the methods of the points at which your code runs.

    Hooks with a lower `priority` run first; every rank runs every hook.
    """

    priority: int = 50
    name: str = ""
    """The name of its state in a checkpoint; by default the class name."""

    def before_run(self, runner: Runner) -> None:
        """Called before the first step of `train`."""

    def after_run(self, runner: Runner) -> None:
        """Called after the last step of `train`, also if the run was stopped, but not after an error."""

    def before_epoch(self, runner: Runner) -> None:
        """Called before an epoch, or the rest of one after a resume."""

    def after_epoch(self, runner: Runner) -> None:
        """Called after a complete epoch."""

    def before_step(self, runner: Runner) -> None:
        """Called before a step, when its data are loaded."""

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Called after a step. On a GPU the step may still be running: reading a number of `result` waits for it."""

    def before_validate(self, runner: Runner) -> None:
        """Called before a validation."""

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Called after a validation, with its metrics."""

    def before_test(self, runner: Runner) -> None:
        """Called before a test."""

    def after_test(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Called after a test, with its metrics."""

    def before_save(self, runner: Runner) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, runner: Runner) -> None:
        """Called after a checkpoint was written; with `checkpoint.async_save`, while it is still being written."""

    def allocate(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Called before a checkpoint is read: allocate tensors of these names, shapes and dtypes.

        `entries` are those of this hook in the checkpoint; `tensors` must return the same names afterwards.
        """

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint, by names of your choice; on resuming they are filled in place."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return numbers and texts to save in a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; called when a run resumes."""


class HookTable:
    """The hooks of a run: for each point the overridden methods, in order of priority."""

    def __init__(self, hooks: list[Hook]) -> None:
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        for point in POINTS:
            mine = [getattr(h, point) for h in self.hooks if getattr(type(h), point) is not getattr(Hook, point)]
            setattr(self, point, mine)

    before_run: list[Any]
    after_run: list[Any]
    before_epoch: list[Any]
    after_epoch: list[Any]
    before_step: list[Any]
    after_step: list[Any]
    before_validate: list[Any]
    after_validate: list[Any]
    before_test: list[Any]
    after_test: list[Any]
    before_save: list[Any]
    after_save: list[Any]

    def named(self) -> dict[str, Hook]:
        """Return the hooks by the names of their states in a checkpoint; a repeated name gets a `+`."""
        result: dict[str, Hook] = {}
        for hook in self.hooks:
            name = hook.name or type(hook).__name__
            while name in result:
                name += "+"
            result[name] = hook
        return result


# From the sections `hooks` and `profile` to hooks.


def build_hooks(configs: Sequence[HookConfig], profile: ProfileConfig | None = None) -> list[Hook]:
    """Return the hooks of the section `hooks`, and that of the section `profile`."""
    hooks: list[Hook] = []
    for index, config in enumerate(configs):
        hook: Hook = build_instance(config, f"hooks.{index}", cls=Hook)
        if isinstance(config, CUSTOM_HOOKS) and config.priority is not None:
            hook.priority = config.priority
        hooks.append(hook)
    if profile is not None:
        hooks.append(build_instance(profile, "profile", cls=Hook))
    return hooks


# An exponential moving average of the weights.


class WeightAverage:
    """A moving average of an engine's weights; each rank averages its shard."""

    def __init__(self) -> None:
        self._average: dict[str, Tensor] = {}

    def start(self, engine: Engine) -> None:
        """Copy the current weights as the average, unless there is one."""
        if not self._average:
            self._average = {name: weight.clone() for name, weight in engine.weights().items()}

    def update(self, engine: Engine, share: float) -> None:
        """Set the average to (1 - share) × average + share × current weights."""
        average, weights = list(self._average.values()), list(engine.weights().values())
        if share == 1.0:
            foreach_copy_(average, weights)
        else:
            foreach_lerp_(average, weights, share)

    @torch.no_grad()
    def swap(self, engine: Engine) -> None:
        """Exchange the weights and the average."""
        if self._average:
            for name, weight in engine.weights().items():
                kept = weight.clone()
                weight.copy_(self._average[name])
                self._average[name].copy_(kept)
            engine.weights_changed()

    def tensors(self, engine: Engine) -> dict[str, Tensor]:
        """Return the average as a checkpoint stores it: in global shapes, by the names of the weights."""
        self.start(engine)
        return {name: engine.as_global(name, tensor) for name, tensor in self._average.items()}


class Ema(Hook):
    """Validates with an exponential moving average of the weights, and saves it beside them."""

    name = "ema"
    priority = 40

    def __init__(self, config: EmaConfig) -> None:
        self._decay = config.decay
        self._every = config.every
        self._average = WeightAverage()

    def before_run(self, runner: Runner) -> None:
        """Start from the current weights, unless a checkpoint brought an average."""
        self._average.start(runner.engine)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Move the average towards the new weights."""
        # `skipped` is read last: it waits for the device.
        if runner.step % self._every == 0 and not result.skipped:
            self._average.update(runner.engine, 1.0 - self._decay**self._every)

    def before_validate(self, runner: Runner) -> None:
        """Validate with the average."""
        self._average.swap(runner.engine)

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Continue training with the weights."""
        self._average.swap(runner.engine)

    def before_test(self, runner: Runner) -> None:
        """Test with the average."""
        self._average.swap(runner.engine)

    def after_test(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Continue with the weights."""
        self._average.swap(runner.engine)

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Return the average, as a checkpoint stores it."""
        return self._average.tensors(runner.engine)


# Go back to a checkpoint when the loss spikes and stays high.


_LEAST_SPREAD = 0.01
"""The least spread, relative to the median: without it, small changes of a nearly constant loss would be spikes."""


class _StepPosition(NamedTuple):
    """A step, and its position in the data."""

    result: StepResult
    step: int
    """Counted from 1."""
    epoch: int
    at: int
    """Index of the step in its epoch, from 0."""


class Rollback(Hook):
    """After `patience` spikes in a row, loads an earlier checkpoint, and continues with the data after the spikes.

    A spike is a step whose `metric` is far above the median of earlier ones, or not finite. The metric is equal on
    every rank, so all ranks go back together. Skipped steps are ignored: they changed nothing. The earlier values of
    the metric are part of the checkpoint, so they are restored too.
    """

    name = "rollback"
    priority = 90  # after the other hooks

    def __init__(self, config: RollbackConfig) -> None:
        self._config = config
        self._usual: deque[float] = deque(maxlen=config.window)
        self._spikes: list[_StepPosition] = []
        self._usually: _StepPosition | None = None
        """The latest step that was no spike: its update may have caused the spikes after it."""
        self._done = 0
        self._before: _StepPosition | None = None

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Check the step for a spike; a step that is still running on the device is checked after the next one."""
        seen: _StepPosition | None = _StepPosition(result, runner.step, runner.epoch, runner.step_in_epoch - 1)
        if result.asynchronous:
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
        message = self._describe(runner, spikes)
        if self._done == self._config.most:
            raise TrainingError(
                f"{message}. The run went back {self._done} times already, which is all that the hook's `most` allows: "
                "lower optim.lr, set train.clip_norm, or look at these samples"
            )
        self._done += 1
        path = runner.saver.go_back(spikes[0].step - 2)  # the update before the first spike may have caused it
        if path is None:
            self._done -= 1
            self._usual.clear()  # training continues at this level: compare later steps with each other
            runner.warn(f"{message}; no checkpoint from before it exists, so training continues")
            return
        times = f"{self._done} of at most {self._config.most} times"
        runner.warn(f"{message}; went back to {path.name}, and on with the data that come next ({times})")

    def _describe(self, runner: Runner, spikes: list[_StepPosition]) -> str:
        metric, usual = self._config.metric, median(self._usual) if self._usual else math.nan
        first = getattr(spikes[0].result, metric)
        samples = []
        for seen in [*([self._usually] if self._usually else []), *spikes]:
            why = f"{metric} {getattr(seen.result, metric):.6g}, usually {usual:.6g}"
            samples.append(record_suspect(runner, seen.epoch, seen.at, step=seen.step, why=why))
        rest = f", and stayed up for {len(spikes) - 1} more" if len(spikes) > 1 else ""
        before = f"; the step before it, which may have done the harm: {samples[0]}" if self._usually else ""
        what = samples[-len(spikes)]
        return f"{metric} leapt from {usual:.4g} to {first:.4g} at step {spikes[0].step}{rest}; {what}{before}"

    def state(self) -> dict[str, Any]:
        """Return the earlier values of the metric, and how often the run went back."""
        return {"usual": list(self._usual), "done": self._done}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the earlier values of the metric, and how often the run went back."""
        self._usual = deque(state["usual"], maxlen=self._config.window)
        self._done = max(self._done, state["done"])  # a checkpoint from before a rollback has a smaller count


# The best value of a metric so far.


class Best:
    """Remembers the best value of a metric; `improved` compares new metrics with it."""

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0, *, path: str) -> None:
        """`path` is the key of the run description that names the metric."""
        self.metric = metric
        self._path = path
        self.value: float | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric is better than the best so far by at least `min_delta`; if so, remember it.

        Raise `ConfigError` if the metric is not among `metrics`.
        """
        if self.metric not in metrics:
            raise ConfigError(
                Problem(
                    self._path, f"{self.metric!r} is not measured", f"Validation gives: {', '.join(sorted(metrics))}."
                )
            )
        value = metrics[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None:
            gain = self._sign * (value - self.value)
            if gain <= 0.0 or gain < self._min_delta:
                return False
        self.value = value
        return True


# Stop when a metric no longer gets better.


class EarlyStop(Hook):
    """Ends the run when more than `patience` validations in a row had no gain of at least `min_delta`."""

    name = "early_stop"

    def __init__(self, config: EarlyStopConfig) -> None:
        self._best = Best(config.metric, config.mode, config.min_delta, path="hooks.early_stop.metric")
        self._max_waited = config.patience
        self._waited = 0

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """Compare the metric with the best so far, and stop the run after too many validations without a gain."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        if self._waited > self._max_waited:
            runner.stop(f"{self._best.metric} has not improved for {self._waited} validations")

    def state(self) -> dict[str, Any]:
        """Return the best value, and the number of validations since then."""
        return {"best": self._best.value, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, and the number of validations since then."""
        self._best.value = state["best"]
        self._waited = state["waited"]
