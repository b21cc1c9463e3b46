"""Parameters in the format that computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.precision import FP32_MODULES
from plait.world import is_sharded


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place, except those of modules that need fp32.

    A plain parameter stays the object that it is. A DTensor is replaced by another one, everywhere where it is tied:
    what computes is its local tensor, and new `data` would change the format of the whole only.
    """
    # The old parameters are kept here too: an `id` is theirs only as long as they are alive.
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for part in module.modules():
        for key, param in part._parameters.items():
            if param is None or isinstance(part, FP32_MODULES):
                continue
            if not is_sharded(param):
                param.data = param.data.to(dtype)
                continue
            if id(param) not in replaced:
                cast = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
                replaced[id(param)] = param, cast
            part._parameters[key] = replaced[id(param)][1]


def round_parameters(module: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Cast parameters; returns, for each that has another format now, its values from before."""
    before = {name: param.data for name, param in module.named_parameters()}
    cast_parameters(module, dtype)
    now = {param: before[name] for name, param in module.named_parameters()}
    return {param: whole for param, whole in now.items() if whole.dtype != param.dtype}
