"""`deepspeed.runtime.activation_checkpointing.checkpointing`, which `deepspeed.checkpointing` is short for."""

from typing import Any

from plait.frontends.deepspeed.absent import not_offered
from plait.frontends.deepspeed.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
