"""Activations that are computed again in the backward pass rather than kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plait.config.strategy import RecomputeConfig
from plait.errors import ConfigError, Problem
from plait.parallel.units import Unit

_SEVERAL = {
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
    "mm": ("mm", "_scaled_mm"),
}
"""Words that stand for several operations: attention by any kernel, products in 16 bits or in 8."""


def apply_recompute(units: Sequence[Unit], config: RecomputeConfig, *, auto_count: int = 0) -> list[str]:
    """Make the chosen units recompute their activations; returns the names of those that do.

    The units' `forward` is replaced, not wrapped in a module, so no parameter changes its name.
    `auto_count` is how many units the memory budget asks for, with `mode: auto`.
    """
    chosen = {
        "none": [],
        "full": list(units),
        "every": list(units[config.every - 1 :: config.every]),
        "selective": list(units),
        "auto": list(units[:auto_count]),
    }[config.mode]
    context = _selective_context(config.save_ops) if config.mode == "selective" else None
    for unit in chosen:
        _recompute(unit.module, context)
    return [unit.name for unit in chosen]


def _recompute(module: nn.Module, context: Callable[[], Any] | None) -> None:
    forward = module.forward
    extra: dict[str, Any] = {} if context is None else {"context_fn": context}

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    module.forward = recomputed


def _selective_context(save_ops: Sequence[str]) -> Callable[[], Any]:
    kept: set[Any] = set()
    for word in save_ops:
        for name in _SEVERAL.get(word, (word,)):
            packet = getattr(torch.ops.aten, name, None)
            if packet is None:
                raise ConfigError(
                    Problem(
                        "strategy.recompute.save_ops",
                        f"torch has no operation {word!r}",
                        "use names of torch.ops.aten, such as mm, addmm, bmm, or scaled_dot_product_attention",
                    )
                )
            kept.update(getattr(packet, overload) for overload in packet.overloads())

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)
