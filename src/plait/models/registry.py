"""The model families: building a model from the config section `model`, and converting to and from `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from plait.config import CustomModel, GptConfig, HFConfig, LlamaConfig, ModelConfig, MoeConfig, ResNetConfig
from plait.errors import ConfigError, ModelError, Problem
from plait.models.common.weights import Made, are_unchanged, by_translation
from plait.plugins import build_instance
from plait.transformers_internals import not_stored

_CONFIGS: dict[str, type[GptConfig | LlamaConfig | ResNetConfig | HFConfig]] = {
    "gpt": GptConfig,
    "llama": LlamaConfig,
    "moe": MoeConfig,
    "resnet": ResNetConfig,
    "hf": HFConfig,
}
_PORTABLE = ("gpt", "llama", "moe")
"""Plait's own families whose models can be converted to and from a model of `transformers`."""


def build_model(config: ModelConfig, *, trust_code: bool = False) -> nn.Module:
    """Return the model that `config` describes. Only its family is imported.

    `trust_code`: the folder of a `transformers` model may contain code of its own, which is then run.
    """
    if isinstance(config, CustomModel) and isinstance(config.given, nn.Module):
        message = f"a {type(config.given).__name__} instance cannot be built again where it is needed"
        raise ConfigError(Problem("model.type", message, "Name its class here, or give it as `Runner(model=…)`."))
    given = {"trust_code": trust_code} if isinstance(config, HFConfig) else {}
    model: nn.Module = build_instance(config, "model", cls=nn.Module, **given)
    return model


def preset(family: str, name: str, **changes: Any) -> ModelConfig:
    """Return a named size of a family (`preset("llama", "1b", layers=4)`), with changes."""
    if family not in _CONFIGS:
        raise ModelError(f"no model family {family!r}; there are {', '.join(_CONFIGS)}")
    presets = _module_of(family).PRESETS
    if name not in presets:
        raise ModelError(f"no preset {name!r} in {family!r}; there are {', '.join(presets)}")
    return _CONFIGS[family](**{**presets[name], **changes})


def _module_of(family: str) -> Any:
    return import_module(f"plait.models.{family}")


class TransformersExport(NamedTuple):
    """The `transformers` model that computes the same as one of Plait's models."""

    description: dict[str, Any]
    """Its `config.json`, except for the dtype."""
    made: dict[str, Made] | None
    """How to compute each of its tensors from Plait's; None if names and tensors are the same."""
    folder: Path | None = None
    """The folder that the model was loaded from, which may have a tokenizer."""
    unused: tuple[str, ...] = ()
    """Patterns of the names of the model's tensors that are not written."""


class TransformersImport(NamedTuple):
    """The model of Plait that computes the same as a `transformers` model."""

    config: ModelConfig | None
    """None where there was no `config.json`."""
    made: dict[str, Made]
    """How to compute each of Plait's tensors from the stored ones."""
    unused: tuple[str, ...]
    """Patterns of the names of stored tensors that are not used."""


def to_transformers(config: ModelConfig, *, trust_code: bool = False) -> TransformersExport:
    """Return the `transformers` model that computes the same as a model; raise a `ModelError` if there is none."""
    if isinstance(config, HFConfig):
        hf, folder = _module_of("hf"), None if config.path is None else Path(config.path)
        with torch.device("meta"):
            model = hf.build_hf_model(config, trust_code=trust_code)
        return TransformersExport(hf.describe(model), hf.made_to_store(model), folder, tuple(not_stored(model)))
    if config.type not in _PORTABLE:
        raise ModelError(
            f"`model.type: {config.type}` has no counterpart in transformers; of Plait's families, hf, "
            f"{', '.join(_PORTABLE)} have one. Write a state dict with `--to torch`, or a checkpoint with `--to plait`"
        )
    module = _module_of(config.type)
    return TransformersExport(module.describe(config), module.to_transformers(config))


def from_transformers(
    family: str, description: Mapping[str, Any] | None, shapes: Mapping[str, torch.Size]
) -> TransformersImport:
    """Return the model of `family` that computes the same as a `transformers` model.

    `description` is the `config.json` of the latter, if there is one; `shapes` has the shapes of its stored tensors.
    Raise a `ModelError` if the family has no such model.
    """
    if family not in _PORTABLE:
        raise ModelError(f"family {family!r} cannot take weights of transformers; write one of {', '.join(_PORTABLE)}")
    module = _module_of(family)
    try:
        config = None if description is None else module.from_description(description)
    except KeyError as error:
        raise ModelError(f"config.json has no {error}, which a {family} needs") from error
    unused: tuple[str, ...] = module.UNUSED
    if config is not None and config.tie_embeddings:
        unused = (*unused, r"^lm_head\.weight$")  # the embedding's own values, stored twice
    made = module.made_from_transformers if family == "moe" else partial(by_translation, module.from_transformers)
    return TransformersImport(config, made(shapes), unused)


def from_stored(
    config: HFConfig, shapes: Mapping[str, torch.Size], *, trust_code: bool = False
) -> dict[str, Made] | None:
    """Return how to compute each tensor of a `transformers` model from stored ones with these names and shapes.

    None if names and tensors are the same.
    """
    hf = _module_of("hf")
    with torch.device("meta"):
        model = hf.build_stored(config, trust_code=trust_code)
    made: dict[str, Made] = hf.made_from_stored(model, shapes)
    return None if are_unchanged(made) else made
