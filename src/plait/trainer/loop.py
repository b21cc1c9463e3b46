"""The training loop: steps and epochs, with hooks, logging, validation and saving between them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from plait.engine import StepResult
from plait.errors import DataError
from plait.monitor import EventKind
from plait.trainer.row_check import check_rows
from plait.trainer.throughput import Meter, RemainingTime, memory_mib, peak_flops
from plait.trainer.watch import StepWatch

if TYPE_CHECKING:
    from plait.trainer.runner import Runner


def train_loop(runner: Runner) -> None:
    """Train until the configured end, or until a hook, a signal or `train.stop_after` stops the run."""
    state = _LoopState(runner)
    for hook in runner.hooks.before_run:
        hook(runner)
    if not state.finished():
        state.stop_if_due(runner.step)  # a resumed run may be past `train.stop_after` already
    while not state.finished():
        _train_epoch(runner, state)
    runner.engine.settle()
    if runner.watch is not None:
        runner.watch.end()
    for hook in runner.hooks.after_run:
        hook(runner)


class _LoopState:
    """The state of the loop, and the settings that it reads in every step."""

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
        self.check_rows = config.train.check_rows
        """Whether rows are still to be checked, with the first batch."""
        self.stopped = False
        self.before: StepResult | None = None
        """The result of the previous step; see `_wants_to_stop`."""

    def count_again(self) -> int | None:
        """Return the last step of the run (None: unknown), updated after a hook went back to an earlier checkpoint."""
        self.total = self.runner.total_steps
        return self.total

    def finished(self) -> bool:
        """Whether the run was stopped, or all its steps or epochs are done."""
        done_epochs = self.max_epochs is not None and self.runner.epoch >= self.max_epochs
        done_steps = self.total is not None and self.runner.step >= self.total
        return self.stopped or done_epochs or done_steps

    def stop_if_due(self, step: int) -> None:
        """Stop the run if `step` is `train.stop_after` or later."""
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
    """Train the remaining steps of the epoch; return whether it was completed."""
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
        if state.check_rows:
            check_rows(engine, micro_batches[0])
            state.check_rows = False
        result = train_step(micro_batches)
        step = engine.steps
        runner.step_in_epoch += 1
        logs = step % log_every == 0 or step == total
        if logs:
            result.wait()  # so that the logged time of these steps includes the device's
        now = perf_counter()
        meter.add(result, micro_batches, loaded - mark, now - loaded)
        mark = now
        watch(result)
        for hook in after:
            hook(runner, result)
        if engine.steps != step:  # a hook went back to an earlier checkpoint
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
            # The run is over. The epoch is complete only if its length is known and reached: a stream may have more.
            return runner.step_in_epoch == runner.steps_per_epoch
    if runner.step_in_epoch == 0:
        raise DataError("the data ended before the first batch: there is nothing to train on")
    return True


def _wants_to_stop(state: _LoopState, result: StepResult) -> bool:
    """Return whether some rank asked to stop, without waiting for the device.

    The flag is part of a step's result. For an asynchronous step it is read one step later, on all ranks alike, so all
    ranks stop after the same step.
    """
    readable = state.before if result.asynchronous else result
    state.before = result
    return readable is not None and readable.stop


def _at_interval(runner: Runner, state: _LoopState, count: int) -> bool:
    """Validate and save if it is due after `count` steps or epochs; return whether it was validated."""
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
