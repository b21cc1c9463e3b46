"""A model, made from its section of the run description."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from plait.config import GptConfig, HFConfig, ImportedModel, LlamaConfig, ModelConfig, MoeConfig, ResNetConfig
from plait.errors import ModelError


def build_model(config: ModelConfig, *, trust_code: bool = False) -> nn.Module:
    """The model that `config` describes. Only the family that is asked for gets imported.

    `trust_code`: the folder of a `transformers` model may bring classes of its own, which are then run.
    """
    match config:
        case GptConfig():
            from plait.models.gpt import Gpt

            return Gpt(config)
        case MoeConfig():  # before the Llama that it extends
            from plait.models.moe import Moe

            return Moe(config)
        case LlamaConfig():
            from plait.models.llama import Llama

            return Llama(config)
        case ResNetConfig():
            from plait.models.resnet import ResNet

            return ResNet(config)
        case HFConfig():
            from plait.models.hf import build_hf_model

            return build_hf_model(config, trust_code=trust_code)
        case ImportedModel():
            from plait.models.imported import build_imported_model

            return build_imported_model(config)


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
    presets = import_module(f"plait.models.{family}.presets").PRESETS
    if name not in presets:
        raise ModelError(f"no preset {name!r} in {family!r}; there are {', '.join(presets)}")
    return families[family](**{**presets[name], **changes})
