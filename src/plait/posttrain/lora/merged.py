"""A checkpoint with adapters, seen as one without: every adapter added to its matrix as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import Recipe, Source, View
from plait.config import LoraConfig, parse_stored
from plait.errors import CheckpointError
from plait.models import build_model
from plait.posttrain.lora.attach import AdapterSpec
from plait.posttrain.lora.layer import difference, is_transposed

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def has_adapters(source: Source) -> bool:
    """Whether there are any."""
    return any(name.startswith("model.") and name.endswith(_UP) for name in source.entries)


def merged(source: Source, *, trust_code: bool = False) -> Source:
    """The model of a run with `lora`, whole; no optimizer goes with it, whose state belongs to the adapters."""
    config: Mapping[str, Any] = source.state.get("config") or {}
    if any(name.endswith(".weight_codes") for name in source.entries):
        raise CheckpointError(
            f"{source.path} holds matrices in 4 or 8 bits, to which nothing can be added. Merge the adapter into the "
            "model that it was trained on: start another phase from that model with lora.base: full and lora.adapter"
        )
    if frozen := source.state.get("frozen"):
        raise CheckpointError(
            f"{source.path} holds only what was trained; {len(frozen['names'])} other tensors are not in it"
        )
    scale = AdapterSpec.of(LoraConfig(**config["lora"])).scale
    layers = [name.removesuffix(_UP) for name in source.entries if name.endswith(_UP) and name.startswith("model.")]
    turned = _transposed(source, layers, trust_code)
    recipes: dict[str, Recipe] = {}
    for name in source.entries:
        layer = name.removesuffix(".weight")
        if not name.startswith("model.") or name.endswith((_DOWN, _UP)):
            continue
        if layer in layers:
            recipes[name] = (name, f"{layer}{_DOWN}", f"{layer}{_UP}"), _adding(scale, turned=layer in turned)
        else:
            recipes[name] = (name,), _same
    return View(source, recipes, state={"config": {key: value for key, value in config.items() if key != "lora"}})


def _transposed(source: Source, layers: list[str], trust_code: bool) -> set[str]:
    """Layers whose weight is (in, out): `Conv1D` of `transformers`."""
    stored = {"model": source.state["config"]["model"]}
    described = parse_stored(stored, source.description, trust_code=trust_code).model
    if described is None or described.type != "hf":
        return set()
    with torch.device("meta"):
        model: nn.Module = build_model(described, trust_code=trust_code)
    return {layer for layer in layers if is_transposed(model.get_submodule(layer.removeprefix("model.")))}


def _adding(scale: float, *, turned: bool) -> Callable[..., Tensor]:
    return partial(_add, scale, turned)


def _add(scale: float, turned: bool, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    change = difference(down.float(), up.float(), scale)
    return weight + (change.t() if turned else change).to(weight.dtype)


def _same(tensor: Tensor) -> Tensor:
    return tensor
