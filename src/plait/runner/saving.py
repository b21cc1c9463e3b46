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
from plait.runner.agree import on_main
from plait.runner.best import Best
from plait.runner.hooks import Hook
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
        self.best = None
        if config.best is not None:
            self.best = Best(config.best.metric, config.best.mode, path="checkpoint.best.metric")
        self._saved_step: int | None = None

    def refuse_to_overwrite(self) -> None:
        """A run that starts over must not mix its checkpoints with those of an earlier one."""
        self.folder.sweep()
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
            runner.engine.agree_on_buffers()
            size = save_checkpoint(target, self._tensors(), self._state(), step=step, world=runner.world)
            self._saved_step = step
            runner.emit(EventKind.SAVE, path=str(target), seconds=time.perf_counter() - start, bytes=size)
            for hook in runner.hooks.after_save:
                hook(runner)
        on_main(runner.world, lambda: self._tidy(target, best=best))

    def _tidy(self, target: Path, *, best: bool) -> None:
        try:
            self.folder.link("latest", target)
            if best:
                self.folder.link("best", target)
            self.folder.prune(self._config.keep)
        except OSError as error:
            raise CheckpointError(
                f"{target} is saved, but its folder cannot be kept in order: {error}; make it writable"
            ) from error

    def validated(self, metrics: Mapping[str, float]) -> None:
        """After a validation: save it if it is the best one so far."""
        if self.best is not None and self.best.improved(metrics):
            self.save(best=True)

    def _tensors(self) -> dict[str, Tensor]:
        runner = self._runner
        tensors = runner.engine.state_tensors()
        for name, tensor in rng_state(runner.world.device).items():
            tensors[f"rng.{runner.world.rank}.{name}"] = tensor
        for name, hook in runner.hooks.named().items():
            tensors.update(self._hook_tensors(name, hook))
        return tensors

    def _hook_tensors(self, name: str, hook: Hook) -> dict[str, Tensor]:
        return {f"hook.{name}.{key}": tensor for key, tensor in hook.tensors(self._runner).items()}

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
        path = on_main(runner.world, lambda: self._find(wanted))
        if path is None:
            return None
        manifest = on_main(runner.world, lambda: read_manifest(path))
        verify(path, manifest, world=runner.world)
        state = manifest.state
        self._refuse_another_optimizer(path, state)
        runner.engine.allocate_optimizer_state(entries(manifest, "optim."))
        tensors = runner.engine.state_tensors()
        same_world = manifest.world_size == runner.world.size
        generators = rng_state(runner.world.device)
        if same_world:
            tensors.update({f"rng.{runner.world.rank}.{name}": t for name, t in generators.items()})
        hooks = runner.hooks.named()
        for name in hooks.keys() & state["hooks"].keys():
            tensors.update(self._hook_tensors(name, hooks[name]))
            hooks[name].restore(state["hooks"][name])
        left = sorted(state["hooks"].keys() - hooks.keys())
        load_into(path, manifest, tensors, world=runner.world, ignore=("rng.", *(f"hook.{name}." for name in left)))
        for name in left:
            if state["hooks"][name] or any(key.startswith(f"hook.{name}.") for key in manifest.tensors):
                text = f"{path.name} holds the state of the hook {name!r}, which this run does not have: it is left out"
                runner.emit(EventKind.MESSAGE, level="warning", text=text)
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

    def _find(self, wanted: str) -> Path | None:
        self.folder.sweep()
        return self.folder.find(wanted)

    def _refuse_another_optimizer(self, path: Path, state: Mapping[str, Any]) -> None:
        saved, wanted = state["config"]["optim"]["type"], self._runner.config.optim.type
        if saved != wanted:
            raise CheckpointError(
                f"{path} was trained with {saved}, and optim.type is {wanted}: their states do not fit each other; "
                f"write `optim.type: {saved}`"
            )
