"""Rules for `model`."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config.model import GptConfig, HFConfig, LlamaConfig, MoeConfig
from plait.config.rules.facts import Facts, given, idle
from plait.errors import Problem


def heads_divide_the_width(facts: Facts) -> Iterator[Problem]:
    """Every head has the same share of `dim`."""
    model = facts.config.model
    if isinstance(model, (GptConfig, LlamaConfig)) and model.dim % model.heads:
        down, up = model.dim // model.heads * model.heads, -(-model.dim // model.heads) * model.heads
        message = f"{model.dim} ÷ {model.heads} heads = {model.dim / model.heads:g}, not a whole number"
        near = f"`model.dim: {up}`" if down == 0 else f"`model.dim: {down}` or `{up}`"
        yield Problem("model.dim", message, f"Write {near}, or other `model.heads`.")


def kv_heads_divide_the_heads(facts: Facts) -> Iterator[Problem]:
    """Each key/value head serves the same number of heads."""
    model = facts.config.model
    if isinstance(model, LlamaConfig) and model.kv_heads is not None and model.heads % model.kv_heads:
        fit = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
        message = f"{model.heads} heads ÷ {model.kv_heads} = {model.heads / model.kv_heads:g}, not a whole number"
        yield Problem("model.kv_heads", message, f"What divides {model.heads}: {', '.join(fit)}.")


def rotary_heads_are_even(facts: Facts) -> Iterator[Problem]:
    """RoPE turns pairs of a head's entries."""
    model = facts.config.model
    if isinstance(model, LlamaConfig) and model.dim % model.heads == 0 and model.dim // model.heads % 2:
        message = f"{model.dim} ÷ {model.heads} heads = {model.dim // model.heads}, and RoPE needs an even number"
        up, down = model.dim + model.heads, model.dim - model.heads
        near = f"`model.dim: {down}` or `{up}`" if down else f"`model.dim: {up}`"
        yield Problem("model.dim", message, f"Write {near}, or other `model.heads`.")


def hf_model_has_one_source(facts: Facts) -> Iterator[Problem]:
    """A `transformers` model comes from a folder or from a config; only a folder has weights."""
    model = facts.config.model
    if not isinstance(model, HFConfig):
        return
    if model.path is not None and model.config is not None:
        message = f"`model.config` is set and `model.path` too, to {model.path!r}: which one is the model?"
        yield Problem("model.config", message, "Leave one of the two out.")
    elif model.path is None and model.config is None:
        remedy = "Write `model.path` (a folder), or `model.config` (with `model_type`)."
        yield Problem("model", "an hf model needs `path` or `config`, and has neither", remedy)
    elif model.path is None and given(model, "pretrained") and model.pretrained:
        reason = "`model.config` comes without weights, they start random"
        remedy = "Leave it out, or give a folder with weights as `model.path`."
        yield from idle("model", model, ("pretrained",), reason, remedy)


def choices_are_experts(facts: Facts) -> Iterator[Problem]:
    """A token is sent to some of the experts, and what they say about it depends on their scores."""
    model = facts.config.model
    if not isinstance(model, MoeConfig):
        return
    if model.top_k > model.experts:
        message = f"a token is to be sent to {model.top_k} experts, and there are {model.experts} (`model.experts`)"
        yield Problem("model.top_k", message, f"Write at most {model.experts}.")
    elif model.top_k == 1 < model.experts and model.normalize:
        message = "with `model.top_k: 1` a weight divided by the sum of weights is 1: the router would learn nothing"
        yield Problem("model.normalize", message, "Write `model.normalize: false`.")
    if model.moe_every > model.layers:
        message = f"every {model.moe_every}th of {model.layers} layers is none: there would be no experts"
        yield Problem("model.moe_every", message, f"Write at most {model.layers}, or use `model.type: llama`.")


RULES = (
    heads_divide_the_width,
    kv_heads_divide_the_heads,
    rotary_heads_are_even,
    hf_model_has_one_source,
    choices_are_experts,
)
