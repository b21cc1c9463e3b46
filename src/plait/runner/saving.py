"""What a checkpoint of a run holds, and when one is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.checkpoint import CheckpointFolder, CheckpointWriter, Saved, attempt, build_storage, together
from plait.config import to_dict
from plait.errors import CheckpointError
from plait.runner.best import Best
from plait.runner.hooks import Hook
from plait.runner.place import try_to_write
from plait.runner.resuming import data_facts, go_back, resume
from plait.spec import Entry, EventKind, Phase
from plait.strategy import FrozenPart, tensors_of
from plait.world import on_main

if TYPE_CHECKING:
    from plait.runner.runner import Runner


class Saver:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, runner: Runner) -> None:
        config = runner.config.checkpoint
        self._runner = runner
        self._config = config
        self.folder = CheckpointFolder(Path(runner.config.work_dir) / "checkpoints")
        self.storage = build_storage(config.storage, self.folder)
        self.best = None
        if config.best is not None:
            self.best = Best(config.best.metric, config.best.mode, path="checkpoint.best.metric")
        self._writer: CheckpointWriter | None = None
        self._frozen: FrozenPart | None = None
        self._saved_step: int | None = None
        self._failures = 0
        """How many saves in a row have failed."""

    @property
    def writer(self) -> CheckpointWriter:
        """Made when first needed; every rank must ask for it first at the same moment."""
        if self._writer is None:
            self._writer = CheckpointWriter(
                self.folder.root,
                self._runner.world,
                background=self._config.async_save,
                node_local=self._config.node_local,
                reopen=self._config.trainable_only,
                storage=self.storage,
            )
        return self._writer

    @property
    def wanted(self) -> tuple[str, ...]:
        """What to go on from, the first that is there. Ranks that the launcher starts anew go on where they were."""
        again = ["auto"] if self._runner.world.ranks.attempt else []
        return (*again, *([self._config.resume] if self._config.resume is not None else []))

    def refuse_to_overwrite(self) -> None:
        """A run that starts over must not mix its checkpoints with those of an earlier one."""
        if not self._config.node_local:
            held = on_main(self._runner.world, self._newest_of_earlier_run)
            where = ""
        else:
            held, where = self._newest_of_any_node()
        if held is not None and not self.wanted:
            raise CheckpointError(
                f"work_dir {self._runner.config.work_dir!r} already holds a run, saved at {held}{where}; "
                "set checkpoint.resume=auto to go on with it, or choose another work_dir"
            )

    def _newest_of_earlier_run(self) -> str | None:
        self.folder.sweep()
        newest = self.folder.newest()
        if newest is None and self.storage is not None:
            return self.storage.newest()
        return None if newest is None else newest.name

    def _newest_of_any_node(self) -> tuple[str | None, str]:
        """What the folders hold that are not shared, and where; every rank must ask."""
        channel, found = self.writer.channel, [""]

        def look() -> None:
            found.append(self._newest_of_earlier_run() or "")

        failure = attempt(look) if self.writer.disks.is_lead else None
        together(channel, failure, "the folder of checkpoints cannot be looked into")
        held = [(name, rank) for rank, name in enumerate(channel.all_gather(found[-1])) if name]
        return (held[0][0], f" on the node of rank {held[0][1]}") if held else (None, "")

    def check_folder(self) -> None:
        """Find out before the first step whether this run's checkpoints can be written; every rank must ask.

        A run that goes to its end without one has been in vain.
        """
        config = self._config
        if config.every is None and config.best is None and not config.last:
            return
        root = self.folder.root
        failure = attempt(lambda: try_to_write(root)) if self.writer.disks.is_lead else None
        remedy = "make it writable, move what is in the way, or choose another work_dir"
        together(self.writer.channel, failure, f"checkpoints cannot be written to {root}: {remedy}")

    # ---- writing

    def save(self, *, best: bool = False, last: bool = False) -> None:
        """Write a checkpoint of this moment, unless there is one; every rank must call it.

        With `checkpoint.async_save` it is only begun. One that fails is told, and training goes on, until
        `checkpoint.max_failures` in a row have; the `last` one is waited for, and its failure is an error.
        """
        runner, step = self._runner, self._runner.step
        target = self.folder.path_of(step)
        if last or self._saved_step != step or best:
            self.wait()
        if self._saved_step == step:
            if best:
                link = partial(self.folder.link, "best", target)
                failure = attempt(link) if self.writer.disks.is_lead else None
                together(self.writer.channel, failure, f"{target} cannot be linked as the best one")
            return
        runner.engine.settle()  # a run that is to end because of the step under way ends here
        for hook in runner.hooks.before_save:
            hook(runner)
        runner.engine.agree_on_buffers()
        tidy = partial(self._tidy, target, best=best)
        self._saved_step = step
        runner.enter(Phase.SAVE)
        with runner.engine.weights_to_use():
            self._take(
                lambda: self.writer.save(target, self._tensors(), self._state(), step=step, tidy=tidy), must=last
            )
        if last:
            self.wait(must=True)
        runner.enter(Phase.IDLE)
        if self._saved_step == step:
            for hook in runner.hooks.after_save:
                hook(runner)

    def poll(self) -> None:
        """Take note of a checkpoint in the background that is complete by now; costs nothing while there is none."""
        if self._writer is not None and self._writer.busy:
            self._take(self._writer.poll)

    def wait(self, *, must: bool = False) -> None:
        """Wait for a checkpoint in the background, if there is one; `must`: a failure is an error."""
        if self._writer is not None and self._writer.busy:
            self._take(self._writer.wait, must=must)

    def _take(self, outcome: Callable[[], Saved | None], *, must: bool = False, over: bool = False) -> None:
        """What became of a save; `must`: a failure is an error; `over`: the run is over, so it can only be told."""
        runner = self._runner
        try:
            saved = outcome()
        except CheckpointError as error:
            self._saved_step = None
            self._failures += 1
            if must and not over:
                raise
            if self._failures > self._config.max_failures and not over:
                raise CheckpointError(
                    f"{error}\nThis is failure {self._failures} in a row, and checkpoint.max_failures is "
                    f"{self._config.max_failures}: the run ends here, before more work is lost. Remove the cause and "
                    "continue with checkpoint.resume=auto, or raise checkpoint.max_failures."
                ) from error
            left = self._config.max_failures - self._failures
            after = "training goes on" + (", and ends if the next save fails too" if left == 0 else "")
            runner.emit(EventKind.MESSAGE, level="error", text=f"{error}\n{'the run is over' if over else after}")
            return
        if saved is not None:
            self._failures = 0
            sizes = {"seconds": saved.seconds, "blocked": saved.blocked, "bytes": saved.bytes}
            runner.emit(EventKind.SAVE, path=str(saved.path), **sizes)

    def _tidy(self, target: Path, *, best: bool) -> None:
        self.folder.link("latest", target)
        if best:
            self.folder.link("best", target)
        self.folder.prune(self._config.keep, self._config.keep_every)
        if self.storage is not None and self._runner.world.rank == 0:
            link = self.folder.root / "best"
            self.storage.prune(
                self._config.keep, self._config.keep_every, link.resolve().name if link.exists() else None
            )

    def validated(self, metrics: Mapping[str, float]) -> None:
        """After a validation: save it if it is the best one so far."""
        if self.best is not None and self.best.improved(metrics):
            self.save(best=True)

    def close(self) -> None:
        """See through what is being written, and tell what became of it."""
        if self._writer is None:
            return
        try:
            self._take(self._writer.wait, over=True)
        except Exception as error:  # others may be gone already, and what ended the run is more worth telling
            text = f"the checkpoint that was being written is lost: {type(error).__name__}: {error}"
            self._runner.emit(EventKind.MESSAGE, level="error", text=text)
        self._writer.close()
        self._writer = None

    # ---- what is written

    def _tensors(self) -> dict[str, Entry]:
        runner = self._runner
        tensors = tensors_of(runner.engine)
        if self._config.trainable_only:
            frozen = self.frozen.names
            tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        for name, hook in runner.hooks.named().items():
            tensors.update(self.hook_tensors(name, hook))
        return tensors

    @property
    def frozen(self) -> FrozenPart:
        """What is not trained, by name and by value; every rank must ask for it first at the same moment."""
        if self._frozen is None:
            names = [f"model.{name}" for name in self._runner.engine.frozen()]
            self._frozen = FrozenPart.of(self._runner.engine, names, self.writer.channel)
        return self._frozen

    def hook_tensors(self, name: str, hook: Hook) -> dict[str, Tensor]:
        """The tensors of a hook, under their names in a checkpoint."""
        return {f"hook.{name}.{key}": tensor for key, tensor in hook.tensors(self._runner).items()}

    def _state(self) -> dict[str, Any]:
        runner = self._runner
        state = {
            "engine": runner.engine.state(),
            "epoch": runner.epoch,
            "step_in_epoch": runner.step_in_epoch,
            "batch_total": runner.batch.total,
            "best": None if self.best is None else self.best.value,
            "hooks": {name: hook.state() for name, hook in runner.hooks.named().items()},
            "config": to_dict(runner.config),
            "data": data_facts(runner),
        }
        if self._config.trainable_only:
            state["frozen"] = self.frozen.state()
        return state

    # ---- going on

    def resume(self) -> Path | None:
        """Continue from the checkpoint that `checkpoint.resume` names; returns it, or None if there is none."""
        path = resume(self._runner, self)
        if path is not None and path.parent.resolve() == self.folder.root.resolve():
            self._saved_step = self._runner.step
        return path

    def go_back(self, before: int) -> Path | None:
        """Take up the checkpoint that was saved last at step `before` or earlier; None if there is none.

        The place in the data stays. That is saved at once, so that a run which ends now does not meet the same data
        again. Every rank must call it.
        """
        runner = self._runner
        runner.engine.settle()
        self.wait()
        path = on_main(runner.world, lambda: self.folder.newest(before))
        if path is None:
            return None
        place = runner.epoch, runner.step_in_epoch
        runner.enter(Phase.LOAD)
        go_back(runner, self, path)
        runner.set_position(*place, samples=runner.batch.total)
        self._saved_step = None
        self.save()
        return path
