"""Checkpoints of a run: what they contain, when they are written, how a run resumes; the lock of its folder."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from plait.atomic_write import write_atomically
from plait.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    Entry,
    Saved,
    build_storage,
    collective_call,
    entries,
    find_node_local,
    nothing_to_fetch,
    open_checkpoint,
)
from plait.config import RunConfig, listed, show, to_dict, to_yaml
from plait.distributed import on_main
from plait.engine import FrozenTensors, naming_state, resume_engine, stored_value, tensors_of
from plait.errors import CheckpointError, ConfigError, Problem
from plait.launch import Phase
from plait.monitor import EventKind
from plait.trainer.hooks import Best, Hook

if TYPE_CHECKING:
    from torch import Tensor

    from plait.checkpoint import Fetch
    from plait.trainer.runner import Runner

# Resuming.


_NOT_ORDER = frozenset({"workers", "pin_memory", "drop_last", "cache", "tokenizer", "document_mask", "augment"})
"""Keys of the section `data` that change neither the samples nor their order."""


def resume(runner: Runner, saver: RunSaver) -> Path | None:
    """Resume from the checkpoint that `checkpoint.resume` names. Return its folder, or None if there is none."""
    source = _find(runner, saver)
    return None if source is None else _load(runner, saver, *source)


def go_back(runner: Runner, saver: RunSaver, path: Path) -> None:
    """Load an earlier checkpoint of this run, while it is running."""
    source = _find_one(runner, saver, str(path))
    assert source is not None  # a path that does not exist has raised
    _load(runner, saver, *source)


def _load(runner: Runner, saver: RunSaver, checkpoint: Checkpoint, fetch: Fetch) -> Path:
    state = checkpoint.manifest.state
    hooks, saved_hooks = runner.hooks.named(), state.get("hooks") or {}
    more: dict[str, Tensor] = {}
    for name in hooks.keys() & saved_hooks.keys():
        hooks[name].allocate(runner, entries(checkpoint.index, f"hook.{name}."))
        more.update(saver.hook_tensors(name, hooks[name]))
        with naming_state(checkpoint, f"hooks.{name}"):
            hooks[name].restore(saved_hooks[name])
    left = sorted(saved_hooks.keys() - hooks.keys())
    patterns = runner.config.checkpoint.partial
    resume_engine(
        runner.engine,
        checkpoint,
        more=more,
        ignore=tuple(f"hook.{name}." for name in left),
        partial=patterns,
        fetch=fetch,
        channel=saver.writer.channel if "frozen" in state else None,
        warn=runner.warn,
    )
    _report_hooks_left_out(runner, checkpoint, left)
    _refuse_another_tokenizer(runner, checkpoint, patterns)
    with naming_state(checkpoint, "step_in_epoch and batch_total"):
        _set_position(runner, state)
    _warn_of_changed_order(runner, checkpoint)
    if saver.best is not None:
        saver.best.value = state.get("best")
    return checkpoint.folder


def _find(runner: Runner, saver: RunSaver) -> tuple[Checkpoint, Fetch] | None:
    sources = (_find_one(runner, saver, wanted) for wanted in saver.wanted)
    return next((source for source in sources if source is not None), None)


def _find_one(runner: Runner, saver: RunSaver, wanted: str) -> tuple[Checkpoint, Fetch] | None:
    if not runner.config.checkpoint.node_local:

        def find() -> Path | None:
            saver.folder.sweep()
            return saver.folder.find(wanted if saver.storage is None else saver.storage.fetch(wanted))

        path = on_main(runner.world, find)
        if path is None:
            return None
        on_main(runner.world, lambda: open_checkpoint(path))  # an error is raised once, by rank 0
        return open_checkpoint(path), nothing_to_fetch
    channel, disks = saver.writer.channel, saver.writer.disks
    collective_call(channel, saver.folder.sweep if disks.is_lead else None, "the checkpoint folder cannot be used")
    if (storage := saver.storage) is not None:
        fetch = partial(storage.fetch, wanted) if disks.is_lead else None
        wanted = collective_call(channel, fetch, "the checkpoint storage cannot be used") or wanted
    scattered = find_node_local(saver.folder, wanted, channel, disks)
    return None if scattered is None else (scattered.checkpoint, scattered.fetch)


def _report_hooks_left_out(runner: Runner, checkpoint: Checkpoint, hooks: list[str]) -> None:
    for hook in hooks:
        has_tensors = any(key.startswith(f"hook.{hook}.") for key in checkpoint.index.tensors)
        if checkpoint.manifest.state["hooks"][hook] or has_tensors:
            name = checkpoint.folder.name
            runner.warn(f"{name} holds the state of the hook {hook!r}, which this run does not have: it is left out")


def _set_position(runner: Runner, state: Mapping[str, Any]) -> None:
    if "epoch" in state:
        runner.set_position(state["epoch"], state["step_in_epoch"], samples=state["batch_total"])
    elif "engine" in state:
        # Written by a custom loop or another framework, without a position in the data.
        whole = runner.steps_per_epoch
        epoch, step = divmod(runner.step, whole) if whole else (0, runner.step)
        runner.set_position(epoch, step, samples=runner.batch.total)
        text = f"the checkpoint has no position in the data: it is set to that after {runner.step} steps of this run"
        runner.emit(EventKind.MESSAGE, level="warning", text=text)


def _warn_of_changed_order(runner: Runner, checkpoint: Checkpoint) -> None:
    """Warn if a run resumes within an epoch, and the samples or their order have changed since.

    The samples that are skipped then are not those that the saved run had read.
    """
    if "epoch" not in checkpoint.manifest.state or runner.step_in_epoch in (0, runner.steps_per_epoch):
        return  # _set_position has warned already
    before, now = checkpoint.manifest.state.get("config") or {}, to_dict(runner.config)
    sections: list[Mapping[str, Any]] = [config.get("data") or {} for config in (before, now)]
    keys = ["seed", *(f"data.{key}" for key in dict.fromkeys((*sections[0], *sections[1])) if key not in _NOT_ORDER)]
    values = {key: (stored_value(before, key), stored_value(now, key)) for key in keys}
    changed = [f"{key}: {show(was)}" for key, (was, is_now) in values.items() if was != is_now]
    samples = stored_value(checkpoint.manifest.state, "data.samples")
    if samples is not None and samples != data_facts(runner)["samples"]:
        changed.append(f"{samples} samples, and not {data_facts(runner)['samples']}")
    if changed:
        runner.warn(
            f"{checkpoint.folder.name} was saved within an epoch of a run with {listed(changed)}, so the order of "
            "samples may differ: in the rest of this epoch some may be read twice, and others not at all"
        )


def data_facts(runner: Runner) -> dict[str, Any]:
    """Return the facts about the training data that a checkpoint stores, since the files behind it may change."""
    dataset = getattr(runner.loader, "dataset", None)
    known = runner.steps_per_epoch is not None and hasattr(dataset, "__len__")
    return {
        "samples": len(dataset) if known and dataset is not None else None,
        "tokenizer": getattr(dataset, "tokenizer_digest", "") or None,
    }


def _refuse_another_tokenizer(runner: Runner, checkpoint: Checkpoint, patterns: tuple[str, ...]) -> None:
    """Raise if the tokenizer is not the checkpoint's (with `checkpoint.partial`, warn).

    This happens if Plait trains the tokenizer on the text, and the text has changed.
    """
    before, now = stored_value(checkpoint.manifest.state, "data.tokenizer"), data_facts(runner)["tokenizer"]
    if before is None or now is None or before == now:
        return
    message = (
        f"{checkpoint.folder} was trained on tokens of another tokenizer ({before[:12]}) than the one of `data` "
        f"({now[:12]}), so its embeddings belong to other tokens"
    )
    if not patterns:
        raise CheckpointError(
            f"{message}. The text or data.vocab_size has changed: write `data.tokenizer` with the tokenizer.json of "
            "that run; to resume anyway, name the new parameters in `checkpoint.partial`"
        )
    runner.warn(message)


# The folder of a run, which only one run at a time writes to.


_MARK = ".running"
"""A file with the host and process id of the run that writes here. If no process has it locked, that run was killed."""
_LOCK_TIMEOUT_S = 5.0
"""How long to wait for the lock: a process that was just killed may still hold it."""


class WorkDir:
    """`work_dir`, created and locked by rank 0."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._mark: TextIO | None = None

    def make(self) -> None:
        """Create the folder if needed. Raise `ConfigError` if it cannot be written to."""
        with self._writing():
            try_to_write(self.path)

    def acquire(self, config: RunConfig) -> None:
        """Lock the folder until `release`, and write `config.yaml`. Raise `ConfigError` if another run holds the lock.

        The lock belongs to this process and not to its forks, so it is released when rank 0 ends, even if killed. A
        lock of another host is ignored: that host may have failed without releasing it.
        """
        self.make()
        with self._writing():
            mark = (self.path / _MARK).open("a+", encoding="utf-8")
            try:
                _lock(mark)
            except (BlockingIOError, PermissionError):
                self._refuse(mark)
            except OSError:
                mark.close()  # a file system without locks
            else:
                mark.truncate(0)
                mark.write(f"{socket.gethostname()} {os.getpid()}")
                mark.flush()
                self._mark = mark
            write_atomically(self.path / "config.yaml", to_yaml(config))

    def release(self) -> None:
        """Unlock the folder."""
        if self._mark is not None:
            (self.path / _MARK).unlink(missing_ok=True)
            self._mark.close()
            self._mark = None

    def _refuse(self, mark: TextIO) -> None:
        with mark:
            mark.seek(0)
            host, _, process = mark.read().partition(" ")
        if host == socket.gethostname():
            message = f"another run writes to {str(self.path)!r} now, process {process} of this machine"
            raise ConfigError(Problem("work_dir", message, "Wait for its end, stop it, or choose another `work_dir`."))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{str(self.path)!r} cannot be written to: {error.strerror}"
            raise ConfigError(Problem("work_dir", message, "Choose another one.")) from error


