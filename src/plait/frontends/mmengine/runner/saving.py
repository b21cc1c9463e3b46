"""What a checkpoint of such a run holds, and how a run goes on from one.

It is Plait's own checkpoint, with the weights and the optimizer under their logical names; what only MMEngine knows
(position of its loops, schedules, groups, message hub, what hooks added) is beside it under `mmengine`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.checkpoint import MANIFEST_NAME, CheckpointWriter, entries, load_into, open_checkpoint, open_source
from plait.config import to_dict
from plait.distributed import assign_full_tensor, on_main, restore_rng_state, rng_state
from plait.engine import ManualEngine
from plait.errors import CheckpointError, TrainingError
from plait.frontends.mmengine.hooks import last_checkpoint, resolve
from plait.launch import Phase

if TYPE_CHECKING:
    from plait.distributed import World
    from plait.frontends.mmengine.runner.core import SortedHooks
    from plait.frontends.mmengine.runner.loops import RunnerLoops

_SHOWN = 8
_PLAIN = (bool, int, float, str, tuple, type(None))
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Of a group: what it holds, and how torch computes it, which another layout may do otherwise."""


class MMEngineSaver:
    """Writes and reads the checkpoints of one runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._writer: CheckpointWriter | None = None
        self._root: Path | None = None
        self._generators: dict[str, Tensor] | None = None

    # ---- writing

    def save(
        self,
        path: Path,
        position: Mapping[str, int],
        *,
        optimizer: bool = True,
        schedulers: bool = True,
        meta: Mapping[str, Any] | None = None,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; every rank must call it. `tidy` is called once it is complete, on one rank."""
        runner = self._runner
        self.wait()
        runner.enter(Phase.SAVE)
        on_main(runner.world, lambda: path.parent.mkdir(parents=True, exist_ok=True))
        runner.engine.sync_buffers()
        if self._root != path.parent:
            self.close()
            self._root = path.parent
        if self._writer is None:
            background = runner.config.checkpoint.async_save
            self._writer = CheckpointWriter(path.parent, runner.world, background=background)
        with runner.engine.evaluation_weights():
            tensors = runner.engine.state_entries()
            if not optimizer:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim.")}
            tensors.update(self._hook_tensors())
            for name, tensor in rng_state(runner.device).items():
                tensors[f"rng.{runner.world.rank}.{name}"] = tensor
            state = self._state(position, schedulers=schedulers, meta=meta)
            self._writer.save(path, tensors, state, step=runner.engine.steps, tidy=tidy)
        runner.enter(Phase.IDLE)

    def _state(self, position: Mapping[str, int], *, schedulers: bool, meta: Any) -> dict[str, Any]:
        runner = self._runner
        added: dict[str, Any] = {
            "meta": {"seed": runner.seed, "experiment_name": runner.experiment_name, **position, **(meta or {})},
            "message_hub": runner.message_hub.state_dict(),
        }
        if schedulers:
            added["param_schedulers"] = [scheduler.state_dict() for scheduler in runner.param_schedulers]
            added["param_groups"] = [_numbers(group) for group in runner.optim_wrapper.param_groups]
        runner.call_hook("before_save_checkpoint", checkpoint=added)
        try:
            json.dumps(added)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"a hook put something into the checkpoint that JSON cannot hold: {error}; put numbers and texts there"
            ) from error
        description = to_dict(runner.config)
        description.pop("optim", None)  # it is that of the optim wrapper
        return {
            "engine": runner.engine.state(),
            "epoch": position["epoch"],
            "step_in_epoch": position["step_in_epoch"],
            "batch_total": position["batch_total"],
            "best": None,
            "hooks": {name: {} for name in self._hooks()},
            "config": description,
            "mmengine": added,
        }

    def _hooks(self) -> dict[str, Any]:
        """Hooks with tensors of their own, by the name under which a checkpoint has them."""
        return {hook.state_name: hook for hook in self._runner.hooks if hasattr(hook, "state_name")}

    def _hook_tensors(self) -> dict[str, Tensor]:
        tensors = {name: hook.tensors(self._runner) for name, hook in self._hooks().items()}
        return {
            f"hook.{name}.{key}": tensor
            for name, hook_tensors in tensors.items()
            for key, tensor in hook_tensors.items()
        }

    # ---- reading

    def resume(self, name: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, schedules, position and random numbers."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        if not (path / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{path} holds no state to go on from: `plait convert {path} NEW --to plait` makes a checkpoint of it, "
                "and load_from takes its weights"
            )
        runner.enter(Phase.LOAD)
        on_main(world, lambda: open_checkpoint(path))  # what is wrong with it is said once
        checkpoint = open_checkpoint(path)
        state = checkpoint.manifest.state
        if "engine" not in state or not any(key.startswith("optim.") for key in checkpoint.index.tensors):
            raise CheckpointError(f"{path} holds weights alone: write resume=False, which takes them by load_from")
        runner.engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        tensors = {**runner.engine.state_entries(), **self._wanted(checkpoint)}
        generators = rng_state(runner.device)
        same = checkpoint.manifest.world_size == world.size
        if same and f"rng.{world.rank}.torch" in checkpoint.index.tensors:
            tensors.update({f"rng.{world.rank}.{key}": tensor for key, tensor in generators.items()})
            self._generators = generators
        left = () if any(key.startswith("hook.") for key in tensors) else ("hook.",)
        load_into(checkpoint, tensors, world=world, ignore=("rng.", *left))
        runner.engine.state_loaded()
        runner.engine.restore(state["engine"])
        self.restore_generators()
        self._set(state, path)
        runner.enter(Phase.IDLE)

    def _wanted(self, checkpoint: Any) -> dict[str, Tensor]:
        """The tensors of hooks, where the checkpoint has them."""
        return {name: tensor for name, tensor in self._hook_tensors().items() if name in checkpoint.index.tensors}

    def restore_generators(self) -> None:
        """Put random numbers back to where the checkpoint found them."""
        if self._generators is not None:
            restore_rng_state(self._generators, self._runner.device)

    def _set(self, state: Mapping[str, Any], path: Path) -> None:
        runner = self._runner
        added = dict(state.get("mmengine", {}))
        runner.message_hub.load_state_dict(added.get("message_hub", {}))
        saved = added.get("param_groups")
        if saved is not None:
            groups = runner.optim_wrapper.param_groups
            if len(saved) != len(groups):
                raise CheckpointError(
                    f"{path} has {len(saved)} groups of parameters, and this run {len(groups)}: keep paramwise_cfg"
                )
            for group, numbers in zip(groups, saved, strict=True):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in numbers.items()})
        schedulers = added.get("param_schedulers", [])
        if schedulers and len(schedulers) != len(runner.param_schedulers):
            count = len(runner.param_schedulers)
            raise CheckpointError(f"{path} has {len(schedulers)} schedules, and this run {count}: keep param_scheduler")
        for scheduler, position in zip(runner.param_schedulers, schedulers, strict=False):
            scheduler.load_state_dict(position)
        runner.set_position(int(state.get("epoch", 0)), int(state.get("step_in_epoch", 0)), state, path)
        runner.call_hook("after_load_checkpoint", checkpoint=added)

    def load_weights(self, name: str | Path) -> None:
        """Take the weights of a checkpoint of any kind; what does not fit is told, and left."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        tensors = {key: value for key, value in runner.engine.state_tensors().items() if key.startswith("model.")}
        meta: dict[str, Any] = {}
        if (path / MANIFEST_NAME).exists():
            checkpoint = open_checkpoint(path)
            meta = checkpoint.manifest.state.get("mmengine", {}).get("meta", {})
            rest = ("optim.", "rng.", "hook.")
            rows = load_into(checkpoint, tensors, world=world, ignore=rest, partial=("model.*",))
            left = [row.name for row in rows]
        else:
            left = _fill(path, tensors)
        runner.engine.state_loaded()
        missing = [name.removeprefix("model.") for name in left if name in tensors]
        if missing and len(missing) == len(tensors):
            raise CheckpointError(f"{path} has no weight that fits this model; its names are others, or its shapes")
        if left:
            names = ", ".join(name.removeprefix("model.") for name in left[:_SHOWN])
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            runner.logger.warning(f"not loaded from {path}, missing or of another shape: {names}{more}")
        runner.call_hook("after_load_checkpoint", checkpoint={"meta": meta})

    # ---- the end

    def wait(self) -> None:
        """See a checkpoint in the background through."""
        if self._writer is not None and self._writer.busy:
            self._writer.wait()

    def close(self) -> None:
        """See through what is being written, and let go."""
        if self._writer is not None:
            self.wait()
            self._writer.close()
            self._writer = None


def _fill(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill tensors from a checkpoint that others wrote; returns the names on one side only, or of another shape."""
    with open_source(path) as source:
        entries = {name: entry for name, entry in source.entries.items() if name.startswith("model.")}
        fitting = [name for name, t in tensors.items() if name in entries and entries[name].shape == t.shape]
        for name in fitting:
            assign_full_tensor(tensors[name], source.read(name))
    return sorted((tensors.keys() | entries.keys()) - set(fitting))


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, without its parameters."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in _NOT_SETTINGS and isinstance(value, _PLAIN)
    }


