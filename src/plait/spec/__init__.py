"""The vocabulary that the rooms share: loss terms, batches, events, phases."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.spec import beat as beat
    from plait.spec.batch import MicroBatch as MicroBatch
    from plait.spec.batch import first_part as first_part
    from plait.spec.beat import FOLDER_VARIABLE as FOLDER_VARIABLE
    from plait.spec.beat import STACK_SIGNAL as STACK_SIGNAL
    from plait.spec.beat import Beat as Beat
    from plait.spec.beat import read_beat as read_beat
    from plait.spec.event import Event as Event
    from plait.spec.event import EventKind as EventKind
    from plait.spec.event import Note as Note
    from plait.spec.event import Sink as Sink
    from plait.spec.later import Entry as Entry
    from plait.spec.later import Later as Later
    from plait.spec.loss import LossTerm as LossTerm
    from plait.spec.phase import Phase as Phase
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["beat"],
            "batch": ["MicroBatch", "first_part"],
            "beat": ["Beat", "FOLDER_VARIABLE", "STACK_SIGNAL", "read_beat"],
            "event": ["Event", "EventKind", "Note", "Sink"],
            "later": ["Entry", "Later"],
            "loss": ["LossTerm"],
            "phase": ["Phase"],
        },
    )
