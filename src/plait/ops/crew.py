"""Threads for work on host memory that is cut into pieces.

[Note: no barriers] torch splits each operation over its threads and waits for all of them at its end. For long
operations that is right. For many short ones, on a machine whose cores have other work too, every wait lasts as long as
the one thread that was set aside by the system. A crew's threads take piece after piece, each with all operations of
its piece, and wait for nobody before the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import torch


class Crew:
    """A few threads, in each of which torch works on one core."""

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._pool = ThreadPoolExecutor(threads, initializer=_work_alone)
        ready = threading.Barrier(threads)
        usual = torch.get_num_threads()
        wait([self._pool.submit(ready.wait) for _ in range(threads)])
        # What a thread says about itself, torch also takes as the wish for threads to come: they get the usual number.
        torch.set_num_threads(usual)

    def share(self, count: int, work: Callable[[Iterator[int]], None]) -> None:
        """Let every thread run `work` over the numbers below `count`; each number is given out once."""
        numbers = iter(range(count))
        done = [self._pool.submit(work, numbers) for _ in range(min(count, self._size))]
        wait(done)
        for each in done:
            each.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _work_alone() -> None:
    torch.get_num_threads()  # a thread takes up the usual number when it first asks, so it must have asked before
    torch.set_num_threads(1)
