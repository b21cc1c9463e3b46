"""The heartbeat of a rank: its phase, step, last collective and memory, in a small file that outlives it.

The rank writes to the file through mapped memory, so a change of phase costs no system call. The launcher can read the
file whether the rank runs, hangs or has died. Each field is written by only one thread, in one store of a few bytes, so
a reader may see an old value of one field beside a new value of another, but no field that is half written.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from struct import Struct
from typing import Any


class Phase(StrEnum):
    """The phases of a run, in the order in which they come."""

    BUILD = "build"
    """The model is built, sharded and initialized."""
    LOAD = "load"
    """A checkpoint is read."""
    INIT = "optimizer init"
    """The first update, in which the optimizer allocates its state. Only plans have it; in runs it is `step`."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """Gradients are reduced over ranks, unless the backward pass has already done it."""
    STEP = "step"
    """The optimizer updates the weights."""
    SAVE = "save"
    EVALUATE = "evaluate"
    IDLE = "idle"
    """Between all of these: data, logs, hooks."""
    LEFT = "left"
    """The rank was asked to stop, has saved, and exits. Its exit code then does not count as a failure."""

    @property
    def has_batches(self) -> bool:
        """Whether this phase computes on micro-batches. If memory runs out in it, smaller micro-batches help."""
        return self in (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.STEP, Phase.EVALUATE)


FOLDER_VARIABLE = "PLAIT_FAILURES"
"""The environment variable in which the launcher names the folder for heartbeats, stacks and last messages."""
SIZE = 4096
_MAGIC = b"PLAIT\x01"
_PHASES = tuple(Phase)
_ABOUT = Struct("<6sxxqd")
_NOW = Struct("<dqB")
_COLLECTIVE = Struct("<dqq?63s")
_MEMORY = Struct("<qq")
_TEXT = Struct("<H1000s")
_ABOUT_AT, _NOW_AT, _COLLECTIVE_AT, _MEMORY_AT, _FOLDER_AT, _SIZES_AT = 0, 64, 128, 256, 512, 2048
_MOST_SIZES = (SIZE - _SIZES_AT) * 8

put_now = _NOW.pack_into
"""`put_now(buffer, NOW_AT, time, step, NUMBER[phase])`, for writers that must be fast."""
NOW_AT = _NOW_AT
NUMBER = {phase: number for number, phase in enumerate(_PHASES)}


STACK_SIGNAL = signal.SIGURG
"""On this signal a rank writes its stacks to a file. A process without a handler ignores this signal."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank. Times are seconds since the epoch, by its own clock."""

    pid: int
    timeout_s: float
    """Seconds after which its collectives time out."""
    phase: Phase
    step: int
    """The number of optimizer steps that are complete."""
    since: float
    """When the phase began."""
    collective: str = ""
    """The last collective that it began; empty if none is known."""
    called: float = 0.0
    pending: bool = False
    """Whether that collective has not finished."""
    count: int = 0
    """The number of collectives that it has begun."""
    tick: int = 0
    """Number of the sample; samples of all ranks with the same number were taken at the same moment."""
    gpu: int = 0
    """Bytes in use on its GPU."""
    gpu_peak: int = 0
    folder: str = ""
    """The folder for a report on this run."""
    sizes: tuple[int, ...] = ()
    """World sizes with which this run could continue with the same total batch; empty if they are not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Beat:
        """Return the heartbeat whose fields `to_json` returned."""
        return cls(**{**values, "phase": Phase(values["phase"]), "sizes": tuple(values["sizes"])})


def put_about(buffer: Any, pid: int, timeout_s: float) -> None:
    """Write the magic number, pid and timeout. Write them last in a new heartbeat: readers ignore one without them."""
    _ABOUT.pack_into(buffer, _ABOUT_AT, _MAGIC, pid, timeout_s)


def put_collective(buffer: Any, name: str, *, called: float, count: int, tick: int, pending: bool) -> None:
    """Write the last collective that was begun."""
    _COLLECTIVE.pack_into(buffer, _COLLECTIVE_AT, called, count, tick, pending, name.encode()[:63])


def put_memory(buffer: Any, gpu: int, peak: int) -> None:
    """Write how much memory of the GPU is in use, and was at the peak."""
    _MEMORY.pack_into(buffer, _MEMORY_AT, gpu, peak)


def put_folder(buffer: Any, folder: str) -> None:
    """Write the folder for a report on this run. A path that is too long is left out."""
    text = folder.encode()
    if len(text) <= 1000:
        _TEXT.pack_into(buffer, _FOLDER_AT, len(text), text)


def put_sizes(buffer: Any, sizes: Iterable[int]) -> None:
    """Write the world sizes with which the run can continue: a bit for each."""
    bits = bytearray(_MOST_SIZES // 8)
    for size in sizes:
        if size < _MOST_SIZES:
            bits[size // 8] |= 1 << size % 8
    buffer[_SIZES_AT : _SIZES_AT + len(bits)] = bytes(bits)


def phase_in(buffer: Any) -> Phase:
    """Return the phase that was written last."""
    number: int = _NOW.unpack_from(buffer, _NOW_AT)[-1]
    return _PHASES[number]


def read_beat(path: Path) -> Beat | None:
    """Return the heartbeat in a file; None if the file has none yet, or one of another version."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < SIZE or not data.startswith(_MAGIC):
        return None
    _, pid, timeout_s = _ABOUT.unpack_from(data, _ABOUT_AT)
    since, step, number = _NOW.unpack_from(data, _NOW_AT)
    if number >= len(_PHASES):
        return None  # another version's, or only partly written
    called, count, tick, pending, name = _COLLECTIVE.unpack_from(data, _COLLECTIVE_AT)
    gpu, peak = _MEMORY.unpack_from(data, _MEMORY_AT)
    length, text = _TEXT.unpack_from(data, _FOLDER_AT)
    bits = data[_SIZES_AT:].rstrip(b"\0")
    return Beat(
        pid,
        timeout_s,
        _PHASES[number],
        step,
        since,
        collective=name.rstrip(b"\0").decode(errors="replace"),
        called=called,
        pending=pending,
        count=count,
        tick=tick,
        gpu=gpu,
        gpu_peak=peak,
        folder=text[:length].decode(errors="replace"),
        sizes=tuple(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1),
    )