# What hooks and loops may ask a runner.


class RunnerState:
    """Position, parts and ranks of a run, under MMEngine's names."""

    phases: RunnerLoops
    world: World
    _hooks: SortedHooks
    work_dir: str
    log_dir: Path

    @property
    def is_training(self) -> bool:
        """Whether there is a training under way, or was one."""
        return self.phases.made("train") is not None

    def _of_training(self, name: str, otherwise: int) -> int:
        loop = self.phases.made("train")
        return otherwise if loop is None else int(getattr(loop, name))

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._of_training("epoch", 0)

    @property
    def iter(self) -> int:
        """Iterations that are complete."""
        return self._of_training("iter", 0)

    @property
    def max_epochs(self) -> int:
        """Epochs in all."""
        return self._of_training("max_epochs", 1)

    @property
    def max_iters(self) -> int:
        """Iterations in all."""
        return self._of_training("max_iters", 1)

    @property
    def val_interval(self) -> int:
        """How often is validated."""
        return self._of_training("val_interval", 1)

    @property
    def val_begin(self) -> int:
        """From when on is validated."""
        return self._of_training("val_begin", 1)

    @property
    def train_loop(self) -> Any:
        """The loop of training."""
        return self.phases.loop("train")

    @property
    def val_loop(self) -> Any:
        """The loop of validation; None where there is nothing to validate."""
        return self.phases.loop("val") if self.phases.has("val") else None

    @property
    def test_loop(self) -> Any:
        """The loop of testing; None where there is nothing to test."""
        return self.phases.loop("test") if self.phases.has("test") else None

    def loader_of(self, mode: str) -> Any:
        """The loader of `train`, `val` or `test`."""
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
        """Samples of one iteration, over all ranks."""
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


