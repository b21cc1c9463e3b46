"""The vocabulary that the rooms share: loss terms, batches, events, phases."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.spec import heartbeat as heartbeat
    from plait.spec.event import Event as Event
    from plait.spec.event import EventKind as EventKind
    from plait.spec.event import MessageEvent as MessageEvent
    from plait.spec.event import Phase as Phase
    from plait.spec.event import Sink as Sink
    from plait.spec.heartbeat import FOLDER_VARIABLE as FOLDER_VARIABLE
    from plait.spec.heartbeat import STACK_SIGNAL as STACK_SIGNAL
    from plait.spec.heartbeat import Beat as Beat
    from plait.spec.heartbeat import read_beat as read_beat
    from plait.spec.step import Entry as Entry
    from plait.spec.step import Later as Later
    from plait.spec.step import LossTerm as LossTerm
    from plait.spec.step import MicroBatch as MicroBatch
    from plait.spec.step import first_part as first_part
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["heartbeat"],
            "event": ["Event", "EventKind", "MessageEvent", "Phase", "Sink"],
            "heartbeat": ["Beat", "FOLDER_VARIABLE", "STACK_SIGNAL", "read_beat"],
            "step": ["Entry", "Later", "LossTerm", "MicroBatch", "first_part"],
        },
    )
