"""`deepspeed.moe.utils`: answers for models without DeepSpeed's own layers of experts, which are not offered."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is one of DeepSpeed's layers of experts, and how many those have: there cannot be one."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to one of DeepSpeed's experts: it cannot."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Groups, apart from those of DeepSpeed's experts, of which there are none: as they were."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
