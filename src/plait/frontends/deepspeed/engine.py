"""`DeepSpeedEngine`: DeepSpeed's methods and attributes on Plait's native engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from plait.atomic_write import staging_path
from plait.config import LogConfig, ResolvedBatch, RunConfig
from plait.distributed import on_main
from plait.engine import ManualEngine, StepResult
from plait.errors import ConfigError, ModelError, Problem, TrainingError
from plait.frontends.deepspeed.accelerator import get_accelerator
from plait.frontends.deepspeed.loader import DeepSpeedDataLoader, RepeatingLoader
from plait.frontends.deepspeed.saving import DeepSpeedSaver, full_weights, groups_of, restore_groups, state_name
from plait.monitor import Event, EventKind, Monitor, build_monitor
from plait.precision import DTYPES

# Printing and logging: DeepSpeed's lines, timings and monitors.


class StepTimers:
    """Measures milliseconds by name, per micro-batch and per step. Each measurement synchronizes with the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._micro: dict[str, float] = {}
        self._step: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the time of the block."""
        start = self._now()
        yield
        elapsed = 1e3 * (self._now() - start)
        self._micro[name] = self._micro.get(name, 0.0) + elapsed
        self._step[name] = self._step.get(name, 0.0) + elapsed

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()

    def lines(self, *, boundary: bool) -> list[str]:
        """Return DeepSpeed's lines for the last micro-batch and, at a boundary, for the step; reset these times."""
        lines = [_line({f"{name}_microstep": elapsed for name, elapsed in self._micro.items()})]
        self._micro = {}
        if boundary:
            lines.append(_line(self._step))
            self._step = {}
        return lines


def _line(times: Mapping[str, float]) -> str:
    return " | ".join(["time (ms)", *(f"{name}: {elapsed:.2f}" for name, elapsed in times.items())])


def progress_line(step: int, skipped: int, optimizer: Optimizer) -> str:
    """Return the line that DeepSpeed prints about a step."""
    return f"step={step}, skipped={skipped}, lr={rates(optimizer)}, mom={momenta(optimizer)}"


def rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def momenta(optimizer: Optimizer) -> list[Any]:
    """Return the betas, or the momentum, of each group."""
    return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in optimizer.param_groups]


_MONITORS = {"tensorboard": "tensorboard", "csv_monitor": "csv", "wandb": "wandb"}


def open_monitor(raw: Mapping[str, Any], rank: int) -> Monitor | None:
    """Return a monitor with the sinks that a DeepSpeed configuration enables; None without sinks, or not on rank 0.

    All write to the folder `output_path/job_name`, with the values of the first sink that has one of these keys.
    """
    enabled = {name: section for name, section in raw.items() if name in _MONITORS and (section or {}).get("enabled")}
    if rank != 0 or not enabled:
        return None
    with_folder = [section for section in enabled.values() if "output_path" in section or "job_name" in section]
    section = with_folder[0] if with_folder else {}
    folder = Path(section.get("output_path") or ".") / (section.get("job_name") or "DeepSpeedJobName")
    project = enabled.get("wandb", {}).get("project")
    sinks = tuple(_MONITORS[name] for name in enabled)
    log = LogConfig.model_validate({"console": "none", "sinks": sinks, "wandb_project": project})
    return build_monitor(log, folder, rank)


# The latest step: its outcome, and the counters, learning rates and logged values that depend on it.


@dataclass(frozen=True, slots=True)
class TrainingPosition:
    """The counters of a run after a step."""

    step: int
    samples: int
    scale: float | None
    """The loss scale of the next step; None except in fp16."""


