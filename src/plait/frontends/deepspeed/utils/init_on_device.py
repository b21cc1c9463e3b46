"""`deepspeed.utils.init_on_device`."""

from plait.frontends.deepspeed.utils import OnDevice

__all__ = ["OnDevice"]
