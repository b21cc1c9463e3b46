"""Who is answered next: one at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_EVERY_S = 0.2
"""How often somebody who waits is looked after."""


class LineFullError(Exception):
    """As many stand in line as may."""


class Line:
    """A line of at most so many, the one whose turn it is included."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._order: deque[object] = deque()
        self._moved = threading.Condition()

    def __len__(self) -> int:
        return len(self._order)

    @contextmanager
    def turn(self, check: Callable[[], object]) -> Iterator[None]:
        """Stand in line, and have the turn while the block lasts; what `check` raises in the meantime ends it."""
        place = object()
        with self._moved:
            if len(self._order) >= self.most:
                raise LineFullError
            self._order.append(place)
        try:
            with self._moved:
                while self._order[0] is not place:
                    self._moved.wait(LOOK_EVERY_S)
                    check()
            yield
        finally:
            with self._moved:
                self._order.remove(place)
                self._moved.notify_all()
