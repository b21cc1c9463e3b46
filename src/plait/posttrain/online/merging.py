"""Adapters on the way out: added to their matrices while whole weights go to a library that knows no adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from plait.generate import Weights
from plait.posttrain.lora.layer import difference, has_adapter, is_transposed

_PARTS = ("lora_A.weight", "lora_B.weight", "weight")


def merged_weights(model: nn.Module, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model` with every adapter added to its matrix; all others pass by as they are.

    One matrix at a time is held until its adapter has come. The sum is made in fp32 and rounded once.
    """
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if has_adapter(module)}
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        layer, part = next(
            ((name.removesuffix(f".{part}"), part) for part in _PARTS if name.endswith(f".{part}")), (name, "")
        )
        if layer not in adapted:
            yield name, tensor
            continue
        pieces = held.setdefault(layer, {})
        pieces[part] = tensor
        if len(pieces) == len(_PARTS):
            down, up, weight = (pieces[part] for part in _PARTS)
            change = difference(down.float(), up.float(), adapted[layer].lora_scale)
            change = change.t() if is_transposed(adapted[layer]) else change
            del held[layer]
            yield f"{layer}.weight", (weight.float() + change).to(weight.dtype)
    assert not held, "a matrix, its adapter or a part of it is no parameter"