def try_to_write(folder: Path) -> None:
    """Create a folder and write a test file to it. Raise `OSError` if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()


def _lock(mark: TextIO) -> None:
    """Lock a file, waiting up to `_LOCK_TIMEOUT_S`."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.lockf(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


class RunSaver:
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
        self._frozen: FrozenTensors | None = None
        self._saved_step: int | None = None
        self._failures = 0
        """Consecutive saves that have failed."""

    @property
    def writer(self) -> CheckpointWriter:
        """The writer, created on first use; a collective, so every rank must use it first at the same point."""
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
        """What to resume from, in order of preference. Ranks that the launcher restarted try `auto` first."""
        again = ["auto"] if self._runner.world.ranks.attempt else []
        return (*again, *([self._config.resume] if self._config.resume is not None else []))

    def refuse_to_overwrite(self) -> None:
        """Raise if `work_dir` holds an earlier run and this one does not resume it."""
        if not self._config.node_local:
            held = on_main(self._runner.world, self._newest_of_earlier_run)
            where = ""
        else:
            held, where = self._newest_of_any_node()
        if held is not None and not self.wanted:
            raise CheckpointError(
                f"work_dir {self._runner.config.work_dir!r} already holds a run, saved at {held}{where}; "
                "set checkpoint.resume=auto to resume it, or choose another work_dir"
            )

    def _newest_of_earlier_run(self) -> str | None:
        self.folder.sweep()
        newest = self.folder.newest()
        if newest is None and self.storage is not None:
            return self.storage.newest()
        return None if newest is None else newest.name

    def _newest_of_any_node(self) -> tuple[str | None, str]:
        """Return the newest checkpoint in the folder of the first node that has one, and a text that names the node.

        (None, "") if no node has one. A collective.
        """
        channel = self.writer.channel
        look = self._newest_of_earlier_run if self.writer.disks.is_lead else None
        newest = collective_call(channel, look, "the folder of checkpoints cannot be read")
        held = [(name, rank) for rank, name in enumerate(channel.all_gather(newest)) if name]
        return (held[0][0], f" on the node of rank {held[0][1]}") if held else (None, "")

    def check_folder(self) -> None:
        """Raise before the first step, not at the first save, if checkpoints cannot be written. A collective."""
        config = self._config
        if config.every is None and config.best is None and not config.last:
            return
        root = self.folder.root
        write = partial(try_to_write, root) if self.writer.disks.is_lead else None
        remedy = "make it writable, move what is in the way, or choose another work_dir"
        collective_call(self.writer.channel, write, f"checkpoints cannot be written to {root}: {remedy}")

    # ---- writing

    def save(self, *, best: bool = False, last: bool = False) -> None:
        """Write a checkpoint of the current step, unless there is one already. A collective.

        With `checkpoint.async_save` the checkpoint is written in the background. A failed save is logged, and training
        continues; more than `checkpoint.max_failures` failures in a row raise a `CheckpointError`. `best`: also link
        the checkpoint as the best one. `last`: wait until it is written, and raise if that fails.
        """
        runner, step = self._runner, self._runner.step
        target = self.folder.path_of(step)
        if last or self._saved_step != step or best:
            self.wait()
        if self._saved_step == step:
            if best:
                link = partial(self.folder.link, "best", target)
                what = f"{target} cannot be linked as the best one"
                collective_call(self.writer.channel, link if self.writer.disks.is_lead else None, what)
            return
        runner.engine.settle()  # raises here if too many steps were skipped
        for hook in runner.hooks.before_save:
            hook(runner)
        runner.engine.sync_buffers()
        tidy = partial(self._tidy, target, best=best)
        self._saved_step = step
        runner.enter(Phase.SAVE)
        with runner.engine.evaluation_weights():
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
        """Log that a background checkpoint is complete or has failed; does nothing if none is being written."""
        if self._writer is not None and self._writer.busy:
            self._take(self._writer.poll)

    def wait(self, *, must: bool = False) -> None:
        """Wait for a background checkpoint, if one is being written, and log it; `must`: raise if it failed."""
        if self._writer is not None and self._writer.busy:
            self._take(self._writer.wait, must=must)

    def _take(self, outcome: Callable[[], Saved | None], *, must: bool = False, over: bool = False) -> None:
        """Call `outcome`, which returns a finished save or raises, and log it.

        `must`: raise a failure. `over`: never raise one, since the run is over.
        """
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
        """Save a checkpoint if these metrics of a validation are the best so far (with `checkpoint.best`)."""
        if self.best is not None and self.best.improved(metrics):
            self.save(best=True)

    def close(self) -> None:
        """Wait for a background checkpoint, report it, and close the writer. A failed save is reported, not raised."""
        if self._writer is None:
            return
        try:
            self._take(self._writer.wait, over=True)
        except Exception as error:  # other ranks may have ended; must not hide the error that ended the run
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
    def frozen(self) -> FrozenTensors:
        """Names and digests of the frozen parameters; a collective on first use."""
        if self._frozen is None:
            names = [f"model.{name}" for name in self._runner.engine.frozen()]
            self._frozen = FrozenTensors.of(self._runner.engine, names, self.writer.channel)
        return self._frozen

    def hook_tensors(self, name: str, hook: Hook) -> dict[str, Tensor]:
        """Return the tensors of a hook by their names in a checkpoint."""
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

    # ---- resuming

    def resume(self) -> Path | None:
        """Resume from the checkpoint that `checkpoint.resume` names. Return its folder, or None if there is none."""
        path = resume(self._runner, self)
        if path is not None and path.parent.resolve() == self.folder.root.resolve():
            self._saved_step = self._runner.step
        return path

    def go_back(self, before: int) -> Path | None:
        """Load the last checkpoint saved at step `before` or earlier; return its folder, or None if there is none.

        The position in the data stays as it is. The state is saved at once, so that a run that ends now does not
        read the same data again. A collective: every rank must call it.
        """
        runner = self._runner
        runner.engine.settle()
        self.wait()
        path = on_main(runner.world, lambda: self.folder.newest(before))
        if path is None:
            return None
        position = runner.epoch, runner.step_in_epoch
        runner.enter(Phase.LOAD)
        go_back(runner, self, path)
        runner.set_position(*position, samples=runner.batch.total)
        self._saved_step = None
        self.save()
        return path
