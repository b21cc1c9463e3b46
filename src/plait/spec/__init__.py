"""The vocabulary that the rooms share: loss terms, batches, events, phases."""

from typing import TYPE_CHECKING, Any

from plait.spec.batch import MicroBatch
from plait.spec.event import Event, EventKind, Note, Sink
from plait.spec.phase import Phase

if TYPE_CHECKING:
    from plait.spec.loss import LossTerm

__all__ = ["Event", "EventKind", "LossTerm", "MicroBatch", "Note", "Phase", "Sink"]


def __getattr__(name: str) -> Any:
    # `LossTerm` alone needs torch; rooms that work without torch share the rest of the vocabulary.
    if name == "LossTerm":
        from plait.spec.loss import LossTerm

        return LossTerm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
