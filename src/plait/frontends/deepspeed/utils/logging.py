"""`deepspeed.utils.logging`."""

from plait.frontends.deepspeed.utils import log_dist, logger

__all__ = ["log_dist", "logger"]
