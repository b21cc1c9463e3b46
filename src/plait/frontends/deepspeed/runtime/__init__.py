"""`deepspeed.runtime`: where scripts look for names that lie elsewhere here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from plait.frontends.deepspeed.missing_names import not_offered

_MODULES = ("activation_checkpointing", "dataloader", "engine", "lr_schedules", "pipe", "utils", "zero")


def __getattr__(name: str) -> Any:
    # When asked for: some of them need what the others are needed for.
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise not_offered(__name__, name)
