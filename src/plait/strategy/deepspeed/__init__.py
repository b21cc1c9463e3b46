"""Real DeepSpeed as an engine. The library is imported in here only."""

from plait.strategy.deepspeed.prepare import prepare_deepspeed

__all__ = ["prepare_deepspeed"]
