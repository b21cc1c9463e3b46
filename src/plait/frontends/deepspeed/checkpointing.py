"""`deepspeed.checkpointing`: recompute activations in the backward pass instead of storing them.

[Note: settings between two calls]
DeepSpeed's API has no object for settings: scripts call `configure` once, and later `checkpoint` inside a model. So,
unlike other modules, this one keeps state between calls: a context variable that holds a frozen value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as recompute

from plait.errors import ConfigError, Problem
from plait.frontends.deepspeed.module_layout import not_offered

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


@dataclass(frozen=True, slots=True)
class _Settings:
    on_host: bool = False


_settings: ContextVar[_Settings | None] = ContextVar("deepspeed_checkpointing", default=None)
"""[Note: settings between two calls]"""


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` stores its inputs; arguments take precedence over the section `activation_checkpointing`.

    `checkpoint_in_cpu` moves them to host memory. Partitioned activations need Megatron's tensor parallelism and
    are refused. Contiguous buffers, their number, synchronization and timing have no effect: torch's allocator needs no
    such buffers.
    """
    section = _section(deepspeed_config)
    if partition_activations is None:
        partition_activations = bool(section.get("partition_activations", False))
    if partition_activations and mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        message = "true partitions activations over Megatron's tensor-parallel ranks, which are not known here"
        remedy = "Leave it out; `strategy.tensor.sequence_parallel` shards activations under `plait train`."
        raise ConfigError(Problem("activation_checkpointing.partition_activations", message, remedy))
    if checkpoint_in_cpu is None:
        checkpoint_in_cpu = bool(section.get("cpu_checkpointing", False))
    _settings.set(_Settings(checkpoint_in_cpu))


def _section(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    from plait.frontends.deepspeed.config import read_config

    section = read_config(config).get("activation_checkpointing")
    return section if isinstance(section, Mapping) else {}


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _settings.get() is not None


def reset() -> None:
    """Do nothing: torch frees buffers by itself."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args)`; it is called again in the backward pass, until when only its arguments are stored."""
    settings = _settings.get()
    if settings is None or not settings.on_host:
        return recompute(function, *args, use_reentrant=False, **kwargs)
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def __getattr__(name: str) -> Any:
    raise not_offered(__name__, name)
