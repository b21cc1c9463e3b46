"""What a checkpoint of a run holds, and when one is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.checkpoint import CheckpointFolder, entries, load_into, read_manifest, save_checkpoint, verify
from plait.config import to_dict
from plait.errors import CheckpointError
from plait.runner.best import Best
from plait.spec import EventKind
from plait.world import restore_rng_state, rng_state

if TYPE_CHECKING:
    from plait.runner.runner import Runner


class Saver:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, runner: Runner) -> None:
        config = runner.config.checkpoint
        self._runner = runner
        self._config = config
        self.folder = CheckpointFolder(Path(runner.config.work_dir) / "checkpoints")
        self.best = Best(config.best.metric, config.best.mode) if config.best is not None else None
        self._saved_step: int | None = None

    def refuse_to_overwrite(self) -> None:
        """A run that starts over must not mix its checkpoints with those of an earlier one."""
        newest = self.folder.newest()
        if newest is not None and self._config.resume is None:
            raise CheckpointError(
                f"work_dir {self._runner.config.work_dir!r} already holds a run, saved at {newest.name}; "
                "set checkpoint.resume=auto to go on with it, or choose another work_dir"
            )

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of this moment, unless there is one; every rank must call it."""
        runner, step = self._runner, self._runner.step
        target = self.folder.path_of(step)
        if self._saved_step != step:
            for hook in runner.hooks.before_save:
                hook(runner)
            start = time.perf_counter()
            size = save_checkpoint(target, self._tensors(), self._state(), step=step, world=runner.world)
            self._saved_step = step
            if runner.world.is_main:
                self.folder.link("latest", target)
            runner.emit(EventKind.SAVE, path=str(target), seconds=time.perf_counter() - start, bytes=size)
            for hook in runner.hooks.after_save:
                hook(runner)
        if runner.world.is_main:
            if best:
                self.folder.link("best", target)
            self.folder.prune(self._config.keep)

    def validated(self, metrics: Mapping[str, float]) -> None:
        """After a validation: save it if it is the best one so far."""
        if self.best is not None and self.best.improved(metrics):
            self.save(best=True)

    def _tensors(self) -> dict[str, Tensor]:
        runner = self._runner
        tensors = runner.engine.state_tensors()
        for name, tensor in rng_state(runner.world.device).items():
            tensors[f"rng.{runner.world.rank}.{name}"] = tensor
        for hook in runner.hooks.hooks:
            tensors.update(hook.tensors(runner))
        return tensors

    def _state(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "engine": runner.engine.state(),
            "epoch": runner.epoch,
            "step_in_epoch": runner.step_in_epoch,
            "batch_total": runner.batch.total,
            "best": None if self.best is None else self.best.value,
            "hooks": {name: hook.state() for name, hook in runner.hooks.named().items()},
            "config": to_dict(runner.config),
        }

    def resume(self) -> Path | None:
        """Continue from the checkpoint that `checkpoint.resume` names; returns it, or None if there is none."""
        runner, wanted = self._runner, self._config.resume
        if wanted is None:
            return None
        path = runner.world.broadcast(self.folder.find(wanted) if runner.world.is_main else None)
        if path is None:
            return None
        manifest = read_manifest(path)
        verify(path, manifest, world=runner.world)
        state = manifest.state
        runner.engine.allocate_optimizer_state(entries(manifest, "optim."))
        tensors = runner.engine.state_tensors()
        same_world = manifest.world_size == runner.world.size
        generators = rng_state(runner.world.device)
        if same_world:
            tensors.update({f"rng.{runner.world.rank}.{name}": t for name, t in generators.items()})
        for name, hook in runner.hooks.named().items():
            if name in state["hooks"]:
                tensors.update({k: t for k, t in hook.tensors(runner).items() if k in manifest.tensors})
                hook.restore(state["hooks"][name])
        load_into(path, manifest, tensors, world=runner.world, ignore=("rng.", "ema."))
        if same_world:
            restore_rng_state(generators, runner.world.device)
        runner.engine.state_loaded()
        runner.engine.restore(state["engine"])
        runner.set_position(state["epoch"], state["step_in_epoch"], samples=state["batch_total"])
        if self.best is not None:
            self.best.value = state["best"]
        if path.parent.resolve() == self.folder.root.resolve():
            self._saved_step = runner.step
        return path
