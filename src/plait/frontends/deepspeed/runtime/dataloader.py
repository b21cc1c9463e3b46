"""`deepspeed.runtime.dataloader`."""

from plait.frontends.deepspeed.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
