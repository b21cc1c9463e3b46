"""How many layers a described model has, and the same model with another number of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config.files import read_json_object
from plait.config.model import GptConfig, HFConfig, ImportedModel, LlamaConfig, ModelConfig, ModelPart
from plait.errors import ModelError

LAYER_KEYS = ("layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""How models call their number of layers."""


def depth_of(model: ModelConfig | None) -> int | None:
    """The number of layers; None where there is no such number."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.layers
    settings = _settings(model)
    key = _layer_key(settings)
    return None if key is None else int(settings[key])


def with_depth(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with so many layers; one that `depth_of` knows the number of."""
    if isinstance(model, GptConfig | LlamaConfig):
        return model.model_copy(update={"layers": layers})
    settings = _settings(model)
    key = _layer_key(settings)
    assert key is not None
    # Some models list what each layer is.
    lists = {name: value[:layers] for name, value in settings.items() if _one_each(value, settings[key])}
    fewer = {**settings, **lists, key: layers}
    if isinstance(model, ImportedModel):
        return model.model_copy(update={"args": fewer})
    if isinstance(model, ModelPart):
        return model.model_copy(update=fewer)
    return model.model_copy(update={"config": fewer, "path": None})


def _settings(model: ModelConfig | None) -> Mapping[str, Any]:
    if isinstance(model, ImportedModel):
        return model.args
    if isinstance(model, ModelPart):
        return model.arguments
    if not isinstance(model, HFConfig):
        return {}
    if model.config is not None:
        return model.config
    return read_json_object(Path(model.path or ".").expanduser() / "config.json", ModelError)


def _layer_key(settings: Mapping[str, Any]) -> str | None:
    return next((key for key in LAYER_KEYS if isinstance(settings.get(key), int)), None)


def _one_each(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count
