"""The checkpoints of MMEngine's runners: `load_from`, `resume` and saving.

They are Plait checkpoints. The state of MMEngine's own objects (schedules, parameter groups, message hub, values that
hooks added) is stored under the key `mmengine`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint import MANIFEST_NAME, Entry, load_into, open_checkpoint, open_source
from plait.config import to_dict
from plait.distributed import assign_full_tensor, on_main, restore_rng_state, rng_state
from plait.engine import EngineSaver, ManualEngine, resume_engine, tensors_of
from plait.errors import CheckpointError, TrainingError
from plait.frontends.mmengine.hooks import last_checkpoint, resolve
from plait.frontends.mmengine.runner.loops import RunnerState
from plait.launch import Phase

_SHOWN = 8
_PLAIN = (bool, int, float, str, tuple, type(None))
_NOT_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Keys of a parameter group that are not saved: its parameters, and which implementation torch uses."""


class MMEngineSaver(EngineSaver):
    """Writes and reads the checkpoints of one runner."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.engine)
        self._runner = runner
        self._generators: dict[str, Tensor] | None = None

    # ---- writing

    def save_at(
        self,
        path: Path,
        position: Mapping[str, int],
        *,
        optimizer: bool = True,
        schedulers: bool = True,
        meta: Mapping[str, Any] | None = None,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; `position` has its epoch and iteration. Every rank must call it.

        `tidy` is called on one rank when the checkpoint is complete.
        """
        runner = self._runner

        def contents() -> tuple[dict[str, Entry], dict[str, Any]]:
            tensors = tensors_of(self.engine)
            if not optimizer:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optim.")}
            return {**tensors, **self._hook_tensors()}, self._state(position, schedulers=schedulers, meta=meta)

        runner.enter(Phase.SAVE)
        on_main(runner.world, lambda: path.parent.mkdir(parents=True, exist_ok=True))
        self.save(path, contents, tidy=tidy)
        runner.enter(Phase.IDLE)

    def _state(self, position: Mapping[str, int], *, schedulers: bool, meta: Any) -> dict[str, Any]:
        runner = self._runner
        mmengine: dict[str, Any] = {
            "meta": {"seed": runner.seed, "experiment_name": runner.experiment_name, **position, **(meta or {})},
            "message_hub": runner.message_hub.state_dict(),
        }
        if schedulers:
            mmengine["param_schedulers"] = [scheduler.state_dict() for scheduler in runner.param_schedulers]
            mmengine["param_groups"] = [_settings(group) for group in runner.optim_wrapper.param_groups]
        runner.call_hook("before_save_checkpoint", checkpoint=mmengine)
        try:
            json.dumps(mmengine)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"a hook added a value to the checkpoint that JSON cannot hold: {error}; add numbers and strings only"
            ) from error
        config = to_dict(runner.config)
        config.pop("optim", None)  # not saved: the optim wrapper has the optimizer
        return {
            "engine": self.engine.state(),
            "epoch": position["epoch"],
            "step_in_epoch": position["step_in_epoch"],
            "batch_total": position["batch_total"],
            "best": None,
            "hooks": {name: {} for name in self._hooks()},
            "config": config,
            "mmengine": mmengine,
        }

    def _hooks(self) -> dict[str, Any]:
        """Return the hooks that have tensors, by the name of these tensors in a checkpoint."""
        return {hook.state_name: hook for hook in self._runner.hooks if hasattr(hook, "state_name")}

    def _hook_tensors(self) -> dict[str, Tensor]:
        return {
            f"hook.{name}.{key}": tensor
            for name, hook in self._hooks().items()
            for key, tensor in hook.tensors(self._runner).items()
        }

    # ---- reading

    def resume(self, name: str | Path) -> None:
        """Resume from a checkpoint: weights, optimizer, schedules, position and random state."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        if not (path / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{path} has no state to resume from: `plait convert {path} NEW --to plait` makes a checkpoint of it, "
                "and load_from loads its weights"
            )
        runner.enter(Phase.LOAD)
        on_main(world, lambda: open_checkpoint(path))  # so that only one rank reports an invalid checkpoint
        checkpoint = open_checkpoint(path)
        state, stored = checkpoint.manifest.state, checkpoint.index.tensors
        if "engine" not in state or not any(key.startswith("optim.") for key in stored):
            raise CheckpointError(f"{path} holds weights only: set resume=False, and load_from loads them")
        hook_tensors = {key: tensor for key, tensor in self._hook_tensors().items() if key in stored}
        left_out = () if hook_tensors else ("hook.",)
        resume_engine(self.engine, checkpoint, more=hook_tensors, ignore=left_out, warn=runner.logger.warning)
        if checkpoint.manifest.world_size == world.size and f"rng.{world.rank}.torch" in stored:
            self._generators = rng_state(runner.device)
        self._restore(state, path)
        runner.enter(Phase.IDLE)

    def restore_generators(self) -> None:
        """Restore the random state of the checkpoint that was resumed; do nothing if there is none."""
        if self._generators is not None:
            restore_rng_state(self._generators, self._runner.device)

    def _restore(self, state: Mapping[str, Any], path: Path) -> None:
        runner = self._runner
        mmengine = dict(state.get("mmengine", {}))
        runner.message_hub.load_state_dict(mmengine.get("message_hub", {}))
        saved = mmengine.get("param_groups")
        if saved is not None:
            groups = runner.optim_wrapper.param_groups
            if len(saved) != len(groups):
                raise CheckpointError(
                    f"{path} has {len(saved)} parameter groups, but this run has {len(groups)}: keep paramwise_cfg"
                )
            for group, settings in zip(groups, saved, strict=True):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})
        schedulers = mmengine.get("param_schedulers", [])
        if schedulers and len(schedulers) != len(runner.param_schedulers):
            count = len(runner.param_schedulers)
            raise CheckpointError(
                f"{path} has {len(schedulers)} schedules, but this run has {count}: keep param_scheduler"
            )
        for scheduler, position in zip(runner.param_schedulers, schedulers, strict=False):
            scheduler.load_state_dict(position)
        runner.set_position(int(state.get("epoch", 0)), int(state.get("step_in_epoch", 0)), state, path)
        runner.call_hook("after_load_checkpoint", checkpoint=mmengine)

    def load_weights(self, name: str | Path) -> None:
        """Load the weights of a checkpoint of any format; log the names that do not fit, and leave them unchanged."""
        runner, world = self._runner, self._runner.world
        path = on_main(world, lambda: resolve(name))
        tensors = {key: value for key, value in self.engine.state_tensors().items() if key.startswith("model.")}
        meta: dict[str, Any] = {}
        if (path / MANIFEST_NAME).exists():
            checkpoint = open_checkpoint(path)
            meta = checkpoint.manifest.state.get("mmengine", {}).get("meta", {})
            others = ("optim.", "rng.", "hook.")
            rows = load_into(checkpoint, tensors, world=world, ignore=others, partial=("model.*",))
            left_out = [row.name for row in rows]
        else:
            left_out = _fill(path, tensors)
        self.engine.state_loaded()
        missing = [key for key in left_out if key in tensors]
        if missing and len(missing) == len(tensors):
            raise CheckpointError(f"{path} has no weight whose name and shape fit this model")
        if left_out:
            names = ", ".join(key.removeprefix("model.") for key in left_out[:_SHOWN])
            more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
            runner.logger.warning(f"not loaded from {path}, missing or of another shape: {names}{more}")
        runner.call_hook("after_load_checkpoint", checkpoint={"meta": meta})


def _fill(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill tensors from a checkpoint of another framework; return names that only one has or whose shapes differ."""
    with open_source(path) as source:
        entries = {name: entry for name, entry in source.entries.items() if name.startswith("model.")}
        fitting = [name for name, t in tensors.items() if name in entries and entries[name].shape == t.shape]
        for name in fitting:
            assign_full_tensor(tensors[name], source.read(name))
    return sorted((tensors.keys() | entries.keys()) - set(fitting))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group, without its parameters."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in _NOT_SETTINGS and isinstance(value, _PLAIN)
    }


