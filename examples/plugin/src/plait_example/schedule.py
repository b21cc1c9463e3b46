"""A schedule of one's own: up in a straight line, and down again."""

from __future__ import annotations


def triangle(step: int, total_steps: int, *, peak: float = 0.3) -> float:
    """Return the factor of the learning rate for the update number `step`; `peak` is where it is 1, as a share."""
    position = (step + 1) / total_steps
    return position / peak if position <= peak else max(0.0, (1 - position) / (1 - peak))
