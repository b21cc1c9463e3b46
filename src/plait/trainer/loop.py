"""The training loop: steps in epochs, and what happens between them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from plait.engine import StepResult
from plait.errors import DataError
from plait.monitor import EventKind
from plait.trainer.throughput import Meter, RemainingTime, memory_mib, peak_flops
from plait.trainer.watch import StepWatch

if TYPE_CHECKING:
    from plait.trainer.runner import Runner


def train_loop(runner: Runner) -> None:
    """Train until the run's end, or until somebody asks to stop."""
    state = _LoopState(runner)
    for hook in runner.hooks.before_run:
        hook(runner)
    if not state.finished():
        state.stop_if_due(runner.step)  # a run that goes on may be there already
    while not state.finished():
        _train_epoch(runner, state)
    runner.engine.settle()
    if runner.watch is not None:
        runner.watch.end()
    for hook in runner.hooks.after_run:
        hook(runner)


class _LoopState:
    """What the loop looks at on every step, fetched once."""

    def __init__(self, runner: Runner) -> None:
        config = runner.config
        self.runner = runner
        self.log_every = config.log.every
        self.by_epoch = runner.by_epoch
        self.max_epochs = config.train.max_epochs
        self.total = runner.total_steps
        self.stop_after = config.train.stop_after
        self.validates = runner.has("val_data")
        self.val_every = config.train.val_every
        self.save_every = config.checkpoint.every
        self.meter = Meter()
        runner.watch = StepWatch(runner)
        self.clock = RemainingTime(runner.step)
        self.peak = peak_flops(runner.world.device)
        self.stopped = False
        self.before: StepResult | None = None
        """What the step before did; see `_wants_to_stop`."""

    def count_again(self) -> int | None:
        """At which step the run ends, now that fewer are done than were."""
        self.total = self.runner.total_steps
        return self.total

    def finished(self) -> bool:
        """Whether the run has come to its end."""
        done_epochs = self.max_epochs is not None and self.runner.epoch >= self.max_epochs
        done_steps = self.total is not None and self.runner.step >= self.total
        return self.stopped or done_epochs or done_steps

    def stop_if_due(self, step: int) -> None:
        """Stop at the step that `train.stop_after` names, or beyond it."""
        if self.stop_after is not None and step >= self.stop_after:
            self.runner.stop_reason = f"stopped at step {step}, as train.stop_after says"
            self.stopped = True


def _train_epoch(runner: Runner, state: _LoopState) -> None:
    for hook in runner.hooks.before_epoch:
        hook(runner)
    complete = _train_steps(runner, state)
    if complete:
        runner.epoch += 1
        runner.step_in_epoch = 0
        for hook in runner.hooks.after_epoch:
            hook(runner)
        if state.by_epoch:
            _at_interval(runner, state, runner.epoch)
        state.stopped = state.stopped or runner.stopping()
    if not state.by_epoch and not state.stopped and state.finished() and state.val_every is None and state.validates:
        _validate(runner)


def _train_steps(runner: Runner, state: _LoopState) -> bool:
    """The rest of the epoch; whether it came to its end."""
    engine, meter = runner.engine, state.meter
    before, after = runner.hooks.before_step, runner.hooks.after_step
    train_step, log_every, total = engine.train_step, state.log_every, state.total
    poll = runner.saver.poll
    assert runner.watch is not None
    watch = runner.watch.add
    mark = perf_counter()
    for micro_batches in runner.loader.epoch(runner.epoch, runner.step_in_epoch):
        loaded = perf_counter()
        for hook in before:
            hook(runner)
        runner.began = engine.steps, runner.epoch, runner.step_in_epoch
        result = train_step(micro_batches)
        step = engine.steps
        runner.step_in_epoch += 1
        logs = step % log_every == 0 or step == total
        if logs:
            result.wait()  # so that the seconds of the steps to tell of are the device's, too
        now = perf_counter()
        meter.add(result, micro_batches, loaded - mark, now - loaded)
        mark = now
        watch(result)
        for hook in after:
            hook(runner, result)
        if engine.steps != step:  # one of them went back to a checkpoint
            step, total = engine.steps, state.count_again()
        runner.tick(step)
        poll()
        if logs:
            _log(runner, state, result.lr)
        if not state.by_epoch:
            state.stopped = _at_interval(runner, state, step) and runner.stopping()
            mark = perf_counter()
        state.stop_if_due(step)
        if state.stopped or (_wants_to_stop(state, result) and runner.stopping()):
            state.stopped = True
            return False
        if step == total:
            # A stream may have more to give: its epoch is not over because the run is.
            return runner.step_in_epoch == runner.steps_per_epoch
    if runner.step_in_epoch == 0:
        raise DataError("the data ended before the first batch: there is nothing to train on")
    return True


def _wants_to_stop(state: _LoopState, result: StepResult) -> bool:
    """Whether some rank asked to stop, as far as a look that waits for no device can tell.

    A late result is looked at when the next step is under way. Which one that is does not depend on what anybody
    has read meanwhile, so all ranks look at the same one.
    """
    looked_at = state.before if result.asynchronous else result
    state.before = result
    return looked_at is not None and looked_at.stop


def _at_interval(runner: Runner, state: _LoopState, count: int) -> bool:
    """Validate and save where `count`, in steps or epochs, says so; whether it was validated."""
    every = state.val_every or (1 if state.by_epoch else None)
    due = state.validates and every is not None and count % every == 0
    if due:
        _validate(runner)
    if state.save_every is not None and count % state.save_every == 0:
        runner.saver.save()
    return due


def _validate(runner: Runner) -> None:
    runner.saver.validated(runner.validate())


def _log(runner: Runner, state: _LoopState, lr: float) -> None:
    world, model = runner.world, runner.engine.model
    flops = getattr(model, "flops_per_token", None)
    sequence = getattr(runner.loader.dataset, "seq_len", None)
    data = state.meter.read(
        ranks=world.layout.data_parallel,
        flops_per_token=flops(sequence) if flops is not None and sequence is not None else None,
        peak=state.peak,
    )
    if world.device.type == "cuda":
        runner.step_memory.add(runner.step, torch.cuda.memory_allocated(world.device))
    runner.emit(
        EventKind.TRAIN,
        lr=lr,
        eta=state.clock.eta(runner.step, state.total),
        memory=memory_mib(world.device),
        step_in_epoch=runner.step_in_epoch,
        steps_per_epoch=runner.steps_per_epoch,
        max_steps=state.total,
        by_epoch=state.by_epoch,
        max_epochs=state.max_epochs,
        **runner.figures,
        **data,
    )
