"""Build the model of a phase from its run description."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from plait.config import ONLINE, DpoConfig, LoraConfig, ModelConfig, PosttrainConfig, RewardConfig, RunConfig
from plait.models import build_model
from plait.posttrain.lora import Adapter, AdapterSpec, attach, freeze_others, quantize, read_adapter
from plait.posttrain.losses import preferring, rewarding
from plait.posttrain.rl.actor import policy_class
from plait.posttrain.rl.settings import Online
from plait.posttrain.start import extend, open_start, swap_head

Answering = Callable[[nn.Module], type[nn.Module]]
"""A function from a model to the class that it is extended by: see [Note: a model is extended, not wrapped],
`posttrain/start.py`."""


def make_model(config: RunConfig) -> nn.Module:
    """Return the model of the phase, with its head, adapter and first weights, on the current device.

    On `meta` it has no values.
    """
    assert config.model is not None
    section, phase = config.posttrain or PosttrainConfig(), config.phase
    answering: Answering | None = None
    if phase == "reward":
        return make_value_model(
            config.model,
            section.start,
            lambda _: rewarding(config.reward or RewardConfig()),
            config.lora,
            trust_code=config.trust_code,
        )
    if phase == "dpo":
        answering = partial(preferring, config=config.dpo or DpoConfig())
    elif phase in ONLINE:
        answering = partial(policy_class, online=Online.of(config))
    model = build_model(config.model, trust_code=config.trust_code)
    return _make(model, config.model, section.start, answering, config.lora)


def make_generator_model(config: RunConfig) -> nn.Module:
    """Return the model that generates the policy's answers; its parameters have the names of `make_model`.

    Without an adapter it is the plain model: generation needs no loss, and the decoding kernels support only plain
    models. Adapters are not merged into their weights: in the weights' dtype small changes would be rounded away.
    """
    assert config.model is not None
    return build_model(config.model, trust_code=config.trust_code) if config.lora is None else make_model(config)


def make_value_model(
    described: ModelConfig,
    start: str | None,
    answering: Answering,
    lora: LoraConfig | None = None,
    *,
    trust_code: bool = False,
) -> nn.Module:
    """Return a model with a value head instead of its output layer, and with the weights of `start`."""
    model = build_model(described, trust_code=trust_code)
    swap_head(model)
    return _make(model, described, start, answering, lora)


def _make(
    model: nn.Module, described: ModelConfig, start: str | None, answering: Answering | None, lora: LoraConfig | None
) -> nn.Module:
    mixins = () if answering is None else (answering(model),)
    adapter = None if lora is None else _add_adapters(model, lora)
    rates = {} if lora is None or lora.lr is None else {"*.lora_[AB].weight": lora.lr}
    return extend(model, start=open_start(start, described, adapter, model), mixins=mixins, rates=rates)


def _add_adapters(model: nn.Module, lora: LoraConfig) -> Adapter | None:
    names = attach(model, AdapterSpec.of(lora), lora.targets)
    if lora.only:
        freeze_others(model, lora.also)
    if lora.base != "full":
        quantize(model, names, lora.base)
    return None if lora.adapter is None else read_adapter(lora.adapter, model)
