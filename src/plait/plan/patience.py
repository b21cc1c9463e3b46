"""A limit of time for a search, which also ends a simulation that is under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plait.torch_internals import in_backward_pass

SEARCH_S = 40.0
"""How long a search for what makes a run fit may take beyond the plan itself."""


class TimeUpError(Exception):
    """The time is up. Nobody meets it: whoever gives patience catches it, and says what was left out."""


class Patience:
    """So many seconds from now on; a recorder's watcher, so that an operation soon after them is the last.

    Not one of a backward pass: autograd's threads do not survive it. What comes after the pass is as good.
    """

    def __init__(self, seconds: float = SEARCH_S, clock: Callable[[], float] = time.monotonic) -> None:
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

    def saw(self, *_operation: Any) -> None:
        """Go on, or not."""
        if not in_backward_pass() and self.over:
            raise TimeUpError

    def _passed(self) -> float:
        return self._clock() - self._start
