"""Steps that were left out because something in them was not finite: how many, and when there are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from plait.config import GuardConfig
from plait.errors import NonFiniteError

_REMEDY = "Lower optim.lr, set train.clip_norm, or use precision: bf16 instead of fp16"


class Skips:
    """Counts skipped steps and stops a run that has too many of them.

    Overflows with which fp16 finds its loss scale are not counted: whoever counts leaves them out.
    """

    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard
        self.in_a_row = 0
        self.total = 0
        """Since the run began, checkpoints before it included."""
        self._recent: deque[int] = deque()
        """The numbers of the skipped steps among the last `window` ones."""
        self._last = ""

    def add(self, step: int, seen: str, *, scale: float | None = None) -> None:
        """Count step number `step` as skipped; `seen` says where the first number was that is not finite."""
        self.in_a_row += 1
        self.total += 1
        self._recent.append(step)
        while self._recent[0] <= step - self._guard.window:
            self._recent.popleft()
        self._last = f"{'' if scale is None else f', at loss scale {scale:g}'}{seen}"
        if self.in_a_row >= self._guard.max_skips:
            raise self._error(f"{self.in_a_row} steps in a row", "train.guard.max_skips sets how many are accepted")
        if len(self._recent) > self._guard.max_share * self._guard.window:
            known = min(step + 1, self._guard.window)
            raise self._error(f"{len(self._recent)} of the last {known} steps", self._share())

    def end_of_run(self, skipped: int, steps: int) -> None:
        """Refuse to call a run of `steps` steps finished of which so many were skipped, however short it was."""
        if skipped > self._guard.max_share * steps:
            raise self._error(f"{skipped} of the {steps} steps of this run", self._share())

    def _share(self) -> str:
        return f"train.guard.max_share sets which share is accepted, now {self._guard.max_share:g}"

    def _error(self, which: str, how: str) -> NonFiniteError:
        return NonFiniteError(f"{which} had a non-finite loss or gradient{self._last}. {_REMEDY}; {how}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint carries."""
        return {"skips_in_a_row": self.in_a_row, "skipped": {"total": self.total, "recent": list(self._recent)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an engine; one that another program wrote has only the first number."""
        self.in_a_row = int(state["skips_in_a_row"])
        more = state.get("skipped", {})
        self.total = int(more.get("total", 0))
        self._recent = deque(int(step) for step in more.get("recent", ()))