class LatestStep:
    """The latest step of an engine, whose outcome (updated or skipped) the device may not have computed yet.

    [Note: the scheduler steps before the outcome is known] A scheduler may step only if the optimizer did, but the host
    learns later whether it did (see `engine/update.py` [Note: one step behind]). So the scheduler steps at once, and
    its state is restored if the step turns out to be skipped. That is checked before the next update, so every update
    has the right learning rate; the device then has a backward pass to compute, so it does not idle. Reading one of the
    engine's counters waits for the outcome first.
    """

    def __init__(self, optimizer: Optimizer | None, scheduler: Any, monitor: Monitor | None) -> None:
        self.skipped = 0
        """The number of skipped steps so far."""
        self.result: StepResult | None = None
        self._optimizer = optimizer
        self.scheduler = scheduler
        self._monitor = monitor
        self._undo: tuple[Any, list[dict[str, Any]]] | None = None
        """The state of scheduler and groups before the step; None if the step cannot be, or need not be, undone."""
        self._position: TrainingPosition | None = None
        """The counters after a step whose outcome has not been read yet; None if it has been read."""

    def record(self, result: StepResult, position: TrainingPosition, lr_kwargs: Mapping[str, Any] | None) -> None:
        """Record a step, and step the scheduler. The outcome is read by `settle`, unless the host knows it already."""
        assert self._optimizer is not None
        self.result, self._position, self._undo = result, position, None
        if self.scheduler is not None:
            can_undo = hasattr(self.scheduler, "state_dict") and hasattr(self.scheduler, "load_state_dict")
            if result.asynchronous and can_undo:
                self._undo = self.scheduler.state_dict(), [_copied(group) for group in groups_of(self._optimizer)]
            if self._undo is not None or not result.skipped:
                self.scheduler.step(**(lr_kwargs or {}))
        if not result.asynchronous:
            self.settle()

    def settle(self) -> None:
        """Read the step's outcome, waiting for the device if necessary; if skipped, undo the scheduler's step."""
        if self._position is None:
            return
        position, self._position = self._position, None
        assert self.result is not None
        assert self._optimizer is not None
        if self.result.skipped:
            self.skipped += 1
            if self._undo is not None:
                state, groups = self._undo
                self.scheduler.load_state_dict(state)
                restore_groups(self._optimizer, groups)
        if self._monitor is not None:
            rate, norm = rates(self._optimizer)[0], self.result.grad_norm
            numbers = {"loss": self.result.loss, "lr": rate, "samples": float(position.samples), "grad_norm": norm}
            scale = {} if position.scale is None else {"loss_scale": position.scale}
            self._monitor.emit(Event(EventKind.TRAIN, position.step, 0, {**numbers, **scale}))

    def close(self) -> None:
        """Log the last step, and close the monitor."""
        self.settle()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group, with tensors (such as the learning rate) cloned: they are updated in place."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


# Samples per second, measured and printed as by DeepSpeed.


_GIB = 1024**3
_WARMUP_STEPS = 2
"""The first steps, which are not measured, because buffers and kernels are created in them."""


class ThroughputTimer:
    """Measures samples per second; scripts call `update_epoch_count` at the end of an epoch.

    A step's time is measured on the host, from the end of the step before to its own, without synchronization. The host
    is at most one step ahead of the device, so the average over many steps is that of the device too.
    """

    def __init__(self) -> None:
        self.epoch_count = 0
        self.micro_step_count = 0
        """Micro-steps of this epoch."""
        self.global_step_count = 0
        self._samples = 0
        self._latest = (0, 0.0)
        """The samples and seconds of the last step that was measured."""
        self._start: float | None = None
        self._end: float | None = None

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def count(self, samples: int, micro_steps: int) -> None:
        """Count a step."""
        now = time.perf_counter()
        self.global_step_count += 1
        self.micro_step_count += micro_steps
        if self.global_step_count == _WARMUP_STEPS:
            self._start = now
        if self._end is not None and self.global_step_count > _WARMUP_STEPS:
            self._samples += samples
            self._latest = (samples, now - self._end)
        self._end = now

    def avg_samples_per_sec(self) -> float:
        """Return the average without the first steps; minus infinity, as in DeepSpeed, until a step is measured."""
        if self._start is None or self._end is None or self._end <= self._start:
            return float("-inf")
        return self._samples / (self._end - self._start)

    def lines(self) -> list[str]:
        """Return DeepSpeed's line as a list; an empty list until a step is measured."""
        samples, seconds = self._latest
        if not seconds:
            return []
        device = get_accelerator()
        allocated, peak = (round(size / _GIB, 2) for size in (device.memory_allocated(), device.max_memory_allocated()))
        return [
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={samples / seconds}, "
            f"MemAllocated={allocated}GB, MaxMemAllocated={peak}GB"
        ]


# The engines.


