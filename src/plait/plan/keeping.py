"""What saving and loading take, by the code that does both, on tensors without values.

[Note: files that a plan does not write] The engine brings the model up to date as after loading, makes room for the
optimizer's state, and collects its state for a save: that is the code which runs, and the recorder sees it. What lies
between memory and files cannot run without files. It is reckoned from the same tensors by `plait.checkpoint.need`, from
which those who write and read have their numbers. What an offloaded optimizer has on the host is reckoned from its
buckets: a plan makes no states there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from plait.checkpoint import BLOCK, STRIP, WRITERS, Kept, in_a_row, kept, need, workers
from plait.config import AdamW8bitConfig, RunConfig
from plait.ops import PASSING
from plait.plan.recorder import END, Recorder
from plait.spec import Entry, Later, Phase
from plait.strategy import NativeEngine, OffloadedViews
from plait.world import local_part, replaced

COPY = "checkpoint copy"
"""Whose the memory is that a save in the background copies the state to; it is kept for the next."""
_SINCE_A_SAVE = (Phase.FORWARD, Phase.BACKWARD, END, Phase.REDUCE, Phase.STEP, Phase.SAVE, Phase.IDLE)
"""Peaks of a run that has saved before."""


class _Away(NamedTuple):
    """Optimizer state that lives off the device."""

    entries: list[Kept]
    """As a checkpoint has it."""
    held: float = 0.0
    """Bytes of host memory that it has between steps."""
    largest: float = 0.0
    """Bytes of the largest that a checkpoint has in another form: it is made to be saved, and read to be loaded."""
    in_files: frozenset[str] = frozenset()
    """Entries of weights that a plan has no memory for: in a run they are that of files, all in one row."""


class Keeping:
    """The checkpoints of a simulated run: loaded once it is built, saved once it has trained.

    Whoever saves means to go on from it one day, and is taken to load.
    """

    def __init__(self, engine: NativeEngine, recorder: Recorder, config: RunConfig, *, cores: int) -> None:
        """`cores`: of the host."""
        self._engine, self._recorder = engine, recorder
        self._settings, self._optim = config.checkpoint, config.optim
        self._cores, self._local_ranks = cores, engine.world.ranks.local_size
        self._ranks = engine.world.size // engine.world.layout.pp
        self.saves = self._settings.last or self._settings.every is not None or self._settings.best is not None
        self.loads = self.saves or self._settings.resume is not None

    def load(self) -> None:
        """Bring the model up to date with weights that were loaded; the optimizer's state is added by `save`."""
        if self.loads:
            self._recorder.enter(Phase.LOAD)
            self._engine.state_loaded()
            self._recorder.enter(Phase.IDLE)

    def save(self) -> dict[str, float]:
        """Collect what a checkpoint has, and make room for it as for loading; returns what an account has of both.

        The engine cannot train any more: its optimizer has lost its state.
        """
        engine, recorder, away = self._engine, self._recorder, self._away()
        if self.saves:
            recorder.enter(Phase.SAVE)
        with torch.no_grad():
            with replaced(recorder, "paused", not self.saves):
                tensors = engine.state_entries()
                entries = {name: _kept(entry, self._ranks) for name, entry in tensors.items()}
            entries |= {name: entries[name]._replace(in_a_row=True) for name in away.in_files}
            numbers = {"state": sum(each.bytes for each in (*entries.values(), *away.entries))}
            if not self.loads:
                return numbers
            frozen = {f"model.{name}" for name in engine.frozen()} if self._settings.trainable_only else set()
            written = [entry for name, entry in entries.items() if name not in frozen] + away.entries
            host = {"cores": self._cores, "ranks": self._local_ranks}
            needed = need(written, **host, background=self._settings.async_save)
            separate = engine.world.device.type != "cpu"  # otherwise the recorder sees the host
            at_once = workers(WRITERS, **host)
            lates = [entries[name].bytes for name, entry in tensors.items() if isinstance(entry, Later)]
            largest = max([*lates, away.largest])
            # See [Note: a few rows at a time] in `spec.later`; a block may have to be put together from two strips.
            wide = (min(largest, STRIP) + 2 * BLOCK * (largest > STRIP) + PASSING) * at_once if largest else 0.0
            if self.saves:
                loose = [each for name, each in tensors.items() if not entries[name].in_a_row]
                _copy_in_rows((each for each in loose if isinstance(each, Tensor)), engine.world.device.type, at_once)
                numbers |= {"written": needed.written, "host_copy": needed.copied}
                numbers["host_saving"] = needed.writing + wide
            numbers["loaded"] = self._make_room(tensors)
        there = 0.0 if separate else away.held
        return numbers | {"host_reading": needed.reading, "host_loading": wide + away.held - there}

    def _make_room(self, tensors: dict[str, Entry]) -> float:
        """What room for an optimizer's state takes on the device; the one that is there, in `tensors`, is given up."""
        shapes = {
            name.removeprefix("optim."): (tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
            if name.startswith("optim.")
        }
        tensors.clear()
        self._engine.updater.optimizer.state.clear()
        with replaced(self._recorder, "trail", None):
            before = self._recorder.in_use
            self._engine.allocate_optimizer_state(shapes)
            return self._recorder.in_use - before

    def _away(self) -> _Away:
        views = self._engine.views
        if not isinstance(views, OffloadedViews):
            return _Away([])
        narrow = views.store.options.state_bytes
        wide = 8.0 if isinstance(self._optim, AdamW8bitConfig) else narrow  # moments in 8 bits are saved in fp32
        entries, on_host, largest, in_files = [], 0, 0, set()
        for bucket in views.store.buckets:
            if bucket.span.home != "device":
                on_host += bucket.numel if bucket.span.home == "cpu" else 0
                for index, master, _ in bucket.items():
                    entries.append(Kept(master.numel() * wide, kept(views.params[index], self._ranks).holders))
                    largest = max(largest, master.numel())
            if bucket.span.home == "nvme":
                in_files |= {f"model.{views.names[index]}" for index in bucket.span.indices}
        made = largest * 4.0 if wide > narrow else 0.0  # one moment, in fp32
        return _Away(entries, on_host * narrow, made, frozenset(in_files))


def _copy_in_rows(tensors: Iterable[Tensor], device: str, writers: int) -> None:
    """Copy tensors as each thread that writes does."""
    under_way: deque[Tensor] = deque(maxlen=writers)
    for tensor in tensors:
        local = local_part(tensor)
        if local.device.type == device:
            under_way.append(in_a_row(local))


def _kept(entry: Entry, ranks: int) -> Kept:
    """What a checkpoint holds of an entry, in the form that it has there."""
    if isinstance(entry, Tensor):
        return kept(entry, ranks)
    size = local_part(entry.like.detach()).numel() * entry.dtype.itemsize
    return kept(entry.like, ranks)._replace(bytes=size, on_device=False, in_a_row=True)


def completed(numbers: dict[str, float], *, one_memory: bool) -> dict[str, float]:
    """With what loading makes for the optimizer; in `one_memory` with what others have on the host, too."""
    found = dict(numbers)
    loaded = {"optimizer": found.pop("loaded", 0.0)}
    more = _beside(found) if one_memory else {}
    more[Phase.LOAD] = {**loaded, **more.get(Phase.LOAD, {})}
    detailed = any(key.startswith("at.") for key in found)
    for name, parts in more.items():
        for part, size in parts.items():
            if size and f"peak.{name}" in found:
                found[f"peak.{name}"] += size
                if detailed:
                    found[f"at.{name}.{part}"] = found.get(f"at.{name}.{part}", 0.0) + size
    return found


def _beside(numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """What a device of its own would have beside it, by peak and whose it is; taken out of `numbers`."""
    copy, saving, reading, loading = (
        numbers.pop(f"host_{key}", 0.0) for key in ("copy", "saving", "reading", "loading")
    )
    found = {str(name): {COPY: copy} for name in _SINCE_A_SAVE}
    found[Phase.SAVE]["optimizer"] = saving
    return {**found, Phase.LOAD: {"temporaries": reading + loading}}
