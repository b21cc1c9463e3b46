"""`accelerate.scheduler`: the name of what `prepare` makes of a scheduler."""

from plait.frontends.accelerate.prepared import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
