"""A limit of time for a search, which also ends a simulation that is under way.

What counts is what this process computes, not what a clock on the wall says: on a host that others keep busy a search
takes longer, and finds the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plait.torch_internals import in_backward_pass

SEARCH_S = 40.0
"""How long a search for what makes a run fit may compute beyond the plan itself."""


class TimeUpError(Exception):
    """The time is up. Nobody meets it: whoever gives patience catches it, and says what was left out."""


class Patience:
    """So many CPU seconds from now on; a recorder's watcher, so that an operation soon after them is the last.

    Not one of a backward pass: autograd's threads do not survive it. What comes after the pass is as good.
    """

    def __init__(self, seconds: float = SEARCH_S, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self._passed() >= self.seconds

    @property
    def half_over(self) -> bool:
        """Whether half of it is."""
        return self._passed() >= self.seconds / 2

    def again(self, seconds: float) -> Patience:
        """Other seconds from now on, by the same clock."""
        return Patience(seconds, self._clock)

    def saw(self, *_operation: Any) -> None:
        """Go on, or not."""
        if not in_backward_pass() and self.over:
            raise TimeUpError

    def _passed(self) -> float:
        return self._clock() - self._start
