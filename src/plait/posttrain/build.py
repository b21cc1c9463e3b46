"""From a run description to the model of its phase."""

from __future__ import annotations

from torch import nn

from plait.config.posttrain import DpoConfig, PosttrainConfig, RewardConfig
from plait.config.run import RunConfig
from plait.models import build_model
from plait.posttrain.answers import preferring, rewarding
from plait.posttrain.extend import extend, swap_head
from plait.posttrain.lora.adapter import Adapter, read_adapter
from plait.posttrain.lora.attach import AdapterSpec, attach, freeze_others
from plait.posttrain.lora.quantized import quantize
from plait.posttrain.start import open_start


def make_model(config: RunConfig) -> nn.Module:
    """The model as its phase needs it, on whatever device is current; on `meta` without values."""
    assert config.model is not None
    model = build_model(config.model)
    mixins: tuple[type[nn.Module], ...] = ()
    if config.phase == "reward":
        swap_head(model)
        mixins = (rewarding(config.reward or RewardConfig()),)
    elif config.phase == "dpo":
        mixins = (preferring(model, config.dpo or DpoConfig()),)
    adapter = _add_adapters(model, config)
    section = config.posttrain or PosttrainConfig()
    start = open_start(section.start, config.model, adapter, model)
    return extend(model, start=start, mixins=mixins)


def _add_adapters(model: nn.Module, config: RunConfig) -> Adapter | None:
    lora = config.lora
    if lora is None:
        return None
    names = attach(model, AdapterSpec.of(lora), lora.targets)
    if lora.only:
        freeze_others(model, lora.also)
    if lora.base != "full":
        quantize(model, names, lora.base)
    return None if lora.adapter is None else read_adapter(lora.adapter, model)
