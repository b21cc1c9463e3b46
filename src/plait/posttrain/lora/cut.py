"""How the ranks of a tensor-parallel group share adapters: as they share the layers beside them.

A layer whose output features are shared has a whole `A`, of which every rank has a summand of the gradient, and a `B`
by output features. One whose input features are shared has an `A` by input features, whose results are added, and a
whole `B`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from plait.errors import ConfigError, Problem
from plait.posttrain.lora.layer import has_adapter

_COLUMNS = frozenset({"colwise", "colwise_gather", "heads", "kv_heads"})
_ROWS = frozenset({"rowwise", "rowwise_split"})


def with_adapters(model: nn.Module, words: Mapping[str, str]) -> dict[str, str]:
    """A tensor plan for a model with adapters, from the plan of the model without them."""
    from plait.parallel import outer

    found = dict(words)
    for name, module in model.named_modules():
        word = words.get(name)
        if not has_adapter(module) or word in (None, "replicate", "inner"):
            continue
        # Inside a region the input has been brought into shared work; elsewhere `B` does so itself.
        before = "inner" if outer(name, words, "region") is not None else "sequence"
        if word in _COLUMNS:
            down, up = before, "colwise_gather" if word == "colwise_gather" else "colwise"
        elif word in _ROWS:
            down, up = str(word), "sequence"
        elif word == "qkv_heads":
            down, up = before, "qkv_heads"
            parent = model.get_submodule(name.rpartition(".")[0])
            module.head_dim = parent.head_dim  # `B` is cut by heads too, and looks for their width around itself
        else:
            message = f"{name!r} has an adapter, and the tensor plan gives it {word!r}, which an adapter cannot follow"
            raise ConfigError(Problem("lora.targets", message, "Leave it out, or use strategy.layout.tp: 1."))
        found[f"{name}.lora_A"], found[f"{name}.lora_B"] = down, up
    return found
