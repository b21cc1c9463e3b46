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
    """Override the points you need. Hooks with a lower `priority` go first; every rank runs every hook."""

    priority: int = 50
    name: str = ""
    """Under which name its state is saved; absent: the class name."""

    def before_run(self, runner: Runner) -> None:
        """Training is about to start."""

    def after_run(self, runner: Runner) -> None:
        """Training has ended, for whatever reason short of an error."""

    def before_epoch(self, runner: Runner) -> None:
        """An epoch is about to start."""

    def after_epoch(self, runner: Runner) -> None:
        """An epoch has ended."""

    def before_step(self, runner: Runner) -> None:
        """A step is about to start."""

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """A step has ended; on a GPU it is under way, and who looks at a number in `result` waits for it."""

    def before_validate(self, runner: Runner) -> None:
        """A validation is about to start."""

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """A validation has ended."""

    def before_test(self, runner: Runner) -> None:
        """A test is about to start."""

    def after_test(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """A test has ended."""

    def before_save(self, runner: Runner) -> None:
        """A checkpoint is about to be written."""

    def after_save(self, runner: Runner) -> None:
        """A checkpoint was written; with `checkpoint.async_save`, it was copied and is being written."""

    def allocate(self, runner: Runner, entries: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Called before a checkpoint with these tensors of this hook is read: make `tensors` return as many."""

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Tensors that belong in a checkpoint, by any names; on resuming they are filled in place."""
        return {}

    def state(self) -> dict[str, Any]:
        """Numbers and texts that belong in a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


class HookTable:
    """The hooks of a run by point, so that a point nobody uses costs nothing."""

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
        """Each hook under the name its state is saved by."""
        result: dict[str, Hook] = {}
        for hook in self.hooks:
            name = hook.name or type(hook).__name__
            while name in result:
                name += "+"
            result[name] = hook
        return result


# From the sections `hooks` and `profile` to hooks.


def build_hooks(configs: Sequence[HookConfig], profile: ProfileConfig | None = None) -> list[Hook]:
    """Build each hook of the section `hooks`, and the one that the section `profile` asks for."""
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
        """Start from the current weights, unless there is an average."""
        if not self._average:
            self._average = {name: weight.clone() for name, weight in engine.weights().items()}

    def update(self, engine: Engine, share: float) -> None:
        """Move the average towards the current weights, by their `share`; 1.0 copies them."""
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


# Go back to a checkpoint where the loss leaps and stays up.


_LEAST_SPREAD = 0.01
"""Of the median: a loss that hardly moves does not leap by moving a little."""


class _StepPosition(NamedTuple):
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
        self._spikes: list[_StepPosition] = []
        self._usually: _StepPosition | None = None
        """The latest step that was none: it may have done the harm that the next ones show."""
        self._done = 0
        self._before: _StepPosition | None = None

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """Judge the step; one whose numbers are on their way is judged after the next."""
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
        path = runner.saver.go_back(spikes[0].step - 2)  # the step before it has changed the weights too
        if path is None:
            self._done -= 1
            self._usual.clear()  # it is as it is: what comes is compared with what comes
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
        """What is usual, and how often the run went back."""
        return {"usual": list(self._usual), "done": self._done}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on comparing."""
        self._usual = deque(state["usual"], maxlen=self._config.window)
        self._done = max(self._done, state["done"])  # a checkpoint that it went back to knows nothing of that


# The best value of a metric so far.


class Best:
    """Remembers the best value; `improved` says whether new metrics beat it."""

    def __init__(self, metric: str, mode: str, min_delta: float = 0.0, *, path: str) -> None:
        """`path` is the key of the run description that names the metric."""
        self.metric = metric
        self._path = path
        self.value: float | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: Mapping[str, float]) -> bool:
        """Take note of one validation; whether it is the best so far."""
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
        """Compare with the best so far."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        if self._waited > self._max_waited:
            runner.stop(f"{self._best.metric} has not improved for {self._waited} validations")

    def state(self) -> dict[str, Any]:
        """The best value, and how long ago it was."""
        return {"best": self._best.value, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._best.value = state["best"]
        self._waited = state["waited"]
