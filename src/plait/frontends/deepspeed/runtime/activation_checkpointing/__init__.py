"""`deepspeed.runtime.activation_checkpointing`."""

from plait.frontends.deepspeed import checkpointing

__all__ = ["checkpointing"]
