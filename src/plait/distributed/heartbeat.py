"""The heartbeat that a rank writes: its phase whenever it changes, collectives and memory a few times per second.

[Note: the last collective]
Torch's flight recorder knows which collective a rank began last, whatever called it: gradient buckets, `fully_shard`,
DTensor, the user's own code. No function of torch is wrapped. A thread reads it at fixed times of the clock, so that
the samples of all ranks are of the same moment and can be compared; in a rank that hangs the thread still runs, because
waiting for a collective releases the interpreter lock. The launcher enables the recorder with a small ring buffer
(`TORCH_FR_BUFFER_SIZE`). Without it, phases alone are known. Point-to-point messages are recorded where they are waited
for ([Note: messages that nobody records]).
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
# torch's flight recorder knows the collectives of every backend, but point-to-point messages only over NCCL. A rank
# that waits for one over gloo would seem to compute, and a run that hangs to be busy. So code of Plait that sends
# messages waits for them with `wait_for`, which records that for as long as it takes: two stores into a table, one per
# process as the recorder is, with a row for each thread.


_waits: dict[int, tuple[float, str]] = {}
"""Thread → (since when it has waited, for what)."""


def wait_for(works: Iterable[dist.Work | None], what: str) -> None:
    """Wait until all of these messages were sent or received; `what` they are, in a few words."""
    thread = threading.get_ident()
    _waits[thread] = time.time(), what
    try:
        for work in works:
            assert work is not None
            work.wait()
    finally:
        del _waits[thread]


def longest_wait() -> tuple[float, str] | None:
    """Of all threads the longest wait: since when, and for what. None where no thread waits."""
    return min(_waits.copy().values(), default=None)


_INTERVAL_S = 0.25
_JOIN_S = 1.0
_TIME_SHARE = 0.005
"""The share of a rank's time that reading may take; with a long recorder the interval grows."""


class Heartbeat:
    """What this rank does, for the launcher's failure page. Without a launcher it is in memory that nothing reads.

    On `STACK_SIGNAL`, and before a crash, the stacks of all threads are written to a file beside it.

    A process may have several, one per world that it opens: actor, critic, reference, reward. They write to the one
    file of their rank, which none of them truncates while another has it mapped, and one thread observes for all.
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
        """Whether a launcher reads it."""
        return self._path is not None

    @property
    def phase(self) -> Phase:
        """The current phase, as far as it was entered. An engine enters none while nothing reads them."""
        return layout.phase_in(self._map)

    def enter(self, phase: Phase, step: int) -> None:
        """Record that a phase begins."""
        layout.put_now(self._map, layout.NOW_AT, time.time(), step, layout.NUMBER[phase])

    def set_report_folder(self, folder: str) -> None:
        """Record the folder for a failure report."""
        layout.put_folder(self._map, folder)

    def set_possible_sizes(self, sizes: Iterable[int]) -> None:
        """Record with how many ranks this run could be resumed."""
        layout.put_sizes(self._map, sizes)

    def start_observer(self, device: torch.device) -> None:
        """Begin to sample collectives and memory, until `close`; nothing without a launcher."""
        if self._path is not None:
            self._observer = _Observer.of(self._path, device, self._map)
            self._observer.users.append(self)
            atexit.register(self.close)  # a thread inside of torch must not meet the end of the interpreter

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
        """The observer of this file and device."""
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
            )  # sampled once more then: what was waited for may have arrived
            start = time.perf_counter()
            if recorder is not None:
                try:
                    state.update(json.loads(recorder(True, False)).get("entries", ()))
                except (KeyError, TypeError, ValueError):
                    recorder = None  # the format of another torch version: phases alone are reported
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
    """What the flight recorder has shown so far."""

    def __init__(self) -> None:
        self.name, self.called, self.pending = "", 0.0, False
        self._counts: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Collectives of all groups, without point-to-point messages, in which other ranks have no part."""
        return sum(self._counts.values())

    def update(self, entries: Iterable[dict[str, Any]]) -> None:
        entries = list(entries)
        for entry in entries:
            if not entry["is_p2p"]:
                self._counts[str(entry["process_group"])] = entry["collective_seq_id"]
        self.pending = False
        if not entries:
            return
        # The oldest one that is not complete, or else the last: later ones may be queued behind it.
        waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        last = waiting[0] if waiting else entries[-1]
        shape = "×".join(map(str, last["input_sizes"][0])) if last["input_sizes"] else ""
        self.name = f"{last['profiling_name'].rpartition(':')[2]}{f' of {shape}' if shape else ''}"
        self.called, self.pending = last["time_created_ns"] / 1e9, bool(waiting)

    def wait(self, message: tuple[float, str] | None) -> None:
        """Take a point-to-point message for what the rank waits for, unless it waits for a collective."""
        if message is not None and not self.pending:
            self.called, self.name = message
            self.pending = True


def _mapped(path: Path) -> mmap.mmap:
    """Map a file whose blocks are all allocated: a store into a mapped page without disk space kills the process.

    It is never truncated: another thread of this process may be writing to it.
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
    """On the launcher's signal, and before a crash, write the stacks of all threads to a file."""
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(layout.STACK_SIGNAL, file=stacks, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks, all_threads=True)


def open_heartbeat(rank: int, device: torch.device, timeout_s: float) -> Heartbeat:
    """The heartbeat of this rank, in the file that the launcher reads."""
    name = os.environ.get(layout.FOLDER_VARIABLE)
    folder = Path(name) if name is not None and Path(name).is_dir() else None
    heartbeat = Heartbeat(folder, rank, timeout_s=timeout_s)
    heartbeat.start_observer(device)
    return heartbeat
