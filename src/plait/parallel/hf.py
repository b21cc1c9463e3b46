"""Knowing a model of `transformers` when one comes, without loading the package."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a model comes from `transformers`. As long as nobody has loaded the package, none does."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)


def train_without_caches(model: nn.Module) -> None:
    """Keep models of `transformers` from filling a cache of keys and values while they learn.

    Most would, if nobody says otherwise. A layer that is computed again would find there what it wrote the first time,
    and write once more.
    """
    for module in model.modules():
        if is_transformers_model(module) and "use_cache" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("past_key_values") is not None:
        raise ModelError(
            f"{type(module).__name__} was given past_key_values, which layers that are computed again would write to "
            "twice; set strategy.recompute: none, or leave them out"
        )
    return args, {**kwargs, "use_cache": False}
