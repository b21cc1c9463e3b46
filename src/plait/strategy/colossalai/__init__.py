"""Real ColossalAI as an engine. The library is imported in here only."""

from plait.strategy.colossalai.prepare import prepare_colossalai

__all__ = ["prepare_colossalai"]
