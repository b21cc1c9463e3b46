"""An engine around a model."""

from __future__ import annotations

from typing import Any

from torch import nn


class Around(nn.Module):
    """Holds a model as `module`. What it does not have itself is asked of the model."""

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            kind = type(self).__name__
            raise AttributeError(f"neither Plait's {kind} nor the model in it has {name!r}") from None
