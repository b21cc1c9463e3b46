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

from plait.checkpoint import Kept, kept, need
from plait.checkpoint.need import WRITERS, workers
from plait.checkpoint.tensorfile import in_a_row
from plait.config.optim import AdamW8bitConfig
from plait.config.run import RunConfig
from plait.plan.recorder import END, Recorder
from plait.spec.phase import Phase
from plait.strategy.native.engine import NativeEngine
from plait.strategy.native.offloaded import OffloadedViews
from plait.world import local_part
from plait.world.patch import replaced

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
    saved: float = 0.0
    """More than that while it is saved: moments in 8 bits turn into fp32, those from files too."""
    loaded: float = 0.0
    """Bytes of host memory that it has while it is loaded."""
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
                tensors = engine.state_tensors()
                entries = {name: kept(tensor, self._ranks) for name, tensor in tensors.items()}
            entries |= {name: entries[name]._replace(in_a_row=True) for name in away.in_files}
            numbers = {"state": sum(each.bytes for each in (*entries.values(), *away.entries))}
            if not self.loads:
                return numbers
            frozen = {f"model.{name}" for name in engine.frozen()} if self._settings.trainable_only else set()
            written = [entry for name, entry in entries.items() if name not in frozen] + away.entries
            host = {"cores": self._cores, "ranks": self._local_ranks}
            needed = need(written, **host, background=self._settings.async_save)
            separate = engine.world.device.type != "cpu"  # otherwise the recorder sees the host
            wide = _on_host(tensors) if separate else 0.0
            if self.saves:
                loose = (tensors[name] for name, entry in entries.items() if not entry.in_a_row)
                _copy_in_rows(loose, engine.world.device.type, workers(WRITERS, **host))
                numbers |= {"written": needed.written, "host_copy": needed.copied}
                numbers["host_saving"] = needed.writing + away.saved + wide
            numbers["loaded"] = self._make_room(tensors)
        there = 0.0 if separate else away.held
        return numbers | {"host_reading": needed.reading, "host_loading": wide + away.loaded - there}

    def _make_room(self, tensors: dict[str, Tensor]) -> float:
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
        entries, counts, in_files = [], {"cpu": 0, "nvme": 0}, set()
        for bucket in views.store.buckets:
            if bucket.span.home != "device":
                counts[bucket.span.home] += bucket.numel
                for index, master, _ in bucket.items():
                    entries.append(Kept(master.numel() * wide, kept(views.params[index], self._ranks).holders))
            if bucket.span.home == "nvme":
                in_files |= {f"model.{views.names[index]}" for index in bucket.span.indices}
        widened = counts["cpu"] * (wide - narrow) + (counts["nvme"] * wide if wide > narrow else 0.0)
        return _Away(entries, counts["cpu"] * narrow, widened, counts["cpu"] * wide, frozenset(in_files))


def _copy_in_rows(tensors: Iterable[Tensor], device: str, writers: int) -> None:
    """Copy tensors as each thread that writes does."""
    under_way: deque[Tensor] = deque(maxlen=writers)
    for tensor in tensors:
        local = local_part(tensor)
        if local.device.type == device:
            under_way.append(in_a_row(local))


def _on_host(tensors: dict[str, Tensor]) -> float:
    """Bytes of states that a device has in another form: they come to the host to be saved, and are loaded there."""
    states = (local_part(tensor) for name, tensor in tensors.items() if name.startswith("optim."))
    return sum(state.nbytes for state in states if state.device.type == "cpu" and state.ndim > 0)


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
