"""`DeepSpeedEngine`: DeepSpeed's loop around Plait's native engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from plait.atomic_write import drafting
from plait.config import LogConfig, ResolvedBatch, RunConfig
from plait.distributed import on_main
from plait.engine import ManualEngine, StepResult
from plait.errors import ConfigError, ModelError, Problem, TrainingError
from plait.frontends.deepspeed.accelerator import get_accelerator
from plait.frontends.deepspeed.loader import DeepSpeedDataLoader, RepeatingLoader
from plait.frontends.deepspeed.saving import DeepSpeedSaver, groups_of, restore_groups, state_name, whole_weights
from plait.monitor import Event, EventKind, Monitor, build_monitor
from plait.precision import DTYPES

# What an engine says while it trains: DeepSpeed's lines, timings, and curves.


class StepTimers:
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


# What became of the latest step, for whoever asks, and what follows from it: counts, rates, curves.


@dataclass(frozen=True, slots=True)
class TrainingPosition:
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
        self._place: TrainingPosition | None = None
        """Of a step that nobody has looked at yet."""

    def take(self, result: StepResult, place: TrainingPosition, lr_kwargs: Mapping[str, Any] | None) -> None:
        """A step was done: step the scheduler, and look at the rest when it has come."""
        assert self._optimizer is not None
        self.result, self._place, self._before = result, place, None
        if self.scheduler is not None:
            if (
                result.asynchronous
                and hasattr(self.scheduler, "state_dict")
                and hasattr(self.scheduler, "load_state_dict")
            ):
                self._before = self.scheduler.state_dict(), [_copied(group) for group in groups_of(self._optimizer)]
            if self._before is not None or not result.skipped:
                self.scheduler.step(**(lr_kwargs or {}))
        if not result.asynchronous:
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
            rate, norm = rates(self._optimizer)[0], self.result.grad_norm
            numbers = {"loss": self.result.loss, "lr": rate, "samples": float(place.samples), "grad_norm": norm}
            scale = {} if place.scale is None else {"loss_scale": place.scale}
            emit(self._monitor, place.step, {**numbers, **scale})

    def close(self) -> None:
        """Draw the last step, and close the curves."""
        self.settle()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A rate that is a tensor is written to where it stands."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


# Samples a second, as DeepSpeed counts and tells them.


_GIB = 1024**3
_FIRST = 2
"""Steps that are not counted: what is made once is made in them."""


class ThroughputTimer:
    """Counts steps and the time that they take; scripts tell it where an epoch ends.

    Time is the host's, from one step's end to the next, and never waits for a device: a host is at most one step ahead,
    so over many steps it is the device's time as well.
    """

    def __init__(self) -> None:
        self.epoch_count = 0
        self.micro_step_count = 0
        """Of this epoch."""
        self.global_step_count = 0
        self._samples = 0
        self._latest = (0, 0.0)
        """Samples of the last step that counts, and the seconds that it took."""
        self._began: float | None = None
        self._ended: float | None = None

    def update_epoch_count(self) -> None:
        """An epoch is over."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def count(self, samples: int, micro_steps: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        self.global_step_count += 1
        self.micro_step_count += micro_steps
        if self.global_step_count == _FIRST:
            self._began = now
        if self._ended is not None and self.global_step_count > _FIRST:
            self._samples += samples
            self._latest = (samples, now - self._ended)
        self._ended = now

    def avg_samples_per_sec(self) -> float:
        """Over all steps but the first ones; minus infinity, as in DeepSpeed, while there are no others."""
        if self._began is None or self._ended is None or self._ended <= self._began:
            return float("-inf")
        return self._samples / (self._ended - self._began)

    def lines(self) -> list[str]:
        """DeepSpeed's line about it; none as long as nothing was measured."""
        samples, took = self._latest
        if not took:
            return []
        device = get_accelerator()
        held, most = (round(size / _GIB, 2) for size in (device.memory_allocated(), device.max_memory_allocated()))
        return [
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={samples / took}, "
            f"MemAllocated={held}GB, MaxMemAllocated={most}GB"
        ]


# An engine around a model.


