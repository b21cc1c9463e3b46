"""`deepspeed.runtime.engine`."""

from plait.frontends.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
