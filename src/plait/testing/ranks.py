"""Real gloo ranks for tests, in processes of this machine.

A test passes a top-level function to `RankPool.run`; every rank calls it with (rank, size, *args), and the results are
returned in rank order. If a rank raises, dies or hangs, all ranks are killed, and the next call starts new ones.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from plait.errors import PlaitError

GRACE_S = 5.0
"""Seconds that the other ranks have to answer after one has failed; most of them wait for it in a collective."""

THREADS = 40
"""Ranks with more threads than this are replaced by new ones after a call. Each process group of gloo has a thread that
wakes up a hundred times per second, also if the group is not used. Tests do not destroy their groups, and torch caches
meshes that refer to them: after some hundred tests these threads use most of the CPU. Starting new ranks is cheaper."""


def forked() -> Any:
    """Return a multiprocessing context that forks from a process with torch and Plait imported, so ranks start fast."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plait.testing.loaded"])
    return context


class RankFailedError(AssertionError):
    """A rank raised, died or did not answer; the message has the traceback of each rank that raised."""

    refusal: str | None = None
    """The text of the `PlaitError` that a rank raised; None if none did."""


class RankPool:
    """`size` processes with a gloo process group, from the first `run` until `close` or the end of a `with` block."""

    def __init__(self, size: int, *, timeout_s: float = 120.0, lasting: bool = False) -> None:
        """`timeout_s`: how long a call may take. `lasting`: do not replace ranks with more than `THREADS` threads."""
        self.size = size
        self._timeout_s = timeout_s
        self._lasting = lasting
        self._slow = False
        self._answered = False
        """Whether these ranks have answered a call."""
        self._meeting = Path()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what `function(rank, size, *args)` returns on each rank; raise `RankFailedError` if one fails.

        The function must be at the top level of a module.
        """
        if not self._processes:
            self._start()
        call = _pack((function, args))
        failures: list[str] = []
        refusals: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(call)
            except OSError:
                failures.append(f"rank {rank}: was dead before")
        results, missing = self._answers(failures, refusals)
        failures += [f"rank {rank}: no answer" for rank in missing]
        if failures or (self._slow and not self._lasting):
            self.close()
        if failures:
            error = RankFailedError("\n".join(failures))
            error.refusal = next(iter(refusals), None)
            raise error
        return [results[rank] for rank in range(self.size)]

    def _answers(self, failures: list[str], refusals: list[str]) -> tuple[dict[int, Any], list[int]]:
        """Return the result of each rank, and the ranks that did not answer in time.

        Appends the tracebacks of ranks that raised to `failures`, and the texts of their `PlaitError`s to `refusals`.
        """
        results: dict[int, Any] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + self._timeout_s
        while pending:
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    results[rank], failure, refusal, threads = _unpack(pipe.recv_bytes())
                    self._answered = True
                except (EOFError, OSError):
                    failure, refusal, threads = f"rank {rank}: died{self._how(rank)}", None, 0
                failures += [failure] if failure else []
                refusals += [refusal] if refusal else []
                self._slow |= threads > THREADS
        return results, list(pending.values())

    def _how(self, rank: int) -> str:
        self._processes[rank].join(GRACE_S)
        if self._processes[rank].exitcode == 1 and not self._answered:
            return " while it was started; call this under `if __name__ == '__main__':` where a script does"
        return f" with exit code {self._processes[rank].exitcode}"

    def _start(self) -> None:
        self._answered = False
        self._meeting = Path(tempfile.mkdtemp(prefix="plait-rank-pool-"))  # a launcher removes old `plait-ranks-…`
        context = forked()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._meeting, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """Kill the ranks; the next `run` starts new ones."""
        if not self._processes:
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._slow = [], [], False
        shutil.rmtree(self._meeting, ignore_errors=True)


def _pack(value: Any) -> bytes:
    """Return a value as bytes. `Connection.send` would create shared memory for each tensor, which is slower."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)  # from our own children, through a pipe


def _serve(rank: int, size: int, meeting: Path, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    # As a daemon, a rank could not start children, such as the workers of a loader. For the test process it still is
    # one, and is killed when that ends.
    multiprocessing.current_process().daemon = False
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=size)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = _unpack(call)
            answer = _pack((function(rank, size, *args), None, None, psutil.Process().num_threads()))
        except BaseException as error:
            refusal = str(error) if isinstance(error, PlaitError) else None
            answer = _pack((None, f"rank {rank}:\n{traceback.format_exc()}", refusal, 0))
        pipe.send_bytes(answer)
