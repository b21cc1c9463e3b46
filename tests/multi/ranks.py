"""Real gloo ranks for tests: started once, used by many tests.

A test hands `RankPool.run` a top-level function; every rank calls it with (rank, size, *args) and the results
come back in rank order. A rank that raises, dies or hangs ends the pool, and the next test gets a fresh one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


class RankFailedError(AssertionError):
    """Some rank raised; carries that rank's own traceback."""


class RankPool:
    def __init__(self, size: int, *, timeout_s: float = 120.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + self._timeout_s
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0.1) if not failures else 5.0):
                failures.append(f"rank {rank}: no answer")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank}: died")
                continue
            (results if ok else failures).append(value)
        if failures:
            self.close()
            raise RankFailedError("\n".join(failures))
        return results

    def _start(self) -> None:
        rendezvous = tempfile.mktemp(prefix="plait-ranks-")
        for rank in range(self.size):
            mine, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(rank, self.size, rendezvous, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, rendezvous: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    # A rank may have children, as a loader's workers are; it still ends with the tests, being a daemon to them.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, size, *args))
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)
