"""`accelerate.utils.deepspeed`: stand-ins for an optimizer and a scheduler that a configuration describes."""

from plait.frontends.accelerate.prepared import DummyOptim, DummyScheduler

__all__ = ["DummyOptim", "DummyScheduler"]
