"""How the tokens of a row reach each other in a model of `transformers`, as far as the model itself says.

Attention sees other tokens by way of a mask, and is looked up in a registry that others may extend. A recurrent state,
a convolution along the row or an index of compressed tokens knows neither: it runs on into the next document of a
packed row, and stays on its rank where ranks share a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from plait.transformers_internals import is_stateful, no_split_modules

_BY_MASK = frozenset({"full_attention", "sliding_attention", "chunked_attention", "window_attention"})
"""What `transformers` calls layers whose tokens reach each other by way of a mask alone."""
_NOT_MIXING = frozenset({"moe", "sparse", "dense", "mlp"})
"""What it calls layers that look at each token alone."""
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


def mixer_without_mask(model: nn.Module) -> str | None:
    """What in a model brings tokens together without asking the attention mask; None where nothing is known to."""
    for module in model.modules():
        kinds = {str(kind) for kind in getattr(getattr(module, "config", None), "layer_types", None) or ()}
        if other := sorted(kinds - _BY_MASK - _NOT_MIXING):
            return f"layers of type {', '.join(map(repr, other))}"
        if is_stateful(module):
            return "a recurrent state"
    return None


def blocks_without_registry(model: Any) -> Iterator[str]:
    """The names of a model's layers in which nothing looks its attention up in the registry of `transformers`."""
    classes = no_split_modules(model)
    for name, block in model.named_modules():
        listed = type(block).__name__ in classes and name.rpartition(".")[2].isdigit()
        if listed and not any(_asks_the_registry(type(part)) for part in block.modules()):
            yield name


def _asks_the_registry(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and _REGISTRY in code.co_names


def attends_both_ways(model: Any) -> bool:
    """Whether a model that is to predict the next token sees it: an encoder that was not made a decoder."""
    text = model.config.get_text_config()
    if getattr(text, "is_decoder", None) is not False or getattr(text, "is_encoder_decoder", False):
        return False
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    learns_to_fill_in = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING
    return not any(causal) and (bool(causal) or learns_to_fill_in)