# Where a runner's checkpoints come from, and go.


class Checkpoints(RunnerState):
    """`load_from`, `resume` and saving, under MMEngine's names."""

    saver: MMEngineSaver
    logger: logging.Logger
    _resume: str | Path | bool
    _load_from: str | Path | None
    _loaded: bool

    @property
    def engine(self) -> ManualEngine:
        """The model, made ready."""
        raise NotImplementedError

    def setup(self) -> None:
        """Make the model and its optimizer ready, unless that was done."""
        raise NotImplementedError

    def load_or_resume(self) -> None:
        """What `load_from` and `resume` ask for, once."""
        if self._loaded:
            return
        self._loaded = True
        if isinstance(self._resume, str | Path):
            self.resume(self._resume)
        elif self._resume and self._load_from is not None:
            self.resume(self._load_from)
        elif self._resume:
            latest = on_main(self.world, lambda: last_checkpoint(Path(self.work_dir)))
            self.logger.info(f"Auto resumed from the latest checkpoint {latest}.")
            if latest is not None:
                self.resume(latest)
        elif self._load_from is not None:
            self.load_checkpoint(self._load_from)

    def resume(self, filename: str | Path) -> None:
        """Go on from a checkpoint."""
        if not self.phases.has("train"):
            self.load_checkpoint(filename)
            return
        self.phases.loop("train")
        self.setup()
        self.saver.resume(filename)
        self.logger.info(f"resumed epoch: {self.epoch}, iter: {self.iter}")

    def load_checkpoint(self, filename: str | Path) -> None:
        """Take a checkpoint's weights."""
        self.setup()
        self.saver.load_weights(filename)
        self.logger.info(f"Load checkpoint from {filename}")

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool | None = True,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint. `by_epoch`: at the end of an epoch, or of an iteration, that is about to be counted."""
        loop = self.phases.loop("train")
        self.setup()
        epoch = loop.epoch + (by_epoch is True and loop.by_epoch)
        iteration = loop.iter + (by_epoch is False)
        step = 0 if by_epoch is True and loop.by_epoch else iteration
        if loop.by_epoch and step:
            step = iteration - loop.epoch * len(loop.dataloader)
        position = {"epoch": epoch, "iter": iteration, "step_in_epoch": step, "batch_total": self.batch_total}
        self.saver.save(
            Path(out_dir) / filename.removesuffix(".pth"),
            position,
            optimizer=save_optimizer,
            schedulers=save_param_scheduler,
            meta=meta,
            tidy=tidy,
        )

    def set_position(self, epoch: int, step: int, state: Mapping[str, Any], path: Path) -> None:
        """Go on at a position of the data that a checkpoint names."""
        loop = self.phases.loop("train")
        saved = state.get("batch_total", self.batch_total)
        if step and saved != self.batch_total:
            raise TrainingError(
                f"{path} was saved in the middle of a pass, with batches of {saved} samples over all ranks, and here "
                f"they have {self.batch_total}: keep batch_size × ranks, or go on from the end of an epoch"
            )
        iteration = epoch * len(loop.dataloader) + step if loop.by_epoch else step
        loop.go_to(epoch, iteration, step if loop.by_epoch else 0)

    def restore_generators(self) -> None:
        """Random numbers as the checkpoint found them, once a pass that was interrupted is under way again."""
        self.saver.restore_generators()
