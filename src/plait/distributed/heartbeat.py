"""The rank's side of its heartbeat: phases as they come, and a look at collectives and memory a few times a second.

[Note: the last collective]
Which collective a rank began last is known to torch's flight recorder, whatever called it: gradient buckets,
`fully_shard`, DTensor, the user's own code. No function of torch is wrapped. A thread reads it on a fixed beat of
the clock, so that the looks of all ranks are of the same moment and can be compared; in a rank that hangs the thread
still runs, because waiting for a collective lets go of the interpreter. The launcher turns the recorder on with a
small ring (`TORCH_FR_BUFFER_SIZE`). Where there is none, phases alone are known. Messages between two ranks are seen
where they are waited for ([Note: messages that nobody records], `distributed/heartbeat.py`).
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

# Waiting for messages between two ranks, so that a rank which does is seen to wait.
#
# [Note: messages that nobody records]
# torch's flight recorder knows the collectives of every backend, but messages between two ranks only where NCCL carries
# them. A rank that waits for one over gloo would seem to compute, and a run that hangs to be busy. So whoever sends
# messages of its own waits for them here, and leaves word for as long as that takes: which is two stores into a table,
# one for the process as the recorder is, and a row for each thread.


_waits: dict[int, tuple[float, str]] = {}
"""By thread: since when it has waited, and for what."""


def wait_for(works: Iterable[dist.Work | None], what: str) -> None:
    """Wait until all of these messages were sent or have come; `what` they are, in a few words."""
    thread = threading.get_ident()
    _waits[thread] = time.time(), what
    try:
        for work in works:
            assert work is not None
            work.wait()
    finally:
        del _waits[thread]


def longest_wait() -> tuple[float, str] | None:
    """Of all threads, who has waited longest: since when, and for what. None where nobody waits."""
    return min(_waits.copy().values(), default=None)


_EVERY_S = 0.25
_LAST_LOOK_S = 1.0
_SHARE = 0.005
"""Looking may take so much of the rank's time; with a long recorder it looks more rarely."""


