"""Count the parameters that one token uses: of a mixture, those of the experts that it is sent to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from plait.distributed import expert_modules

_TOP_K = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "num_experts_per_token")
"""Names of the number of experts per token: in a router, in the module around it, or in the config."""


def active_params(model: nn.Module) -> int:
    """Return how many parameters one token is multiplied with.

    These are the parameters of `top_k` of the experts of a mixture, and all others but the tables that are only looked
    up: embeddings that are not also the head. Experts count as a whole where the model does not say how many of them a
    token uses.
    """
    total = sum(param.numel() for param in model.parameters()) - _looked_up(model)
    for name, module in expert_modules(model).items():
        experts = int(module.num_experts)  # type: ignore[arg-type]
        chosen = _experts_per_token(model, name, experts)
        total -= sum(param.numel() for param in module.parameters(recurse=False)) * (experts - chosen) // experts
    return total


def _looked_up(model: Any) -> int:
    multiplied = {id(param) for param in (model.root_parameters() if hasattr(model, "root_parameters") else ())}
    tables = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                tables[id(param)] = param
            else:
                multiplied.add(id(param))
    return sum(param.numel() for key, param in tables.items() if key not in multiplied)


def _experts_per_token(model: nn.Module, name: str, experts: int) -> int:
    """Return to how many of the `experts` of the module with this name a token is sent; all, where that is unknown."""
    for holder in _holders(model, name):
        for key in _TOP_K:
            number = getattr(holder, key, None)
            if isinstance(number, int) and 0 < number <= experts:
                return number
    return experts


def _holders(model: nn.Module, name: str) -> Iterator[Any]:
    """Yield what may know the number of experts per token, the nearest first: modules around the experts, configs."""
    around = name
    while around:
        module = model.get_submodule(around)
        yield module
        around = around.rpartition(".")[0]
        if isinstance(module, nn.ModuleList):
            break  # beyond the layer are other mixtures
        yield from model.get_submodule(around).children() if around else ()
    configs = [getattr(holder, "config", None) for holder in (model.get_submodule(name), model)]
    for config in configs:
        if config is not None:
            yield config.get_text_config() if hasattr(config, "get_text_config") else config
