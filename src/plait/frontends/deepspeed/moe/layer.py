"""`deepspeed.moe.layer`."""

from __future__ import annotations

from typing import Any

from torch import nn

from plait.errors import ModelError


class MoE(nn.Module):
    """Not offered: DeepSpeed's layer makes process groups of its own, and divides its experts itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError(
            "deepspeed.moe.layer.MoE is not offered: experts are spread by `strategy.layout.ep` over models that hold "
            "all of them. Use the model `type: moe` of `plait train`, or a Mixtral of transformers"
        )