class Heartbeat:
    """What this rank does, for whoever has to explain its end. Without a launcher it is kept, and nobody looks.

    On `STACK_SIGNAL` the stacks of all threads go to a file beside it, and so they do before a crash.

    A process may have several, one per world that it opens: actor, critic, reference, reward. They write to the one
    file of their rank, which no one of them shortens while another has it mapped, and one thread looks for all.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0, *, timeout_s: float = 0.0) -> None:
        self._path = None if folder is None else folder / f"{rank}.beat"
        self._map = _anonymous() if self._path is None else _mapped(self._path)
        self._observer: _Observer | None = None
        self.enter(Phase.BUILD, 0)
        if folder is not None:
            _dump_stacks_into(folder / f"{rank}.stacks")
            layout.put_about(self._map, os.getpid(), timeout_s)

    @property
    def is_read(self) -> bool:
        """Whether a launcher looks at it."""
        return self._path is not None

    @property
    def phase(self) -> Phase:
        """What it does, as far as it was told. An engine tells nothing while nobody reads."""
        return layout.phase_in(self._map)

    def enter(self, phase: Phase, step: int) -> None:
        """A phase begins."""
        layout.put_now(self._map, layout.NOW_AT, time.time(), step, layout.NUMBER[phase])

    def belongs_to(self, folder: str) -> None:
        """Say where a report belongs."""
        layout.put_folder(self._map, folder)

    def can_go_on_with(self, sizes: Iterable[int]) -> None:
        """Say with how many ranks this run could go on."""
        layout.put_sizes(self._map, sizes)

    def look_around(self, device: torch.device) -> None:
        """Begin to look at collectives and memory, until `close`; where nobody reads it, do nothing."""
        if self._path is not None:
            self._observer = _Observer.of(self._path, device, self._map)
            self._observer.users.append(self)
            atexit.register(self.close)  # a thread inside of torch must not meet the end of the interpreter

    def close(self) -> None:
        """Stop looking, unless another heartbeat of this rank is still open. The file stays for the launcher."""
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.users.remove(self)
            if not observer.users:
                observer.stop()


_OBSERVERS: dict[tuple[Path, torch.device], _Observer] = {}
"""Those that look now: a file is written by one of them, however many heartbeats share it."""


class _Observer:
    """A thread that looks at collectives and memory, and writes down what it sees."""

    def __init__(self, key: tuple[Path, torch.device], beat: mmap.mmap) -> None:
        self.users: list[Heartbeat] = []
        self._key, self._map = key, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(key[1],), name="plait heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, path: Path, device: torch.device, beat: mmap.mmap) -> _Observer:
        """The one of this file and device."""
        if (path, device) not in _OBSERVERS:
            _OBSERVERS[path, device] = cls((path, device), beat)
        return _OBSERVERS[path, device]

    def stop(self) -> None:
        """Look once more, and end."""
        del _OBSERVERS[self._key]
        self._stop.set()
        self._thread.join(_LAST_LOOK_S)

    def _look(self, device: torch.device) -> None:
        recorder, seen = flight_recorder(device), _RecorderView()
        every, over = _EVERY_S, False
        while not over:
            over = self._stop.wait(every - time.time() % every)  # once more then: what was waited for may have come
            start = time.perf_counter()
            if recorder is not None:
                try:
                    seen.take(json.loads(recorder(True, False)).get("entries", ()))
                except (KeyError, TypeError, ValueError):
                    recorder = None  # the recorder of another torch: then phases alone are told
                    continue
                seen.wait(longest_wait())
                tick = round(time.time() / _EVERY_S)
                layout.put_collective(
                    self._map, seen.name, called=seen.called, count=seen.count, tick=tick, pending=seen.pending
                )
            if device.type == "cuda":
                used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
                layout.put_memory(self._map, used, peak)
            every = _EVERY_S * max(1, round((time.perf_counter() - start) / _SHARE / _EVERY_S))


class _RecorderView:
    """What the recorder has shown so far."""

    def __init__(self) -> None:
        self.name, self.called, self.pending = "", 0.0, False
        self._counts: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Collectives of all groups; messages between two ranks are none, as the others have no part in them."""
        return sum(self._counts.values())

    def take(self, entries: Iterable[dict[str, Any]]) -> None:
        entries = list(entries)
        for entry in entries:
            if not entry["is_p2p"]:
                self._counts[str(entry["process_group"])] = entry["collective_seq_id"]
        self.pending = False
        if not entries:
            return
        # The oldest one that is not over, or else the last: later ones may have been queued behind it.
        waiting = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        last = waiting[0] if waiting else entries[-1]
        shape = "×".join(map(str, last["input_sizes"][0])) if last["input_sizes"] else ""
        self.name = f"{last['profiling_name'].rpartition(':')[2]}{f' of {shape}' if shape else ''}"
        self.called, self.pending = last["time_created_ns"] / 1e9, bool(waiting)

    def wait(self, message: tuple[float, str] | None) -> None:
        """It waits for a message as well, unless a collective is what it waits for."""
        if message is not None and not self.pending:
            self.called, self.name = message
            self.pending = True


def _anonymous() -> mmap.mmap:
    return mmap.mmap(-1, layout.SIZE)


def _mapped(path: Path) -> mmap.mmap:
    """A file with all of its room: a store into mapped memory that the disk has no room for ends a process.

    It is never shortened: another thread of this process may be writing to it.
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
            f"the launcher's folder {str(path.parent)!r} cannot be written to: {error.strerror}; make room there, or "
            "set TMPDIR to a folder that has some"
        ) from error


@cache
def _dump_stacks_into(path: Path) -> None:
    """On the launcher's signal, and before a crash, the stacks of all threads go to a file."""
    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(layout.STACK_SIGNAL, file=stacks, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=stacks, all_threads=True)


def open_heartbeat(rank: int, device: torch.device, timeout_s: float) -> Heartbeat:
    """The heartbeat of this rank, where the launcher looks for it."""
    name = os.environ.get(layout.FOLDER_VARIABLE)
    folder = Path(name) if name is not None and Path(name).is_dir() else None
    heartbeat = Heartbeat(folder, rank, timeout_s=timeout_s)
    heartbeat.look_around(device)
    return heartbeat
