"""Processes that read data: how one of them ended, where torch only says that it did."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")


class WorkerEnds:
    """Reads from a `DataLoader`, and notes on its error which signal or exit code its workers ended with.

    In torch's words: whoever explains a failed run knows them already.
    """

    def __init__(self) -> None:
        self._workers: set[BaseProcess] = set()

    def read(self, loader: Iterable[T]) -> Iterator[T]:
        """What the loader gives."""
        before = set(active_children())
        items = iter(loader)
        self._workers |= set(active_children()) - before  # those that stay from epoch to epoch are known already
        try:
            yield from items
        except RuntimeError as error:
            for worker in self._workers:
                code = worker.exitcode
                if code:
                    how = (
                        f"is killed by signal: {signal.strsignal(-code)}." if code < 0 else f"exited with code {code}."
                    )
                    error.add_note(f"DataLoader worker (pid {worker.pid}) {how}")
            raise
