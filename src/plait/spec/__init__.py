"""The vocabulary that the rooms share: loss terms, batches, events, phases."""

from plait.spec.batch import MicroBatch
from plait.spec.event import Event, EventKind, Sink
from plait.spec.loss import LossTerm
from plait.spec.phase import Phase

__all__ = ["Event", "EventKind", "LossTerm", "MicroBatch", "Phase", "Sink"]
