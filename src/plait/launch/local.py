"""Several processes on this machine. Imports no torch, so errors in a run description show at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from plait.errors import WorldError

_GRACE_S = 30.0
"""How long ranks may take to save and leave, once one of them is gone or the user asked to stop."""


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` once for each rank and wait; returns the first failing exit code, or 0.

    The ranks find each other through the same variables that torchrun sets. When one fails, the others, which
    would wait for it, are ended. Ctrl-C and SIGTERM reach every rank, which then saves and leaves.
    """
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            processes.append(subprocess.Popen(list(command), env=_environment(rank, count, port)))
    except OSError as error:
        _end(processes)
        raise WorldError(f"rank {len(processes)} of {count} could not be started: {error}") from error
    with _Forward(processes):
        return _wait(processes)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    threads = max(len(os.sched_getaffinity(0)) // count, 1)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class _Forward:
    """While open, passes signals on to the ranks instead of dying of them."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        # A terminal's Ctrl-C reaches the ranks by itself: they are in its foreground group.
        if number == signal.SIGTERM or not sys.stdin.isatty():
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)

    def __enter__(self) -> None:
        self._previous = {n: signal.signal(n, self._pass_on) for n in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            if code < 0:
                print(f"plait: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            _end(processes)
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    # Errors in a run description reach all ranks at once; give them a moment to say so themselves.
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