class Around(nn.Module):
    """Holds a model as `module`. What it does not have itself is asked of the model."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            kind = type(self).__name__
            raise AttributeError(f"neither Plait's {kind} nor the model in it has {name!r}") from None


# What a DeepSpeed engine holds, and what can be asked of it.


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    native: ManualEngine
    config: RunConfig
    raw: Mapping[str, Any]
    """DeepSpeed's own configuration, for what belongs to its loop alone."""
    batch: ResolvedBatch
    optimizer: Optimizer | None
    lr_scheduler: Any
    collate_fn: Callable[[list[Any]], Any] | None


class EngineFacts(Around):
    """Counters, sizes and settings, under DeepSpeed's names."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self._native = parts.native
        self.module = parts.native.model
        self.optimizer = parts.optimizer
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self._training_iterator: Iterator[Any] | None = None
        self.config = parts.raw
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        world = parts.native.world
        self.device = world.device
        self.global_rank, self.local_rank, self.world_size = world.rank, world.ranks.local_rank, world.size
        self.dp_world_size = world.layout.data_parallel
        self._batch = parts.batch
        self._boundary: bool | None = None
        self._within = 0
        """Micro-batches of the step under way that are done."""
        self._inside_no_sync = False
        self._updated = False
        """Whether the last `step` was to change weights."""
        self._saver = DeepSpeedSaver(parts.native)
        self._clock = StepTimers(world.device) if parts.raw.get("wall_clock_breakdown") else None
        self._every = parts.raw.get("steps_per_print")
        self.tput_timer = ThroughputTimer()
        monitor = open_monitor(parts.raw, world.rank)
        self._latest = LatestStep(parts.optimizer, parts.lr_scheduler, monitor)
        weakref.finalize(self, self._latest.close)  # few scripts call `destroy`
        self._show_scale(skipped=False)

    @property
    def skipped_steps(self) -> int:
        """Steps so far that were left out because something was not finite."""
        self._latest.settle()
        return self._latest.skipped

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._latest.settle()
        self._latest.skipped = count

    @property
    def lr_scheduler(self) -> Any:
        """What sets the rates; None where nothing does."""
        self._latest.settle()
        return self._latest.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._latest.settle()
        self._latest.scheduler = scheduler

    def train_batch_size(self) -> int:
        """Samples in a step, over all ranks."""
        return self._batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass of one rank."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self._batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes of a batch."""
        return self._batch.total, self._batch.micro, self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the size of a step by accumulating more or fewer micro-batches; between two steps."""
        each = self._batch.micro * self.dp_world_size
        if train_batch_size % each:
            message = f"{train_batch_size} is no multiple of {self._batch.micro} × {self.dp_world_size} ranks"
            raise ConfigError(Problem("train_batch_size", message, f"Give a multiple of {each}."))
        self._resize(ResolvedBatch(train_batch_size, self._batch.micro, train_batch_size // each))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change what a micro-batch counts; as many of them accumulate as before."""
        count = self._batch.accumulation
        self._resize(ResolvedBatch(micro_batch_size * count * self.dp_world_size, micro_batch_size, count))

    def _resize(self, batch: ResolvedBatch) -> None:
        if self._native.pending:
            raise TrainingError("the size of a batch can be changed between two steps, not within one")
        self._batch = batch
        self._native.accumulation = batch.accumulation

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._parts.config.strategy.stage

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 where they are not."""
        return self._parts.config.train.clip_norm or 0.0

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self._parts.config.precision.compute == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self._parts.config.precision.compute == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.fp16_enabled() and self._parts.config.precision.scaler.static is None

    def loss_scale(self) -> float:
        """The fixed loss scale of the configuration; 0 where it is dynamic."""
        return self._parts.config.precision.scaler.static or 0.0

    @property
    def cur_scale(self) -> float:
        """The loss scale of the coming step; 1 where losses are not scaled."""
        return 1.0 if self._native.scaler is None else self._native.scaler.scale

    def _show_scale(self, *, skipped: bool) -> None:
        """Scripts look for these on the optimizer, from the start and in every format."""
        if self.optimizer is not None:
            shown: Any = self.optimizer
            shown.cur_scale = shown.loss_scale = self.cur_scale
            shown.overflow = skipped

    def get_lr(self) -> list[float]:
        """Each group's rate in the coming update."""
        self._latest.settle()
        return [] if self.optimizer is None else rates(self.optimizer)

    def get_mom(self) -> list[Any]:
        """Each group's betas, or its momentum."""
        self._latest.settle()
        return [] if self.optimizer is None else momenta(self.optimizer)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients over all ranks, before clipping; None before the first step."""
        return None if self._latest.result is None else self._latest.result.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed weights."""
        return self._updated and self._latest.result is not None and not self._latest.result.skipped

    def steps_per_print(self) -> int | None:
        """Steps between two lines."""
        return self._every

    def wall_clock_breakdown(self) -> bool:
        """Whether times are printed."""
        return self._clock is not None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing more to do where `compile.deepcompile` is true; otherwise it comes too late, and is an error."""
        if not self.is_compiled:
            raise TrainingError(
                "engine.compile() comes after the model was spread, and it is compiled before: write "
                '`"compile": {"deepcompile": true}` in the configuration'
            )

    @property
    def is_compiled(self) -> bool:
        """Whether `initialize` had the model compiled."""
        return self._parts.config.strategy.compile.enabled

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
        """A loader of this rank's share of a data set, in micro-batches; in order unless the route is `train`."""
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._batch.micro,
            self._native.world,
            collate_fn=collate_fn or self._parts.collate_fn,
            data_sampler=data_sampler,
            shuffle=route == "train",
            drop_last=bool(self._parts.raw.get("dataloader_drop_last", False)),
            num_local_io_workers=num_local_io_workers,
        )


