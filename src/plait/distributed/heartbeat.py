"""The heartbeat that a rank writes for the launcher: a small file with its phase, last collective and memory.

The phase is written whenever it changes, the rest a few times per second.

[Note: the last collective]
Torch's flight recorder knows which collective a rank began last, whatever called it: gradient buckets, `fully_shard`,
DTensor, the user's own code. So no function of torch has to be wrapped. A thread reads the recorder at multiples of a
fixed interval of the clock, so that all ranks are sampled at the same time and can be compared. In a rank that hangs
the thread still runs, because waiting for a collective releases the interpreter lock. The launcher enables the recorder
with a small ring buffer (`TORCH_FR_BUFFER_SIZE`); without it, only phases are known. Point-to-point messages are
recorded by the code that waits for them ([Note: messages that nobody records]).
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import mmap
import os
import threading
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import WorldError
from plait.launch import Phase
from plait.launch import heartbeat as layout
from plait.torch_internals import flight_recorder

# [Note: messages that nobody records]
# torch's flight recorder records the collectives of every backend, but point-to-point messages only over NCCL. A rank
# that waits for a message over gloo would look as if it computed, and a run that hangs as if it were busy. So code of
# Plait that sends messages waits for them with `wait_for`, which writes into the table `_waits` while it waits. There
# is one table per process, as there is one recorder, with an entry for each thread that waits.


_waits: dict[int, tuple[float, str]] = {}
"""Id of a thread → (time since when it has waited, what it waits for)."""


def wait_for(works: Iterable[dist.Work | None], what: str) -> None:
    """Wait until all of these messages are sent or received; `what` describes them for the failure report."""
    thread = threading.get_ident()
    _waits[thread] = time.time(), what
    try:
        for work in works:
            assert work is not None
            work.wait()
    finally:
        del _waits[thread]


def longest_wait() -> tuple[float, str] | None:
    """Return the longest wait of all threads: since when, and for what; None if no thread waits."""
    return min(_waits.copy().values(), default=None)


_INTERVAL_S = 0.25
_JOIN_S = 1.0
_TIME_SHARE = 0.005
"""The fraction of a rank's time that sampling may take. If reading a long flight recorder takes more, the interval
grows."""


class Heartbeat:
    """Writes what this rank does to a file that the launcher reads for its failure report.

    Without a launcher it writes to memory that nothing reads. On `STACK_SIGNAL`, and before a crash, the stacks of all
    threads are written to a second file in the same folder.

    A process may have several heartbeats, one per world that it opens: actor, critic, reference, reward. They share the
    file of their rank and the thread that samples; none of them truncates the file while another has it mapped.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, *, timeout_s: float = 0.0) -> None:
        self._path = None if folder is None else folder / f"{rank}.beat"
        self._map = mmap.mmap(-1, layout.SIZE) if self._path is None else _mapped(self._path)
        self._observer: _Observer | None = None
        self.enter(Phase.BUILD, 0)
        if folder is not None:
            _dump_stacks_into(folder / f"{rank}.stacks")
            layout.put_about(self._map, os.getpid(), timeout_s)

    @property
    def is_read(self) -> bool:
        """Whether a launcher reads this heartbeat."""
        return self._path is not None

    @property
    def phase(self) -> Phase:
        """The phase that was entered last. An engine enters none if no launcher reads them (`is_read`)."""
        return layout.phase_in(self._map)

    def enter(self, phase: Phase, step: int) -> None:
        """Record that a phase begins."""
        layout.put_now(self._map, layout.NOW_AT, time.time(), step, layout.NUMBER[phase])

    def set_report_folder(self, folder: str) -> None:
        """Record the folder to which the launcher writes a failure report."""
        layout.put_folder(self._map, folder)

    def set_possible_sizes(self, sizes: Iterable[int]) -> None:
        """Record the numbers of ranks with which the launcher may resume this run."""
        layout.put_sizes(self._map, sizes)

    def start_observer(self, device: torch.device) -> None:
        """Begin to sample collectives and memory, until `close`; without a launcher, do nothing."""
        if self._path is not None:
            self._observer = _Observer.of(self._path, device, self._map)
            self._observer.users.append(self)
            atexit.register(self.close)  # the thread must not run in torch while the interpreter shuts down

    def close(self) -> None:
        """Stop sampling, unless another heartbeat of this rank is still open. The file stays for the launcher."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.users.remove(self)
            if not observer.users:
                observer.stop()


_OBSERVERS: dict[tuple[Path, torch.device], _Observer] = {}
"""The running observers: one per file, however many heartbeats share it."""


class _Observer:
    """A thread that samples collectives and memory, and writes them to the heartbeat."""

    def __init__(self, key: tuple[Path, torch.device], beat: mmap.mmap) -> None:
        self.users: list[Heartbeat] = []
        self._key, self._map = key, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(key[1],), name="plait heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, path: Path, device: torch.device, beat: mmap.mmap) -> _Observer:
        """Return the observer of this file and device; start one if there is none."""
        if (path, device) not in _OBSERVERS:
            _OBSERVERS[path, device] = cls((path, device), beat)
        return _OBSERVERS[path, device]

    def stop(self) -> None:
        """Sample once more, and end the thread."""
        del _OBSERVERS[self._key]
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self, device: torch.device) -> None:
        recorder, state = flight_recorder(device), _FlightRecorderState()
        interval, stopped = _INTERVAL_S, False
        while not stopped:
            stopped = self._stop.wait(
                interval - time.time() % interval
            )  # after `stop`, sample once more: the pending collective may be complete by then
            start = time.perf_counter()
            if recorder is not None:
                try:
                    state.update(json.loads(recorder(True, False)).get("entries", ()))
                except (KeyError, TypeError, ValueError):
                    recorder = None  # the format of another torch version: from now on only phases and memory
                    continue
                state.wait(longest_wait())
                tick = round(time.time() / _INTERVAL_S)
                layout.put_collective(
                    self._map, state.name, called=state.called, count=state.count, tick=tick, pending=state.pending
                )
            if device.type == "cuda":
                used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
                layout.put_memory(self._map, used, peak)
            interval = _INTERVAL_S * max(1, round((time.perf_counter() - start) / _TIME_SHARE / _INTERVAL_S))


class _FlightRecorderState:
    """The last or pending collective, and the number of collectives, according to the flight recorder."""

    def __init__(self) -> None:
        self.name, self.called, self.pending = "", 0.0, False
        self._counts: dict[str, int] = {}

    @property
    def count(self) -> int:
        """The number of collectives of all groups.

        Without point-to-point messages, whose numbers differ between ranks.
        """
        return sum(self._counts.values())

    def update(self, entries: Iterable[dict[str, Any]]) -> None:
        entries = list(entries)
        for entry in entries:
            if not entry["is_p2p"]:
                self._counts[str(entry["process_group"])] = entry["collective_seq_id"]
        self.pending = False
        if not entries:
            return
        # The oldest collective that is not complete, since later ones may be queued behind it; else the last one.
        waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        last = waiting[0] if waiting else entries[-1]
        shape = "×".join(map(str, last["input_sizes"][0])) if last["input_sizes"] else ""
        self.name = f"{last['profiling_name'].rpartition(':')[2]}{f' of {shape}' if shape else ''}"
        self.called, self.pending = last["time_created_ns"] / 1e9, bool(waiting)

    def wait(self, message: tuple[float, str] | None) -> None:
        """Record that the rank waits for this point-to-point message, unless it waits for a collective."""
        if message is not None and not self.pending:
            self.called, self.name = message
            self.pending = True


def _mapped(path: Path) -> mmap.mmap:
    """Create and map the heartbeat's file; raise `WorldError` if that fails.

    All its blocks are allocated first, since a write to a mapped page without disk space kills the process. The file is
    never truncated, since another thread of this process may be writing to it.
    """
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(number, 0, layout.SIZE)
            return mmap.mmap(number, layout.SIZE)
        finally:
            os.close(number)
    except OSError as error:
        raise WorldError(
            f"the launcher's folder {str(path.parent)!r} cannot be written to: {error.strerror}; free space there, or "
            "set TMPDIR to a folder that has some"
        ) from error


@cache
def _dump_stacks_into(path: Path) -> None:
    """Write the stacks of all threads to a file whenever the launcher's signal arrives, and before a crash."""
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(layout.STACK_SIGNAL, file=stacks, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks, all_threads=True)


def open_heartbeat(rank: int, device: torch.device, timeout_s: float) -> Heartbeat:
    """Return the heartbeat of this rank, with a running observer; its file is in the launcher's folder, if any."""
    name = os.environ.get(layout.FOLDER_VARIABLE)
    folder = Path(name) if name is not None and Path(name).is_dir() else None
    heartbeat = Heartbeat(folder, rank, timeout_s=timeout_s)
    heartbeat.start_observer(device)
    return heartbeat
