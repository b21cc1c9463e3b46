"""The loops of training, validation and test."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.distributed import World
from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.evaluator import build_evaluator, is_element
from plait.frontends.mmengine.hooks import SortedHooks, set_epoch
from plait.frontends.mmengine.registry import LOOPS
from plait.launch import Phase


class BaseLoop:
    """The base class of loops over a data loader."""

    def __init__(self, runner: Any, dataloader: Any) -> None:
        self.runner = runner
        self.dataloader = runner.build_dataloader(dataloader)

    def run(self) -> Any:
        """Run the loop; subclasses say what is returned."""
        raise NotImplementedError


class TrainLoop(BaseLoop):
    """The common part of training loops that count epochs and those that count iterations."""

    by_epoch: bool

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        val_begin: int,
        val_interval: int,
        dynamic_intervals: Sequence[tuple[int, int]] | None,
    ) -> None:
        super().__init__(runner, dataloader)
        self.val_begin = val_begin
        self.val_interval = val_interval
        self.stop_training = False
        """Hooks set it to true, to end training after the current epoch or iteration."""
        self._epoch = 0
        self._iter = 0
        self._skip = 0
        self._milestones = [0, *(milestone for milestone, _ in dynamic_intervals or ())]
        self._intervals = [val_interval, *(interval for _, interval in dynamic_intervals or ())]

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._epoch

    @property
    def iter(self) -> int:
        """Iterations that are complete."""
        return self._iter

    def go_to(self, epoch: int, iteration: int, skip: int) -> None:
        """Set the completed epochs and iterations; the next pass skips its first `skip` batches."""
        self._epoch, self._iter, self._skip = epoch, iteration, skip

    def _batches(self) -> Iterator[tuple[int, Any]]:
        """Yield (index, batch) for the remaining batches of a pass over the loader."""
        skip, self._skip = self._skip, 0
        loader = self.dataloader
        sampler = loader.sampler if getattr(loader, "batch_size", None) else None
        if skip and (skip_samples := getattr(sampler, "skip", None)) is not None:
            skip_samples(skip * loader.batch_size)
            yield from enumerate(self._resumed(iter(loader)), start=skip)
            return
        for index, batch in enumerate(iter(loader)):
            if index >= skip:
                if skip and index == skip:
                    self.runner.restore_generators()
                yield index, batch

    def _resumed(self, batches: Iterator[Any]) -> Iterator[Any]:
        # Creating the iterator draws a random number; the saved random state already includes that draw.
        self.runner.restore_generators()
        yield from batches

    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Train on one batch."""
        runner = self.runner
        runner.call_hook("before_train_iter", batch_idx=idx, data_batch=data_batch)
        outputs = runner.model.train_step(data_batch, optim_wrapper=runner.optim_wrapper)
        runner.call_hook("after_train_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)
        self._iter += 1

    def _validate_if_due(self, done: int, total: int) -> None:
        interval = self._intervals[bisect_right(self._milestones, done + 1) - 1]
        self.val_interval = interval
        due = done >= self.val_begin and (done % interval == 0 or done == total)
        if due and self.runner.val_loop is not None:
            self.runner.val_loop.run()


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Trains for a number of epochs."""

    by_epoch = True

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self.max_epochs = _whole("max_epochs", max_epochs)
        self.max_iters = self.max_epochs * len(self.dataloader)

    def run(self) -> Any:
        """Train to the end."""
        self.runner.call_hook("before_train")
        while self._epoch < self.max_epochs and not self.stop_training:
            self.run_epoch()
            self._validate_if_due(self._epoch, self.max_epochs)
        self.runner.call_hook("after_train")
        return self.runner.model

    def run_epoch(self) -> None:
        """Train for one epoch."""
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        for index, batch in self._batches():
            self.run_iter(index, batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Trains for a number of iterations; starts the data again when it ends."""

    by_epoch = False

    def __init__(
        self,
        runner: Any,
        dataloader: Any,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self.max_iters = _whole("max_iters", max_iters)
        self.max_epochs = 1

    def run(self) -> Any:
        """Train to the end."""
        runner = self.runner
        runner.call_hook("before_train")
        runner.call_hook("before_train_epoch")
        batches = self._endless()
        while self._iter < self.max_iters and not self.stop_training:
            runner.model.train()
            self.run_iter(self._iter, next(batches))
            self._validate_if_due(self._iter, self.max_iters)
        runner.call_hook("after_train_epoch")
        runner.call_hook("after_train")
        return runner.model

    def _endless(self) -> Iterator[Any]:
        # Compared by name, to include MMEngine's own InfiniteSampler.
        endless = type(self.dataloader.sampler).__name__ == "InfiniteSampler"
        while True:
            passes, self._skip = (0, self._iter) if endless else divmod(self._iter, len(self.dataloader))
            set_epoch(self.dataloader, passes)
            for _, batch in self._batches():
                yield batch


class EvaluationLoop(BaseLoop):
    """The common part of validation and test."""

    mode: str

    def __init__(self, runner: Any, dataloader: Any, evaluator: Any, fp16: bool = False) -> None:
        """`fp16`: run the model with torch's autocast to fp16."""
        super().__init__(runner, dataloader)
        self.evaluator = build_evaluator(evaluator)
        self.fp16 = fp16
        if (meta := getattr(self.dataloader.dataset, "metainfo", None)) is not None:
            self.evaluator.dataset_meta = meta

    def run(self) -> dict[str, float]:
        """Return the metrics of the whole data set. Every rank must call it."""
        runner, mode = self.runner, self.mode
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        runner.enter(Phase.EVALUATE)
        runner.engine.sync_buffers()
        runner.model.eval()
        self._losses: dict[str, list[float]] = {}
        for index, batch in enumerate(self.dataloader):
            self.run_iter(index, batch)
        metrics = dict(self.evaluator.evaluate(len(self.dataloader.dataset)))
        metrics.update(self._mean_losses())
        runner.enter(Phase.IDLE)
        runner.call_hook(f"after_{mode}_epoch", metrics=metrics)
        runner.call_hook(f"after_{mode}")
        return metrics

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Predict one batch, and pass the predictions to the evaluator."""
        runner, mode = self.runner, self.mode
        runner.call_hook(f"before_{mode}_iter", batch_idx=idx, data_batch=data_batch)
        autocast = torch.autocast(runner.device.type, dtype=torch.float16)
        with autocast if self.fp16 else runner.forward_context():
            outputs = getattr(runner.model, f"{mode}_step")(data_batch)
        outputs = self._without_losses(outputs)
        self.evaluator.process(data_samples=outputs, data_batch=data_batch)
        runner.call_hook(f"after_{mode}_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)

    def _without_losses(self, outputs: Any) -> Any:
        """Return the predictions without the losses that a model may append; these are collected for the log."""
        last: Any = outputs[-1] if isinstance(outputs, list | tuple) and outputs else None
        losses = getattr(last, "loss", None) if is_element(last) and list(last.keys()) == ["loss"] else None
        if not isinstance(losses, Mapping):
            return outputs
        for key, value in losses.items():
            tensors = [value] if isinstance(value, Tensor) else list(value)
            self._losses.setdefault(str(key), []).extend(float(tensor.mean()) for tensor in tensors)
        return outputs[:-1]

    def _mean_losses(self) -> dict[str, float]:
        means = {key: sum(values) / len(values) for key, values in self._losses.items()}
        total = {f"{self.mode}_loss": sum(value for key, value in means.items() if "loss" in key)} if means else {}
        return {**means, **total}


@LOOPS.register_module()
class ValLoop(EvaluationLoop):
    """The loop of validation."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(EvaluationLoop):
    """The loop of testing."""

    mode = "test"


def _whole(key: str, value: Any) -> int:
    if int(value) != value or value < 1:
        raise ConfigError(Problem(f"train_cfg.{key}", f"{value!r}", "Write a whole number from 1."))
    return int(value)


# The loops of a runner, built when first needed, and its position in them.


class RunnerLoops:
    """The configured phases of a runner (`train`, `val`, `test`); builds the loop of each when first needed."""

    def __init__(self, runner: Any, wanted: Mapping[str, Mapping[str, Any]]) -> None:
        """`wanted` has the cfg, loader and evaluator of each configured phase."""
        self._runner = runner
        self._wanted = dict(wanted)
        self._loops: dict[str, Any] = {}

    def has(self, mode: str) -> bool:
        """Whether a phase is configured."""
        return mode in self._wanted

    def made(self, mode: str) -> Any:
        """Return the loop of a phase if it is already built, else None."""
        return self._loops.get(mode)

    def loop(self, mode: str) -> Any:
        """Return the loop of a phase, built if necessary; raise `ConfigError` if the phase is not configured."""
        if mode not in self._loops:
            if mode not in self._wanted:
                names = (
                    "dataloader and cfg, and an optim_wrapper" if mode == "train" else "dataloader, cfg and evaluator"
                )
                raise ConfigError(Problem(f"{mode}_cfg", f"{mode} is not configured", f"Set its {names}."))
            self._loops[mode] = self._build(mode, dict(self._wanted[mode]))
        return self._loops[mode]

    def _build(self, mode: str, wanted: dict[str, Any]) -> Any:
        cfg = wanted.pop("cfg")
        if not isinstance(cfg, Mapping):
            return cfg
        options = dict(cfg)
        if mode != "train":
            options.setdefault("type", "ValLoop" if mode == "val" else "TestLoop")
        elif "type" not in options:
            options["type"] = "EpochBasedTrainLoop" if by_epoch(options) else "IterBasedTrainLoop"
        options.pop("by_epoch", None)
        loop = LOOPS.build(options, default_args={"runner": self._runner, **wanted})
        if not isinstance(loop, BaseLoop) and not hasattr(loop, "run"):
            raise ConfigError(Problem(f"{mode}_cfg.type", f"a {type(loop).__name__} is not a loop", "Name a loop."))
        return loop


class RunnerState:
    """Position, loops and ranks of a run, under MMEngine's names."""

    phases: RunnerLoops
    world: World
    _hooks: SortedHooks
    work_dir: str
    log_dir: Path

    @property
    def is_training(self) -> bool:
        """Whether the train loop is built."""
        return self.phases.made("train") is not None

    def _of_train_loop(self, name: str, default: int) -> int:
        loop = self.phases.made("train")
        return default if loop is None else int(getattr(loop, name))

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._of_train_loop("epoch", 0)

    @property
    def iter(self) -> int:
        """Iterations that are complete."""
        return self._of_train_loop("iter", 0)

    @property
    def max_epochs(self) -> int:
        """Epochs in total."""
        return self._of_train_loop("max_epochs", 1)

    @property
    def max_iters(self) -> int:
        """Iterations in total."""
        return self._of_train_loop("max_iters", 1)

    @property
    def val_interval(self) -> int:
        """Epochs or iterations between validations."""
        return self._of_train_loop("val_interval", 1)

    @property
    def val_begin(self) -> int:
        """The epoch or iteration of the first validation."""
        return self._of_train_loop("val_begin", 1)

    @property
    def train_loop(self) -> Any:
        """The loop of training."""
        return self.phases.loop("train")

    @property
    def val_loop(self) -> Any:
        """The loop of validation; None if it is not configured."""
        return self.phases.loop("val") if self.phases.has("val") else None

    @property
    def test_loop(self) -> Any:
        """The loop of testing; None if it is not configured."""
        return self.phases.loop("test") if self.phases.has("test") else None

    def loader_of(self, mode: str) -> Any:
        """Return the loader of `train`, `val` or `test`."""
        return self.phases.loop(mode).dataloader

    @property
    def train_dataloader(self) -> Any:
        """The loader of training."""
        return self.loader_of("train")

    @property
    def val_dataloader(self) -> Any:
        """The loader of validation."""
        return self.loader_of("val")

    @property
    def test_dataloader(self) -> Any:
        """The loader of testing."""
        return self.loader_of("test")

    @property
    def val_evaluator(self) -> Any:
        """The evaluator of validation."""
        return self.phases.loop("val").evaluator

    @property
    def test_evaluator(self) -> Any:
        """The evaluator of testing."""
        return self.phases.loop("test").evaluator

    @property
    def batch_total(self) -> int:
        """Samples per iteration, over all ranks."""
        loader = self.loader_of("train")
        size: Any = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", 1
        )
        return int(size) * self.world.layout.data_parallel

    @property
    def hooks(self) -> list[Any]:
        """The hooks, in their order."""
        return self._hooks.hooks

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.size > 1


def wanted_phases(
    train: Mapping[str, Any], val: Mapping[str, Any], test: Mapping[str, Any], *, optim_wrapper: Any, schedules: Any
) -> dict[str, dict[str, Any]]:
    """Return phase → arguments, for phases whose arguments are given; raise if a phase has only some of them."""
    phases: dict[str, dict[str, Any]] = {}
    if _complete("train", {**train, "optim_wrapper": optim_wrapper}):
        phases["train"] = dict(train)
    elif schedules is not None:
        raise ConfigError(Problem("param_scheduler", "needs a train phase", "Set train_dataloader too."))
    phases.update({mode: dict(given) for mode, given in (("val", val), ("test", test)) if _complete(mode, given)})
    return phases


def _complete(mode: str, arguments: Mapping[str, Any]) -> bool:
    names = {key: key if key == "optim_wrapper" else f"{mode}_{key}" for key in arguments}
    given = [names[key] for key, value in arguments.items() if value is not None]
    absent = [names[key] for key, value in arguments.items() if value is None]
    if given and absent:
        message = f"{', '.join(given)} given without {', '.join(absent)}; a {mode} phase needs all of them"
        raise ConfigError(Problem(absent[0], message, "Set all of them, or none."))
    return not absent


def by_epoch(train_cfg: Any) -> bool:
    """Whether a `train_cfg` counts epochs."""
    if not isinstance(train_cfg, Mapping):
        return bool(getattr(train_cfg, "by_epoch", True))
    if "type" not in train_cfg and "by_epoch" not in train_cfg:
        message = "neither `type` nor `by_epoch` is set"
        raise ConfigError(Problem("train_cfg.by_epoch", message, "Write by_epoch=True, max_epochs=…"))
    named = str(getattr(train_cfg.get("type"), "__name__", train_cfg.get("type", "Epoch")))
    return bool(train_cfg.get("by_epoch", "Iter" not in named))