class ModuleWrapper(nn.Module):
    """A wrapper that has a model as `module`, and also has the attributes of the model."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"neither Plait's {type(self).__name__} nor its model has {name!r}") from None


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """The objects that a `DeepSpeedEngine` is created from."""

    native: ManualEngine
    config: RunConfig
    raw: Mapping[str, Any]
    """The DeepSpeed configuration, for keys about its training loop, which the run description does not have."""
    batch: ResolvedBatch
    optimizer: Optimizer | None
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None


class DeepSpeedEngine(ModuleWrapper):
    """DeepSpeed's engine: trains a model; has DeepSpeed's methods and counters, and the model's attributes."""

    def __init__(self, components: EngineComponents) -> None:
        super().__init__()
        self._components = components
        self._native = components.native
        self.module = components.native.model
        self.optimizer = components.optimizer
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self._training_iterator: Iterator[Any] | None = None
        self.config = components.raw
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        world = components.native.world
        self.device = world.device
        self.global_rank, self.local_rank, self.world_size = world.rank, world.ranks.local_rank, world.size
        self.dp_world_size = world.layout.data_parallel
        self._batch = components.batch
        self._boundary: bool | None = None
        self._micro_batches_done = 0
        """Micro-batches of the current step that are done."""
        self._inside_no_sync = False
        self._updated = False
        """Whether the last `step` was at a boundary."""
        self._saver = DeepSpeedSaver(components.native)
        self._timers = StepTimers(world.device) if components.raw.get("wall_clock_breakdown") else None
        self._print_interval = components.raw.get("steps_per_print")
        self.tput_timer = ThroughputTimer()
        monitor = open_monitor(components.raw, world.rank)
        self._latest = LatestStep(components.optimizer, components.lr_scheduler, monitor)
        weakref.finalize(self, self._latest.close)  # few scripts call `destroy`
        self._show_scale(skipped=False)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        self._latest.settle()
        return self._latest.skipped

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._latest.settle()
        self._latest.skipped = count

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler; None if there is none."""
        self._latest.settle()
        return self._latest.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._latest.settle()
        self._latest.scheduler = scheduler

    def train_batch_size(self) -> int:
        """Return the samples per step, over all ranks."""
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per forward pass of one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples per step over all ranks, samples per micro-batch of a rank, micro-batches per step)."""
        return self._batch.total, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples per step, by accumulating more or fewer micro-batches. Call it between two steps."""
        unit = self._batch.micro * self.dp_world_size
        if train_batch_size % unit:
            message = f"{train_batch_size} is not a multiple of {self._batch.micro} × {self.dp_world_size} ranks"
            raise ConfigError(Problem("train_batch_size", message, f"Give a multiple of {unit}."))
        self._resize(ResolvedBatch(train_batch_size, self._batch.micro, train_batch_size // unit))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per micro-batch; the number of micro-batches per step stays the same."""
        count = self._batch.accumulation
        self._resize(ResolvedBatch(micro_batch_size * count * self.dp_world_size, micro_batch_size, count))

    def _resize(self, batch: ResolvedBatch) -> None:
        if self._native.pending:
            raise TrainingError("the batch size can be changed between two steps, not within one")
        self._batch = batch
        self._native.accumulation = batch.accumulation

    def zero_optimization(self) -> bool:
        """Return whether the ZeRO stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._components.config.strategy.stage

    def gradient_clipping(self) -> float:
        """Return the norm that gradients are clipped to; 0 if they are not clipped."""
        return self._components.config.train.clip_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self._components.config.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self._components.config.precision.compute == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.fp16_enabled() and self._components.config.precision.scaler.static is None

    def loss_scale(self) -> float:
        """Return the fixed loss scale of the configuration; 0 if it is dynamic."""
        return self._components.config.precision.scaler.static or 0.0

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next step; 1 if losses are not scaled."""
        return 1.0 if self._native.scaler is None else self._native.scaler.scale

    def _show_scale(self, *, skipped: bool) -> None:
        """Set the attributes of the optimizer from which scripts read the loss scale and overflow, in any dtype."""
        if self.optimizer is not None:
            shown: Any = self.optimizer
            shown.cur_scale = shown.loss_scale = self.cur_scale
            shown.overflow = skipped

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group in the next update."""
        self._latest.settle()
        return [] if self.optimizer is None else rates(self.optimizer)

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of each group."""
        self._latest.settle()
        return [] if self.optimizer is None else momenta(self.optimizer)

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step over all ranks, before clipping; None before the first step."""
        return None if self._latest.result is None else self._latest.result.grad_norm

    def was_step_applied(self) -> bool:
        """Return whether the last `step` updated the weights."""
        return self._updated and self._latest.result is not None and not self._latest.result.skipped

    def steps_per_print(self) -> int | None:
        """Return the number of steps between two printed lines."""
        return self._print_interval

    def wall_clock_breakdown(self) -> bool:
        """Return whether times are printed."""
        return self._timers is not None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing if `compile.deepcompile` is true; else raise `TrainingError`: it is too late to compile."""
        if not self.is_compiled:
            raise TrainingError(
                "engine.compile() is called after the model was sharded, and it is compiled before: write "
                '`"compile": {"deepcompile": true}` in the configuration'
            )

    @property
    def is_compiled(self) -> bool:
        """Whether `initialize` compiled the model."""
        return self._components.config.strategy.compile.enabled

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of micro-batches of this rank's part of a data set; shuffled if `route` is `train`."""
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._batch.micro,
            self._native.world,
            collate_fn=collate_fn or self._components.collate_fn,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=bool(self._components.raw.get("dataloader_drop_last", False)),
            num_local_io_workers=num_local_io_workers,
        )

    # ---- the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the model; its arguments are moved to the device."""
        with self._timed("fwd"):
            return self._native.forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward from this rank's mean loss of a micro-batch; return it divided by the micro-batches per step."""
        self._need_optimizer("backward")
        count = self._native.accumulation
        # The native engine divides by the number of micro-batches, so undo a division by the script.
        undivided = loss if scale_wrt_gas or count == 1 else loss * count
        last = self.is_gradient_accumulation_boundary() and not self._inside_no_sync
        with self._timed("bwd"):
            self._native.backward(undivided, last=last, retain_graph=retain_graph)
        return loss / count if scale_wrt_gas and count != 1 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch and, at a boundary, update the weights and step the scheduler."""
        self._need_optimizer("step")
        if self._inside_no_sync:
            raise TrainingError("engine.step() was called inside engine.no_sync(): leave the block first")
        self._updated = boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._latest.settle()  # the learning rates of this update depend on it
            with self._timed("step"):
                result = self._native.step()
            self._count(result, lr_kwargs)
        if self._timers is not None:
            self._print(self._timers.lines(boundary=boundary))
        self.micro_steps += 1
        self._micro_batches_done = 0 if boundary else self._micro_batches_done + 1

    def _count(self, result: StepResult, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Increase the counters after a step, whether it updated the weights or was skipped."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        scale = None
        if self._native.scaler is not None:
            self._show_scale(skipped=result.skipped)
            scale = self.cur_scale
        self._latest.record(result, TrainingPosition(self.global_steps, self.global_samples, scale), lr_kwargs)
        self.tput_timer.count(self.train_batch_size(), self._native.accumulation)
        assert self.optimizer is not None
        if self._print_interval and self.global_steps % self._print_interval == 0:
            line = progress_line(self.global_steps, self.skipped_steps, self.optimizer)
            self._print([f"[Rank 0] {line}", *self.tput_timer.lines()])

    def _print(self, lines: list[str]) -> None:
        if self.global_rank == 0:
            print("\n".join(lines), flush=True)

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._timers is None else self._timers.measure(name)

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise TrainingError(
                f"engine.{what}() needs an optimizer: give one to initialize, or write `optimizer` in the configuration"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._micro_batches_done + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the micro-batch completes a step, instead of counting; call it before each backward pass."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block in which gradients accumulate on this rank, at any stage; call `step` after the block."""
        if self._inside_no_sync:
            raise TrainingError("engine.no_sync() was entered twice")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing between steps, which clear gradients themselves; raise `TrainingError` within a step."""
        if self._native.pending:
            raise TrainingError(
                f"engine.zero_grad() would drop the gradients of {self._native.pending} micro-batches: leave it out, "
                "engine.step() clears gradients itself"
            )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one step over `gradient_accumulation_steps` micro-batches, and return the mean loss of all ranks.

        The model must return its loss. Without `data_iter`, micro-batches come from the `training_data` of
        `initialize`.
        """
        self.train()
        data, losses = self._data(data_iter), []
        for _ in range(self._batch.accumulation):
            loss = self._loss_of(next(data))
            self.backward(loss)
            self.step()
            losses.append(loss.detach().float())
        return self._mean(torch.stack(losses))

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Return the mean loss of a step's micro-batches over all ranks, without gradients, in evaluation mode."""
        training = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                losses = [self._loss_of(next(data_iter)).float() for _ in range(self._batch.accumulation)]
                return self._mean(torch.stack(losses))
        finally:
            self.train(training)

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Return the iterator of micro-batches; by default an endless one over the training data."""
        if data_iter is not None:
            return data_iter
        if self._training_iterator is None:
            if self.training_dataloader is None:
                raise TrainingError("train_batch() has no data: give it an iterator, or training_data to initialize")
            self._training_iterator = RepeatingLoader(self.training_dataloader)
        return self._training_iterator

    def _loss_of(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise ModelError(
                "train_batch and eval_batch need a model that returns its loss: a scalar, or one with .loss"
            )
        return loss

    def _mean(self, losses: Tensor) -> Tensor:
        world, mean = self._native.world, losses.mean().double()
        if world.size > 1:
            dist.all_reduce(mean, group=world.everyone)
        return (mean / world.size).float()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set training mode of the engine and the model; return the engine."""
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set evaluation mode of the engine and the model; return the engine."""
        return self.train(False)

    # ---- state

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training resumes from; return True. Every rank must call it, with the same tag.

        The checkpoint can be loaded under any stage, precision and number of ranks. The `client_state` of rank 0 is
        saved; it may hold plain values and tensors.
        """
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        state = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "optimizer": None if self.optimizer is None else state_name(self.optimizer),
            "groups": None if self.optimizer is None else groups_of(self.optimizer),
            "lr_scheduler": scheduler,
            "client_state": dict(client_state or {}),
        }
        chosen = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self._saver.save_tag(save_dir, chosen, state, latest=save_latest, frozen=not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of this front end, or of DeepSpeed itself; return its path and the client state.

        Without a tag, the checkpoint that was saved last is loaded. If the file `latest` is missing too, return
        (None, None).
        """
        self._latest.settle()
        if custom_load_fn is not None:
            raise ModelError("custom_load_fn is not offered: load the weights into the model before initialize")
        path = self._saver.find(load_dir, tag)
        if path is None:
            self._print([f"{Path(load_dir) / 'latest'} does not exist, so nothing is loaded: give a tag"])
            return None, None
        optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        loaded = self._saver.load(path, optimizer=optimizer, strict=load_module_strict)
        state = loaded.deepspeed
        if optimizer:
            self._native.restore(loaded.engine)
            if state.get("groups") is not None:
                assert self.optimizer is not None
                restore_groups(self.optimizer, state["groups"])
            self._show_scale(skipped=False)
        if not load_module_only:
            self.global_steps = int(state.get("global_steps", loaded.engine.get("steps", 0)))
            self.global_samples = int(state.get("global_samples", self.global_steps * self.train_batch_size()))
            self.skipped_steps = int(state.get("skipped_steps", 0))
            self.micro_steps, self._micro_batches_done = self.global_steps * self._batch.accumulation, 0
            scheduler = state.get("lr_scheduler")
            if load_lr_scheduler_states and self.lr_scheduler is not None and scheduler is not None:
                self.lr_scheduler.load_state_dict(scheduler)
        return str(loaded.path), state.get("client_state", {})

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights, in the compute dtype, to one file; return True. Every rank must call it."""
        weights, folder = self._weights(exclude_frozen_parameters), Path(save_dir)

        def write() -> None:
            with staging_path(folder / save_filename) as temporary:
                torch.save(weights, temporary)
                temporary.replace(folder / save_filename)

        on_main(self._native.world, write)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return the full weights, in host memory, on rank 0, and {} on other ranks. Every rank must call it."""
        return self._weights(exclude_frozen_parameters)

    def _weights(self, exclude_frozen: bool) -> dict[str, Tensor]:
        if self._native.world.layout.pp > 1:
            raise ModelError(
                "the stages of a pipeline are not gathered to one file: call save_checkpoint, and then "
                "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict"
            )
        excluded = self._native.frozen() if exclude_frozen else frozenset[str]()
        compute = DTYPES[self._components.config.precision.compute]
        return full_weights(self._native, compute, lambda name: name not in excluded)

    def destroy(self) -> None:
        """Wait for the checkpoint that is being saved, and close the monitor."""
        self._saver.close()
        self._latest.close()
