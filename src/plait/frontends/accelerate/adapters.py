"""How ranks share the layers of a model with `peft` adapters: as those of the model below, and the adapters with them.

[Note: adapters of a layer that is cut]
An adapter adds B(A(x)) to a layer's answer. Where the layer is cut by columns, its answer is a part, so B is cut by
columns too; A is whole, and every rank adds to its gradient. Where the layer is cut by rows, A's answer would be
whole and B would not belong to what ranks share: no word of a plan says that, so it is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from plait.config.run import RunConfig
from plait.config.strategy import TensorConfig
from plait.errors import ModelError
from plait.parallel.tensor.transformers_plan import is_transformers_model, transformers_words

_HEADS = ("num_attention_heads", "num_key_value_heads")
_BY_COLUMNS = frozenset({"colwise", "heads", "kv_heads"})


def with_adapters(config: RunConfig, model: nn.Module) -> RunConfig:
    """The description with a plan for a model of `peft`, where layers are to be cut and no plan was written."""
    strategy = config.strategy
    if strategy.layout.tp == 1 or strategy.tensor.plan or not hasattr(model, "peft_config"):
        return config
    plan = tensor_plan(model, strategy.layout.tp)
    if not plan:
        return config
    tensor = TensorConfig(**{**strategy.tensor.model_dump(), "plan": plan})
    return config.model_copy(update={"strategy": strategy.model_copy(update={"tensor": tensor})})


def tensor_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """A word for each module of a `peft` model that takes part; none where nothing is known of the model below."""
    below = next(((name, each) for name, each in model.named_modules() if name and is_transformers_model(each)), None)
    if below is None:
        return {}
    prefix, base = below
    plan: dict[str, str] = {}
    for name, word in transformers_words(base).items():
        where = f"{prefix}.{name}"
        layer = model.get_submodule(where)
        if not hasattr(layer, "base_layer"):
            plan[where] = word
            continue
        if word not in _BY_COLUMNS:
            raise ModelError(
                f"{where} is cut by rows where strategy.layout.tp is {ranks}, and has an adapter; put adapters on "
                "layers that are cut by columns (q_proj, k_proj, v_proj, gate_proj, up_proj), or use layout.tp: 1"
            )
        plan[where.rpartition(".")[0]] = "region"  # which is not seen where its layers are hidden in adapters
        plan[f"{where}.base_layer"] = "colwise" if columns else word
        for kind, inner in (
            ("lora_A", "inner" if columns else word),
            ("lora_B", "colwise" if columns else "replicate"),
        ):
            for adapter in getattr(layer, kind, {}):
                plan[f"{where}.{kind}.{adapter}"] = inner
    return _by_columns_alike(plan, model, ranks)


def _by_columns_alike(plan: dict[str, str], model: nn.Module, ranks: int) -> dict[str, str]:
    """Heads are known by their neighbours, which adapters hide; by columns it is the same where heads divide evenly."""
    heads = [name for name, word in plan.items() if word in ("heads", "kv_heads")]
    adapted = {name.rpartition(".")[0] for name in heads} & {_attention(name) for name in plan if ".lora_" in name}
    config: Any = getattr(model, "config", None)
    uneven = next((n for n in _HEADS if (getattr(config, n, None) or ranks) % ranks), None)
    if adapted and uneven is not None:
        raise ModelError(
            f"{uneven} = {getattr(config, uneven)} cannot be shared by {ranks} ranks in layers with adapters: lower "
            "strategy.layout.tp, or leave the attention without adapters"
        )
    return {name: "colwise" if name in heads and name.rpartition(".")[0] in adapted else w for name, w in plan.items()}


def _attention(name: str) -> str:
    """The module around a layer, from the name of one of its adapters."""
    return name.partition(".lora_")[0].rpartition(".")[0]
