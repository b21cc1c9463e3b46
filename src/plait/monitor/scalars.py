"""The numbers of an event that are worth a curve."""

from __future__ import annotations

from plait.monitor.units import number
from plait.spec import Event, EventKind

BOOKKEEPING = frozenset({"eta", "step_in_epoch", "steps_per_epoch", "max_steps", "max_epochs", "by_epoch"})
"""Keys of a TRAIN event that place it in the run and measure nothing."""


def scalars(event: Event) -> dict[str, float]:
    """Name and value of everything the event measured; metrics of an evaluation stand beside its times."""
    flat = {key: value for key, value in event.data.items() if key not in BOOKKEEPING}
    if event.kind in (EventKind.VALIDATE, EventKind.TEST):
        flat = {**dict(flat.pop("metrics", {})), **flat}
    found = ((key, number(value)) for key, value in flat.items() if not isinstance(value, str))
    return {key: value for key, value in found if value is not None}
