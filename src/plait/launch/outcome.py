"""How one attempt at a job went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.launch.records import Record

LEAVE_S = 60.0
"""How long ranks may take to save and leave when they are to start again with others."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All ranks are gone, one way or another."""

    code: int
    """The exit code for a shell."""
    records: Sequence[Record]
    hung: bool = False
    interrupted: bool = False
    """The user ended it."""
    reform: bool = False
    """The ranks were asked to leave because others can join them now."""


def never() -> bool:
    """Nobody wants to join."""
    return False
