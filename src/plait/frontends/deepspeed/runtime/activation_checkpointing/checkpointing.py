"""`deepspeed.runtime.activation_checkpointing.checkpointing`, which `deepspeed.checkpointing` is short for."""

from typing import Any

from plait.frontends.deepspeed.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)
from plait.frontends.deepspeed.missing_names import not_offered

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
