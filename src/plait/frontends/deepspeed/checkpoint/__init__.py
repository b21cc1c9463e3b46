"""`deepspeed.checkpoint`."""

from plait.frontends.deepspeed.checkpoint import utils

__all__ = ["utils"]
