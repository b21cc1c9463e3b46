"""`deepspeed.runtime.zero.utils`."""

from plait.frontends.deepspeed.parameter_links import is_zero_param

__all__ = ["is_zero_param"]
