"""Real gloo ranks for tests, in processes of this machine.

A test hands `RankPool.run` a top-level function; every rank calls it with (rank, size, *args) and the results
come back in rank order. A rank that raises, dies or hangs ends the pool, and the next call gets a fresh one.
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
"""How long the others have to answer once a rank has failed: most of them wait for it."""

THREADS = 40
"""Each group of gloo has a thread that wakes a hundred times a second, whether the group is used or not. Tests leave
their groups behind, and torch keeps meshes of them in caches: after some hundred tests no time is left for others. New
ranks cost less than that, so those with more threads than this are replaced."""


def forked() -> Any:
    """A context whose processes are copies of one that has loaded what all of them need: they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["plait.testing.loaded"])
    return context


class RankFailedError(AssertionError):
    """Some rank raised; carries that rank's own traceback."""

    refusal: str | None = None
    """What a rank said that refused to run: the text of its `PlaitError`."""


class RankPool:
    """So many ranks, until `close` or the end of a `with` block."""

    def __init__(self, size: int, *, timeout_s: float = 120.0, lasting: bool = False) -> None:
        """`timeout_s`: how long a call may take. Ranks that have become slow are replaced, but not `lasting` ones."""
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
        """What `function(rank, size, *args)` returns on each rank. It has to be at the top level of a module."""
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
        """What each rank returned, and which ones said nothing in time.

        `failures` gets what they raised, and `refusals` what of it a `PlaitError` said.
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
        self._meeting = Path(tempfile.mkdtemp(prefix="plait-ranks-"))
        context = forked()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._meeting, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """End the ranks."""
        if not self._processes:
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._slow = [], [], False
        shutil.rmtree(self._meeting, ignore_errors=True)


def _pack(value: Any) -> bytes:
    """As one message. A pipe's own `send` would share a piece of memory for every tensor, which takes longer."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)  # from our own children, through a pipe


def _serve(rank: int, size: int, meeting: Path, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    # A rank may have children, as a loader's workers are; it still ends with the tests, being a daemon to them.
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
