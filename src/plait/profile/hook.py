"""The hook that profiles a few steps of a run; other steps have no overhead.

[Note: the steps of a profile]
`start: n` counts steps from where the run began or resumed. Steps up to n - 3 run as usual, and are timed by the clock.
Step n - 2 runs under a recorder that sees every operator, and is counted (FLOPs, messages, memory). Step n - 1 warms up
the profiler, which is slow at first. Steps n, n + 1, … are recorded by the profiler. So counting does not slow down the
steps that are timed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from plait.config import ProfileConfig
from plait.distributed import replaced
from plait.engine import StepResult
from plait.errors import ConfigError, Problem
from plait.launch import Phase
from plait.monitor import EventKind
from plait.profile.breakdown import TimeBreakdown, Timeline, attribute_time, breakdown_of, read_trace
from plait.profile.count import StepCounts, count_step
from plait.profile.marks import PHASE, ModuleStack, TraceRange, marked_batches, module_marks, named_modules
from plait.profile.page import write_page
from plait.profile.report import Memory, RankTime, Report, message_log, module_rows
from plait.torch_internals import compiled_call, profile_every_thread
from plait.trainer import Hook, count_tokens, peak_flops

if TYPE_CHECKING:
    from plait.trainer import Runner

# The report, from the trace, the counts and the clock.


@dataclass(frozen=True, slots=True)
class ProfileMeasurements:
    """The measurements of a profile besides its trace; see [Note: the steps of a profile]."""

    config: ProfileConfig
    before: int
    """The run's step count when it began or resumed."""
    counted: StepCounts
    tokens: int
    """Tokens of one step, on this rank."""
    clock: Mapping[int, float]
    """Number of a step → the time of its end, in seconds."""

    def recorded_ms(self) -> float:
        """Return the milliseconds of a recorded step, by the clock."""
        first, steps = self.config.start - 1, self.config.steps
        return (self.clock[first + steps] - self.clock[first]) * 1e3 / steps

    def plain_ms(self) -> float | None:
        """Return the milliseconds of a step before the counted one, without the first two; None if there were none."""
        last = self.config.start - 3
        return (self.clock[last] - self.clock[2]) * 1e3 / (last - 2) if last > 2 else None


def rank_time(rank: int, time: TimeBreakdown, counted: StepCounts) -> RankTime:
    """Return this rank's time for the report of rank 0."""
    return RankTime(
        rank=rank,
        ms=time.ms,
        kinds={category: use.ms for category, use in time.kinds.items()},
        hidden_ms=time.hidden_ms,
        sent=sum(message.sent for message in counted.messages),
        flops=float(sum(flops.total for flops in counted.flops.values())),
    )


def assemble(
    runner: Runner, measured: ProfileMeasurements, timeline: Timeline, time: TimeBreakdown, ranks: list[RankTime]
) -> Report:
    """Return the report of this rank, with the times of all ranks."""
    world, counted = runner.world, measured.counted
    root = next(name for name, _ in named_modules(runner.engine.model))
    tokens = measured.tokens * world.layout.data_parallel
    return Report(
        title=root,
        device=world.device.type,
        device_name=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        layout={axis: size for axis, size in world.layout.sizes().items() if size > 1},
        ranks=ranks,
        first_step=measured.before + measured.config.start,
        time=time,
        clock_ms=measured.recorded_ms(),
        plain_ms=measured.plain_ms(),
        modules=module_rows(root, time.modules, counted.flops),
        messages=message_log(timeline.trace, counted.messages),
        memory=_memory(runner, counted),
        tokens=tokens,
        formula_flops=_formula_flops(runner, tokens),
        peak_flops=peak_flops(world.device),
        traces=[f"trace-rank{rank.rank}.json" for rank in ranks],
    )


def _formula_flops(runner: Runner, tokens: int) -> float | None:
    """Return the FLOPs of `tokens` tokens by the model's `flops_per_token`; None if it has none."""
    sequence = getattr(getattr(runner.loader, "dataset", None), "seq_len", None)
    formula = getattr(runner.engine.model, "flops_per_token", None)
    return float(formula(sequence)) * tokens if formula is not None and sequence is not None and tokens else None


def _memory(runner: Runner, counted: StepCounts) -> Memory:
    device = runner.world.device
    compiled = any(compiled_call(module) is not None for _, module in named_modules(runner.engine.model))
    held = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return Memory(by_owner=counted.memory, counted=counted.peak, measured=held, uncompiled=compiled)


