"""Several processes on this machine. Imports no torch, so errors in a run description show at once."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from plait.errors import WorldError
from plait.launch.failure import Messages

_SAY_S = 2.0
"""How long the other ranks may go on once one has failed: they may have something to say about it."""
_GRACE_S = 10.0
"""How long they may take to leave after SIGTERM. A step cannot be finished without the one that is gone."""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_count() -> int:
    """How many GPUs a process started here would see, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines()) if found.returncode == 0 else 0


def launched_size() -> int | None:
    """How many ranks a launcher started this process as one of; None where nobody did."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else None


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` once for each rank and wait; returns 0, or the exit code of the rank that failed.

    The ranks find each other through the same variables that torchrun sets. When one fails, the others, which
    would wait for it, are ended. Ctrl-C, SIGTERM and a closed terminal reach every rank, which then saves and
    leaves; a second Ctrl-C ends all at once.
    """
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    with Messages() as messages, _Signals(ranks) as signals:
        try:
            for rank in range(count):
                environment = {**_environment(rank, count, port), **messages.environment}
                ranks.append(_start(command, environment))
        except OSError as error:
            _end(ranks)
            raise WorldError(f"rank {len(ranks)} of {count} could not be started: {error}") from error
        failed = _wait(ranks)
        if signals.interrupts > 1:
            return 128 + signal.SIGINT
        # Said last, so that it stands below whatever the ranks themselves printed.
        for text in [*messages.texts(), *_deaths(failed)]:
            print(f"plait: {text}", file=sys.stderr, flush=True)
        return _exit_code(failed)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(cpu_count() // count, 1)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in a process group of its own.

    A terminal sends Ctrl-C to its foreground group. With the ranks outside of it each signal reaches them once,
    through `_Signals`, wherever it came from.
    """
    return subprocess.Popen(list(command), env=environment, process_group=0, preexec_fn=_follow_the_launcher)


def _follow_the_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher is gone, so that `kill -9` of it leaves no orphans."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


class _Signals:
    """While open, passes signals on to the ranks instead of dying of them."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        self._ranks = ranks
        self.interrupts = 0

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            number = signal.SIGKILL  # checkpoints survive it, and a rank inside a collective hears nothing else
        elif number == signal.SIGHUP:
            number = signal.SIGTERM
        for rank in self._ranks:
            _send(rank, number)

    def __enter__(self) -> _Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # A shell's `nohup` ignores SIGHUP, and that is to stay so.
        wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._pass_on) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _send(rank: subprocess.Popen[bytes], number: int) -> None:
    """To the rank alone, or, as it is killed, to its whole group: data workers must not outlive it."""
    if rank.poll() is not None:
        return
    if number == signal.SIGKILL:
        os.killpg(rank.pid, number)
    else:
        rank.send_signal(number)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all are gone. Returns the ranks that failed first, with their codes; those after them are
    victims, of the missing rank or of `_end`."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := {rank: code for rank, code in enumerate(codes) if code}:
            _end(ranks)
            return failed
        if None not in codes:
            return {}
        time.sleep(0.05)


def _exit_code(failed: dict[int, int]) -> int:
    """As a shell has it: 128 and the signal. A rank that a signal ended is the cause; one that missed it is not."""
    code = min(failed.values(), default=0)
    return 128 - code if code < 0 else code


def _deaths(failed: dict[int, int]) -> list[str]:
    return [f"rank {rank} was ended by {signal.Signals(-code).name}" for rank, code in failed.items() if code < 0]


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    _wait_until(time.monotonic() + _SAY_S, ranks)
    for rank in ranks:
        _send(rank, signal.SIGTERM)
    _wait_until(time.monotonic() + _GRACE_S, ranks)
    for rank in ranks:
        _send(rank, signal.SIGKILL)
        rank.wait()


def _wait_until(deadline: float, ranks: list[subprocess.Popen[bytes]]) -> None:
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
