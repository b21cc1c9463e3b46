"""`accelerate.optimizer`: the name of what `prepare` makes of an optimizer."""

from plait.frontends.accelerate.prepared import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
