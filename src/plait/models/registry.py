"""From the section `model` to a module."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from plait.config import CustomModel, GptConfig, HFConfig, LlamaConfig, ModelConfig, MoeConfig, ResNetConfig
from plait.errors import ConfigError, ModelError, Problem
from plait.plugins import build_instance


def build_model(config: ModelConfig, *, trust_code: bool = False) -> nn.Module:
    """The model that `config` describes. Only the family that is asked for gets imported.

    `trust_code`: the folder of a `transformers` model may bring classes of its own, which are then run.
    """
    if isinstance(config, CustomModel) and isinstance(config.given, nn.Module):
        message = f"a {type(config.given).__name__} that is made already cannot be made once more where it is needed"
        raise ConfigError(Problem("model.type", message, "Name its class here, or give it as `Runner(model=…)`."))
    given = {"trust_code": trust_code} if isinstance(config, HFConfig) else {}
    model: nn.Module = build_instance(config, "model", cls=nn.Module, **given)
    return model


def preset(family: str, name: str, **changes: Any) -> ModelConfig:
    """A named size of a family (`preset("llama", "1b", layers=4)`), with changes."""
    families: dict[str, type[GptConfig | LlamaConfig | ResNetConfig | HFConfig]] = {
        "gpt": GptConfig,
        "llama": LlamaConfig,
        "moe": MoeConfig,
        "resnet": ResNetConfig,
        "hf": HFConfig,
    }
    if family not in families:
        raise ModelError(f"no model family {family!r}; there are {', '.join(families)}")
    presets = import_module(f"plait.models.{family}").PRESETS
    if name not in presets:
        raise ModelError(f"no preset {name!r} in {family!r}; there are {', '.join(presets)}")
    return families[family](**{**presets[name], **changes})
