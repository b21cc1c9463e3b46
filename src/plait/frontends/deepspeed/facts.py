"""What a DeepSpeed engine holds, and what can be asked of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import Dataset

from plait.config import ResolvedBatch, RunConfig
from plait.errors import ConfigError, Problem, TrainingError
from plait.frontends.deepspeed import progress
from plait.frontends.deepspeed.around import Around
from plait.frontends.deepspeed.latest import LatestStep
from plait.frontends.deepspeed.loader import DeepSpeedDataLoader
from plait.frontends.deepspeed.saving import Saver
from plait.frontends.deepspeed.throughput import ThroughputTimer
from plait.strategy import ManualEngine


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
        self._saver = Saver(parts.native, parts.config.checkpoint)
        self._clock = progress.Clock(world.device) if parts.raw.get("wall_clock_breakdown") else None
        self._every = parts.raw.get("steps_per_print")
        self.tput_timer = ThroughputTimer()
        monitor = progress.open_monitor(parts.raw, world.rank)
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
        return [] if self.optimizer is None else progress.rates(self.optimizer)

    def get_mom(self) -> list[Any]:
        """Each group's betas, or its momentum."""
        self._latest.settle()
        return [] if self.optimizer is None else progress.momenta(self.optimizer)

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
