"""The engine behind a prepared model, and one backward pass through several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.config import RunConfig, TensorConfig
from plait.distributed import World, is_transformers_model, restore_rng_state, rng_state, transformers_styles
from plait.engine import LogFunction, LoopEngine, Preparation, prepare_native
from plait.errors import ModelError, TrainingError

# How ranks share the layers of a model of `transformers`, also one with adapters of `peft`.
#
# [Note: adapters of a layer that is cut]
# An adapter adds B(A(x)) to a layer's answer. Where the layer is cut by columns, its answer is a part, so B is cut by
# columns too; A is whole, and every rank adds to its gradient. Where the layer is cut by rows, A's answer would be
# whole and B would not belong to what ranks share: no word of a plan says that, so it is refused.


_HEADS = ("num_attention_heads", "num_key_value_heads")
_VOCABULARY = frozenset({"vocab_embedding", "vocab_head"})
_HEAD_WORDS = frozenset({"heads", "kv_heads"})
_BY_COLUMNS = _HEAD_WORDS | {"colwise"}


def with_plan(config: RunConfig, model: nn.Module, *, whole_vocabulary: bool) -> RunConfig:
    """The description with a plan for a model of `transformers` or `peft`, where none was written and one is needed.

    `whole_vocabulary`: embedding and head stay whole, since the model may compute its loss itself, from its logits.
    """
    strategy = config.strategy
    adapted = hasattr(model, "peft_config")
    if strategy.layout.tp == 1 or strategy.tensor.plan or not (adapted or whole_vocabulary):
        return config
    if not adapted and not is_transformers_model(model):
        return config
    plan = tensor_plan(model, strategy.layout.tp) if adapted else transformers_styles(model)
    if whole_vocabulary:
        plan = {name: style for name, style in plan.items() if style not in _VOCABULARY}
    if not plan:
        return config
    tensor = TensorConfig(**{**strategy.tensor.model_dump(), "plan": plan})
    return config.model_copy(update={"strategy": strategy.model_copy(update={"tensor": tensor})})


def tensor_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """A word for each module of a `peft` model that takes part; none where nothing is known of the model below."""
    below = next(
        ((name, module) for name, module in model.named_modules() if name and is_transformers_model(module)), None
    )
    if below is None:
        return {}
    prefix, base = below
    plan: dict[str, str] = {}
    attentions: set[str] = set()
    for name, style in transformers_styles(base).items():
        where = f"{prefix}.{name}"
        layer = model.get_submodule(where)
        if not hasattr(layer, "base_layer"):
            plan[where] = style
            continue
        if style not in _BY_COLUMNS:
            raise ModelError(
                f"{where} is cut by rows where strategy.layout.tp is {ranks}, and has an adapter; put adapters on "
                "layers that are cut by columns (q_proj, k_proj, v_proj, gate_proj, up_proj), or use layout.tp: 1"
            )
        parent = where.rpartition(".")[0]
        plan[parent] = "region"  # which is not seen where its layers are hidden in adapters
        if style in _HEAD_WORDS:
            attentions.add(parent)
        plan[f"{where}.base_layer"] = "colwise"
        for matrix, inner in (("lora_A", "inner"), ("lora_B", "colwise")):
            for adapter in getattr(layer, matrix, {}):
                plan[f"{where}.{matrix}.{adapter}"] = inner
    _refuse_uneven(attentions, model, ranks)
    # Heads are known by their neighbours, which adapters hide; cut by columns it is the same where they divide evenly.
    inside = {name for name, style in plan.items() if style in _HEAD_WORDS and name.rpartition(".")[0] in attentions}
    return {name: "colwise" if name in inside else style for name, style in plan.items()}


def _refuse_uneven(attentions: set[str], model: nn.Module, ranks: int) -> None:
    config: Any = getattr(model, "config", None)
    uneven = next((name for name in _HEADS if (getattr(config, name, None) or ranks) % ranks), None)
    if attentions and uneven is not None:
        raise ModelError(
            f"{uneven} = {getattr(config, uneven)} cannot be shared by {ranks} ranks in layers with adapters: lower "
            "strategy.layout.tp, or leave the attention without adapters"
        )


def backward(engines: Sequence[LoopEngine], loss: Tensor, *, last: Sequence[bool], **kwargs: Any) -> None:
    """One backward pass through a loss to which several models may have contributed.

    The loss is this rank's mean over a micro-batch; `last` says of each engine whether a step may follow.
    """
    if loss.ndim != 0:
        raise TrainingError(f"backward wants a scalar loss, not a tensor of shape {tuple(loss.shape)}: take its mean")
    scales = {1.0 if engine.scaler is None else engine.scaler.scale for engine in engines}
    if len(scales) > 1:
        raise TrainingError(
            "the loss comes from several models whose fp16 loss scales differ by now: give them one optimizer, or "
            "use mixed_precision='bf16'"
        )
    for engine, is_last in zip(engines, last, strict=True):
        engine.begin_backward(last=is_last)
    first = engines[0]
    factor = scales.pop() / (first.accumulation * first.world.layout.replicas)
    # In fp32: a scaled fp16 loss would overflow before any gradient does.
    torch.autograd.backward(loss.float() * factor if factor != 1.0 else loss, **kwargs)
    for engine in engines:
        engine.end_backward(loss.detach())


def build_engine(
    config: RunConfig,
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    log: LogFunction,
    *,
    whole_vocabulary: bool = True,
) -> LoopEngine:
    """Spread a model and adopt its optimizer. Random numbers go on as if nothing had happened.

    `whole_vocabulary`: see `with_plan`.
    """
    state = rng_state(world.device)
    config = with_plan(config, model, whole_vocabulary=whole_vocabulary)
    engine = prepare_native(Preparation(config, world, model=model, optimizer=optimizer, log=log), LoopEngine)
    if config.strategy.stage < 3:
        engine.keep_unsharded()  # as replicas have them: the main process may save or ask the model by itself
    restore_rng_state(state, world.device)
    return engine


class Joint(nn.Module):
    """Models that one optimizer updates, as one; a call names which of them it means."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """What one of the models says."""
        return self.models[index](*args, **kwargs)
