"""The vocabulary that the rooms share: loss terms, batches, events, phases."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.spec.batch import MicroBatch as MicroBatch
    from plait.spec.event import Event as Event
    from plait.spec.event import EventKind as EventKind
    from plait.spec.event import Note as Note
    from plait.spec.event import Sink as Sink
    from plait.spec.loss import LossTerm as LossTerm
    from plait.spec.phase import Phase as Phase
else:
    from plait.lazy import attach

    attach(
        __name__,
        {
            "batch": ["MicroBatch"],
            "event": ["Event", "EventKind", "Note", "Sink"],
            "loss": ["LossTerm"],
            "phase": ["Phase"],
        },
    )
