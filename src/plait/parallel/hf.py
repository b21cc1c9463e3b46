"""Knowing a model of `transformers` when one comes, without loading the package."""

from __future__ import annotations

import sys

from torch import nn


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a model comes from `transformers`. As long as nobody has loaded the package, none does."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)