class DeepSpeedEngine(EngineFacts):
    """A model under training. What the model itself offers can be asked of the engine, too."""

    # ---- the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model says; its arguments are brought to the device."""
        if self._clock is None:
            return self._native.forward(*inputs, **kwargs)
        with self._clock.measure("fwd"):
            return self._native.forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward through this rank's mean loss of one micro-batch; returns the loss as it counts in the step."""
        self._need_optimizer("backward")
        share = self._native.accumulation
        # The engine divides by the number of micro-batches, whoever did so before.
        counted = loss if scale_wrt_gas or share == 1 else loss * share
        last = self.is_gradient_accumulation_boundary() and not self._inside_no_sync
        if self._clock is None:
            self._native.backward(counted, last=last, retain_graph=retain_graph)
        else:
            with self._clock.measure("bwd"):
                self._native.backward(counted, last=last, retain_graph=retain_graph)
        return loss / share if scale_wrt_gas and share != 1 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch and, at a boundary, update the weights and step the scheduler."""
        self._need_optimizer("step")
        if self._inside_no_sync:
            raise TrainingError("engine.step() was called inside engine.no_sync(): leave the block first")
        self._updated = boundary = self.is_gradient_accumulation_boundary()
        if boundary:
            self._latest.settle()  # the rates of this update depend on it
            if self._clock is None:
                result = self._native.step()
            else:
                with self._clock.measure("step"):
                    result = self._native.step()
            self._count(result, lr_kwargs)
        if self._clock is not None:
            self._say(self._clock.take(boundary=boundary))
        self.micro_steps += 1
        self._within = 0 if boundary else self._within + 1

    def _count(self, result: StepResult, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take note of an update, or of one that was skipped."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        scale = None
        if self._native.scaler is not None:
            self._show_scale(skipped=result.skipped)
            scale = self.cur_scale
        self._latest.take(result, TrainingPosition(self.global_steps, self.global_samples, scale), lr_kwargs)
        self.tput_timer.count(self.train_batch_size(), self._native.accumulation)
        assert self.optimizer is not None
        if self._every and self.global_steps % self._every == 0:
            line = progress_line(self.global_steps, self.skipped_steps, self.optimizer)
            self._say([f"[Rank 0] {line}", *self.tput_timer.lines()])

    def _say(self, lines: list[str]) -> None:
        if self.global_rank == 0:
            print("\n".join(lines), flush=True)

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise TrainingError(
                f"engine.{what}() needs an optimizer: give one to initialize, or write `optimizer` in the configuration"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return self._within + 1 >= self._batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide it by hand from now on; to be said before each backward pass."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of their step, at any stage; `step` comes after the block."""
        if self._inside_no_sync:
            raise TrainingError("engine.no_sync() was entered twice")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do between steps, which clear gradients themselves; in the middle of one it is an error."""
        if self._native.pending:
            raise TrainingError(
                f"engine.zero_grad() would drop the gradients of {self._native.pending} micro-batches: leave it out, "
                "engine.step() clears gradients itself"
            )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One step on as many micro-batches as accumulate, for a model that returns its loss; the mean over all ranks.

        Absent, the micro-batches come from the training data that `initialize` was given.
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
        """The mean loss over as many micro-batches and all ranks, without gradients, in evaluation mode."""
        training = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                losses = [self._loss_of(next(data_iter)).float() for _ in range(self._batch.accumulation)]
                return self._mean(torch.stack(losses))
        finally:
            self.train(training)

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Where micro-batches come from: absent, the training data, again and again."""
        if data_iter is not None:
            return data_iter
        if self._training_iterator is None:
            if self.training_dataloader is None:
                raise TrainingError("train_batch() has no data: give it an iterator, or training_data to initialize")
            self._training_iterator = RepeatingLoader(self.training_dataloader)
        return self._training_iterator

    def _loss_of(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            found = self(**batch)
        else:
            found = self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        found = found["loss"] if isinstance(found, Mapping) else getattr(found, "loss", found)
        if not isinstance(found, Tensor) or found.ndim != 0:
            raise ModelError(
                "train_batch and eval_batch need a model that returns its loss: a scalar, or one with .loss"
            )
        return found

    def _mean(self, losses: Tensor) -> Tensor:
        world, mean = self._native.world, losses.mean().double()
        if world.size > 1:
            dist.all_reduce(mean, group=world.everyone)
        return (mean / world.size).float()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Training mode, of the model."""
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> DeepSpeedEngine:
        """Evaluation mode, of the model."""
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
        """Write everything that training goes on from; every rank must call it, with the same tag.

        It can be loaded under any stage, format and number of ranks. `client_state` is rank 0's, and holds plain values
        and tensors.
        """
        scheduler = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        own = {
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "optimizer": None if self.optimizer is None else state_name(self.optimizer),
            "groups": None if self.optimizer is None else groups_of(self.optimizer),
            "lr_scheduler": scheduler,
            "client_state": dict(client_state or {}),
        }
        chosen = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self._saver.save_tag(save_dir, chosen, own, latest=save_latest, frozen=not exclude_frozen_parameters)
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
        """Go on from a checkpoint of this front end, or of DeepSpeed itself: its path, and the client state.

        Without a tag it is the one that was saved last; where nothing says which that is, (None, None).
        """
        self._latest.settle()
        if custom_load_fn is not None:
            raise ModelError("custom_load_fn is not offered: load the weights into the model before initialize")
        path = self._saver.find(load_dir, tag)
        if path is None:
            self._say([f"there is no file {Path(load_dir) / 'latest'}, so nothing is loaded; give a tag"])
            return None, None
        optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        loaded = self._saver.load(path, optimizer=optimizer, strict=load_module_strict)
        own = loaded.own
        if optimizer:
            self._native.restore(loaded.engine)
            if own.get("groups") is not None:
                assert self.optimizer is not None
                restore_groups(self.optimizer, own["groups"])
            self._show_scale(skipped=False)
        if not load_module_only:
            self.global_steps = int(own.get("global_steps", loaded.engine.get("steps", 0)))
            self.global_samples = int(own.get("global_samples", self.global_steps * self.train_batch_size()))
            self.skipped_steps = int(own.get("skipped_steps", 0))
            self.micro_steps, self._within = self.global_steps * self._batch.accumulation, 0
            state = own.get("lr_scheduler")
            if load_lr_scheduler_states and self.lr_scheduler is not None and state is not None:
                self.lr_scheduler.load_state_dict(state)
        return str(loaded.path), own.get("client_state", {})

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Gather the weights, in the format that the model computes with, into one file; every rank must call it."""
        weights, folder = self._weights(exclude_frozen_parameters), Path(save_dir)

        def write() -> None:
            with drafting(folder / save_filename) as draft:
                torch.save(weights, draft)
                draft.replace(folder / save_filename)

        on_main(self._native.world, write)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The whole weights, in host memory, on rank 0, and {} elsewhere; every rank must ask."""
        return self._weights(exclude_frozen_parameters)

    def _weights(self, exclude_frozen: bool) -> dict[str, Tensor]:
        if self._native.world.layout.pp > 1:
            raise ModelError(
                "the stages of a pipeline are not gathered into one file: call save_checkpoint, and then "
                "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict"
            )
        left_out = self._native.frozen() if exclude_frozen else frozenset[str]()
        compute = DTYPES[self._parts.config.precision.compute]
        return whole_weights(self._native, compute, lambda name: name not in left_out)

    def destroy(self) -> None:
        """See through what is being saved, and close the curves."""
        self._saver.close()
        self._latest.close()
