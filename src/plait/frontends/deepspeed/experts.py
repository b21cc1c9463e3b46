"""`deepspeed.moe`: its layer of experts, which is not offered, and its functions for models without one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError


class MoE(nn.Module):
    """Not offered: DeepSpeed's layer makes its own process groups and shards its experts itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            "deepspeed.moe.layer.MoE is not offered: `strategy.layout.ep` shards the experts of models that hold all "
            "of them. Use the model `type: moe` of `plait train`, or a Mixtral of transformers"
        )


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a layer of DeepSpeed's experts, and how many experts: none can have one."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to one of DeepSpeed's experts: none can."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups as they are: none of them has parameters of DeepSpeed's experts."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
