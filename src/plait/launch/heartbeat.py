"""The heartbeat of a rank: its phase, step, last collective and memory, in a small file that outlives it.

The rank writes with plain stores into mapped memory, so a change of phase costs no system call. The launcher only reads
the file, whether the rank runs, hangs or has died. One thread writes each field below, in one store of a few bytes; a
reader that comes in between sees at worst an old field beside a new one.
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
    """The model is made, spread and given its values."""
    LOAD = "load"
    """A checkpoint is read."""
    INIT = "optimizer init"
    """The first update, in which an optimizer makes its state. Only a plan distinguishes it from `step`."""
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    """Gradients of all ranks are brought together, as far as the backward pass has not done it."""
    STEP = "step"
    """The optimizer updates the weights."""
    SAVE = "save"
    EVALUATE = "evaluate"
    IDLE = "idle"
    """Between all of these: data, logs, hooks."""
    LEFT = "left"
    """It was asked to stop, has saved, and exits. Its exit code is not a failure."""

    @property
    def has_batches(self) -> bool:
        """Whether it works on micro-batches: smaller ones help where memory is short in it."""
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
"""`put_now(buffer, NOW_AT, time, step, NUMBER[phase])`, for the writer that must lose no time."""
NOW_AT = _NOW_AT
NUMBER = {phase: number for number, phase in enumerate(_PHASES)}


STACK_SIGNAL = signal.SIGURG
"""On this signal a rank writes its stacks to a file. A process without a handler ignores this signal."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank. Times are seconds since the epoch, by its own clock."""

    pid: int
    timeout_s: float
    """How long its collectives may wait."""
    phase: Phase
    step: int
    """Optimizer steps that are done."""
    since: float
    """When the phase began."""
    collective: str = ""
    """The last collective that it began; empty where none is known."""
    called: float = 0.0
    pending: bool = False
    """Whether that collective has not finished."""
    count: int = 0
    """How many collectives it has begun."""
    tick: int = 0
    """Number of the sample; samples of all ranks with the same number were taken at the same moment."""
    gpu: int = 0
    """Bytes in use on its GPU."""
    gpu_peak: int = 0
    folder: str = ""
    """The folder for a report on this run."""
    sizes: tuple[int, ...] = ()
    """World sizes with which this run can continue with the same batch; empty: not known."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Beat:
        """What `to_json` wrote."""
        return cls(**{**values, "phase": Phase(values["phase"]), "sizes": tuple(values["sizes"])})


def put_about(buffer: Any, pid: int, timeout_s: float) -> None:
    """Write the magic number, pid and timeout. Last of a new heartbeat, as this makes it readable."""
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
    """Return the heartbeat in a file; None where there is none yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < SIZE or not data.startswith(_MAGIC):
        return None
    _, pid, timeout_s = _ABOUT.unpack_from(data, _ABOUT_AT)
    since, step, number = _NOW.unpack_from(data, _NOW_AT)
    if number >= len(_PHASES):
        return None  # another version's, or torn
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
