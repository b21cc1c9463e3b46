"""`deepspeed.moe`: its MoE layer is not offered; its functions about a model's experts find none."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError


class MoE(nn.Module):
    """Raises an error: DeepSpeed's layer, which creates process groups and shards experts itself, is not offered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            "deepspeed.moe.layer.MoE is not offered: `strategy.layout.ep` shards the experts of models that hold all "
            "of them. Use the model `type: moe` of `plait train`, or a Mixtral of transformers"
        )


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): no model here can have a layer of DeepSpeed's experts."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return False: no parameter here can belong to one of DeepSpeed's experts."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups unchanged, as a list: none of them has parameters of DeepSpeed's experts."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
