"""One linear layer with an adapter.

[Note: an adapter is a child and a hook]
The layer stays what it is: the same module, class and forward, so every technique that knows linear layers still does,
and no parameter changes its name. `lora_A` and `lora_B` become its children, and a hook adds what they say. The file
format of `peft` has the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import ModelError
from plait.posttrain.parts import LoraDown, LoraUp
from plait.world import is_sharded


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is `Conv1D` of `transformers`, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether an adapter may stand beside a module."""
    plain = isinstance(module, nn.Linear) and not isinstance(module, LoraDown | LoraUp)
    return plain or is_transposed(module)


def features_of(module: nn.Module) -> tuple[int, int]:
    """Input and output features."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (rows, columns) if is_transposed(module) else (columns, rows)


def add_adapter(module: nn.Module, *, rank: int, scale: float, dropout: float) -> None:
    """Put an adapter beside a linear layer, on the layer's device and in its dtype."""
    inputs, outputs = features_of(module)
    weight: Any = module.weight
    down, up = LoraDown(inputs, rank), LoraUp(rank, outputs)
    module.lora_A = down.to(device=weight.device, dtype=weight.dtype)
    module.lora_B = up.to(device=weight.device, dtype=weight.dtype)
    layer: Any = module
    layer.lora_scale, layer.lora_dropout, layer.lora_on = scale, dropout, True
    module.register_forward_hook(_add, with_kwargs=True)


def has_adapter(module: nn.Module) -> bool:
    """Whether there is one."""
    return isinstance(module._modules.get("lora_B"), LoraUp)


def _add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
    layer: Any = module
    if not layer.lora_on:
        return output
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    x = F.dropout(x, layer.lora_dropout, layer.training)
    added: Tensor = layer.lora_B(layer.lora_A(x)) * layer.lora_scale
    if added.shape != output.shape:
        raise ModelError(
            f"an adapter of {layer.lora_B.weight.shape[0]} features stands beside a layer that answers with "
            f"{output.shape[-1]} on this rank, where the adapter has {added.shape[-1]}: strategy.layout.tp cuts the "
            "heads of this layer unevenly; leave it out of lora.targets, or use fewer ranks"
        )
    return output + added


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it would be without its adapters."""
    layers: list[Any] = [module for module in model.modules() if has_adapter(module) and module.lora_on]
    for layer in layers:
        layer.lora_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_on = True


def merge(model: nn.Module) -> int:
    """Add every adapter to its layer's weight and switch it off; returns how many there were. For whole weights."""
    return _move(model, 1.0)


def unmerge(model: nn.Module) -> int:
    """Take every merged adapter out of its layer's weight again and switch it on; returns how many there were."""
    return _move(model, -1.0)


def _move(model: nn.Module, sign: float) -> int:
    found = 0
    for module in model.modules():
        layer: Any = module
        if not has_adapter(module) or layer.lora_on is (sign < 0):
            continue
        if any(is_sharded(param) for param in module.parameters()):
            raise ModelError("an adapter of a sharded model cannot be merged in place; merge what was saved of it")
        if "weight" not in module._parameters:
            raise ModelError("an adapter cannot be merged into a matrix of 4 or 8 bits; build the model with full ones")
        with torch.no_grad():
            change = difference(layer.lora_A.weight, layer.lora_B.weight, layer.lora_scale)
            layer.weight.add_(change.t() if is_transposed(module) else change, alpha=sign)
        layer.lora_on = sign < 0
        found += 1
    return found


def difference(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """What an adapter adds to a weight of (out, in)."""
    return (up @ down) * scale