# `load_from`, `resume` and `save_checkpoint` of a runner.


class Checkpoints(RunnerState):
    """`load_from`, `resume` and saving, under MMEngine's names."""

    saver: MMEngineSaver
    logger: logging.Logger
    _resume: str | Path | bool
    _load_from: str | Path | None
    _loaded: bool

    @property
    def engine(self) -> ManualEngine:
        """The engine of the model."""
        raise NotImplementedError

    def setup(self) -> None:
        """Prepare the model and its optimizer on an engine, once."""
        raise NotImplementedError

    def load_or_resume(self) -> None:
        """Load or resume a checkpoint as `load_from` and `resume` say; a second call does nothing."""
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
        """Resume from a checkpoint; without a train phase, only load its weights."""
        if not self.phases.has("train"):
            self.load_checkpoint(filename)
            return
        self.phases.loop("train")
        self.setup()
        self.saver.resume(filename)
        self.logger.info(f"resumed epoch: {self.epoch}, iter: {self.iter}")

    def load_checkpoint(self, filename: str | Path) -> None:
        """Load the weights of a checkpoint."""
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
        """Write a checkpoint.

        `by_epoch`: true at the end of an epoch, false at the end of an iteration, that the loop has not counted yet;
        None if it is already counted.
        """
        loop = self.phases.loop("train")
        self.setup()
        epoch = loop.epoch + (by_epoch is True and loop.by_epoch)
        iteration = loop.iter + (by_epoch is False)
        step = 0 if by_epoch is True and loop.by_epoch else iteration
        if loop.by_epoch and step:
            step = iteration - loop.epoch * len(loop.dataloader)
        position = {"epoch": epoch, "iter": iteration, "step_in_epoch": step, "batch_total": self.batch_total}
        self.saver.save_at(
            Path(out_dir) / filename.removesuffix(".pth"),
            position,
            optimizer=save_optimizer,
            schedulers=save_param_scheduler,
            meta=meta,
            tidy=tidy,
        )

    def set_position(self, epoch: int, step: int, state: Mapping[str, Any], path: Path) -> None:
        """Set the position in the data to that of a checkpoint."""
        loop = self.phases.loop("train")
        saved = state.get("batch_total", self.batch_total)
        if step and saved != self.batch_total:
            raise TrainingError(
                f"{path} was saved within an epoch, with batches of {saved} samples over all ranks, but this run has "
                f"{self.batch_total}: keep batch_size × ranks, or resume from the end of an epoch"
            )
        iteration = epoch * len(loop.dataloader) + step if loop.by_epoch else step
        loop.go_to(epoch, iteration, step if loop.by_epoch else 0)

    def restore_generators(self) -> None:
        """Restore the random state of the checkpoint; loops call it after restarting an interrupted pass."""
        self.saver.restore_generators()
