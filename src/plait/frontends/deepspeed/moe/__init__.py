"""`deepspeed.moe`."""

from plait.frontends.deepspeed.moe import layer

__all__ = ["layer"]