class Profile(Hook):
    """Records `steps` steps from `start` on and writes their profile; see [Note: the steps of a profile]."""

    name = "profile"
    priority = 95  # the innermost hook around a step

    def __init__(self, config: ProfileConfig, *, then_stop: bool = False) -> None:
        self._config = config
        self._then_stop = then_stop
        self.report: Report | None = None
        """The report, on rank 0, once it is complete."""
        self._before = 0
        self._tokens = 0
        self._clock: dict[int, float] = {}
        self._counted = StepCounts()
        self._profiler: Any = None
        self._counting = ExitStack()
        self._marks = ExitStack()
        self._loader = ExitStack()
        self._step, self._phase, self._between_steps = TraceRange(), TraceRange(), TraceRange()

    # ---- points of the run

    def before_run(self, runner: Runner) -> None:
        """Make the folder, and mark the loading of data."""
        self._folder = Path(self._config.folder or Path(runner.config.work_dir) / "profile")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{str(self._folder)!r} cannot be made: {error.strerror}"
            raise ConfigError(Problem("profile.folder", message, "Choose another one.")) from error
        self._before = runner.step
        self._device = runner.world.device
        if runner.loader is not None:
            marked = marked_batches(runner.loader.epoch, self._saw)
            self._loader.enter_context(replaced(runner.loader, "epoch", marked))

    def before_step(self, runner: Runner) -> None:
        """Start counting or recording, if this is the step for it."""
        number, start = self._number(runner) + 1, self._config.start
        if number == start - 2:
            self._counted = self._counting.enter_context(count_step(runner.engine))
        elif number == start - 1:
            self._open(runner)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        """End what `before_step` started."""
        number, start, last = self._number(runner), self._config.start, self._config.start + self._config.steps - 1
        if number in (2, start - 3, start - 1, last):
            self._synchronize()
            self._clock[number] = perf_counter()
        if number == start - 2:
            self._counting.close()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)  # the counted step needs more memory
        if self._profiler is not None:
            self._next_step(runner, number, last)
        if number == last:
            self._close()
            self._loader.close()
            self._write_report(runner)
            if self._then_stop:
                runner.stop("the profile is complete")

    def before_validate(self, runner: Runner) -> None:
        """Mark a validation between recorded steps."""
        self._mark("validation")

    def after_validate(self, runner: Runner, metrics: Mapping[str, float]) -> None:
        """End its mark."""
        self._between_steps.end()

    def before_save(self, runner: Runner) -> None:
        """Mark a save between recorded steps."""
        self._mark("saving")

    def after_save(self, runner: Runner) -> None:
        """End its mark."""
        self._between_steps.end()

    def after_run(self, runner: Runner) -> None:
        """Log a warning if the run ended before the last step to record."""
        done = self._number(runner)
        if done >= self._config.start + self._config.steps - 1:
            return
        self._counting.close()
        if self._step.is_open:
            self._step.end()
            self._profiler.stop_trace()
        self._close()
        self._loader.close()
        runner.emit(EventKind.MESSAGE, level="warning", text=self.too_short(done))

    def too_short(self, done: int) -> str:
        """Return why the profile is missing."""
        last = self._config.start + self._config.steps - 1
        return (
            f"no profile: the run ended after {done} steps, and steps {self._config.start} to {last} were to be "
            "recorded (profile.start, profile.steps)"
        )

    # ---- recording

    def _number(self, runner: Runner) -> int:
        return runner.step - self._before

    def _saw(self, micro_batches: Any) -> None:
        self._tokens = sum(count_tokens(batch) for batch in micro_batches)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _open(self, runner: Runner) -> None:
        engine, report_phase = runner.engine, runner.engine.on_phase

        def on_phase(phase: Phase) -> None:
            report_phase(phase)
            self._phase.end()
            if phase is not Phase.IDLE:
                self._phase.begin(f"{PHASE}{phase}")

        self._marks.callback(self._phase.end)
        self._marks.enter_context(replaced(engine, "on_phase", on_phase))
        self._marks.enter_context(module_marks(engine.model, ModuleStack()))
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # An offloaded update runs on other threads.
        self._profiler = profile(activities=activities, experimental_config=profile_every_thread())
        self._profiler.prepare_trace()

    def _next_step(self, runner: Runner, number: int, last: int) -> None:
        """After a step with the profiler: the first one starts the trace, the last ends it."""
        if self._step.is_open:
            self._step.end()
        else:
            self._profiler.start_trace()
            self._clock[number] = perf_counter()  # starting takes a while
        if number < last:
            self._step.begin(f"ProfilerStep#{runner.step + 1}")  # the name that other trace readers look for
        else:
            self._profiler.stop_trace()
            self._profiler.export_chrome_trace(str(self._folder / f"trace-rank{runner.world.rank}.json"))

    def _close(self) -> None:
        self._between_steps.end()
        self._marks.close()
        self._profiler = None

    def _mark(self, name: str) -> None:
        if self._profiler is not None:
            self._between_steps.begin(name)

    # ---- reporting

    def _write_report(self, runner: Runner) -> None:
        world = runner.world
        timeline = attribute_time(read_trace(self._folder / f"trace-rank{world.rank}.json"))
        measured = ProfileMeasurements(self._config, self._before, self._counted, self._tokens, self._clock)
        time = breakdown_of(timeline)
        ranks = world.gather(rank_time(world.rank, time, self._counted))
        if world.is_main:
            self.report = report = assemble(runner, measured, timeline, time, ranks)
            (self._folder / "profile.json").write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")
            write_page(report, timeline, self._folder)
            text = f"profile: {report.summary()}; {self._folder / 'profile.html'}"
            runner.emit(EventKind.MESSAGE, level="info", text=text)
