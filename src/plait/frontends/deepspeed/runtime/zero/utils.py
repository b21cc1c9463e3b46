"""`deepspeed.runtime.zero.utils`."""

from plait.frontends.deepspeed.status import is_zero_param

__all__ = ["is_zero_param"]
