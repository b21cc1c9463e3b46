"""`deepspeed.ops.adam.fused_adam`."""

from plait.frontends.deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
