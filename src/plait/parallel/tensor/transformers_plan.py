"""A plan for a `transformers` model, from its own tensor-parallel plan and its structure.

`transformers` names the layers that are split by columns and rows. What its plans leave out follows from the model:
which modules these layers make up (regions), which layers are repeated (blocks), which are norms between them, and
that embedding and head share the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.parallel.tensor.plan import matches
from plait.parallel.tensor.style import PLAN_KEY
from plait.transformers_internals import tp_plan

_THEIRS: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_gather_output": "colwise_gather",
        "colwise_rep": "colwise_gather",
        "rowwise_split_input": "rowwise_split",
        "rowwise_rep": "rowwise_split",
        "embedding_rowwise": "vocab_embedding",
        "replicated_with_grad_allreduce": "inner",
        "replicate": "replicate",
    }
)
"""Their words that have the same meaning here."""

_EXPERT_WORDS = frozenset({"packed_colwise", "packed_rowwise", "moe_tp_experts", "moe_identity_expert"})
"""Their words for the inside of experts. These stay whole here: expert parallelism is what splits them."""

_KNOWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "h.*.attn.c_attn": "qkv_heads",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        }
    }
)
"""Plans, for a model's base, of types that `transformers` has none for."""

_HEADS = MappingProxyType({"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"})
_COLUMNS = frozenset({"colwise", "colwise_gather", "heads", "kv_heads", "qkv_heads"})
_ROWS = frozenset({"rowwise", "rowwise_split"})


def transformers_words(model: nn.Module) -> dict[str, str]:
    """The word of each module of a `transformers` model that takes part."""
    words = _layers(model)
    if not words:
        kind = getattr(getattr(model, "config", None), "model_type", "?")
        raise ModelError(
            f"transformers has no tensor-parallel plan for a {type(model).__name__} (model_type {kind!r}), "
            f"and neither has Plait; write one as {PLAN_KEY}, or use layout.tp: 1"
        )
    _add_vocabulary(model, words)
    _add_scalars(model, words)
    _add_regions(model, words)
    _add_blocks(model, words)
    return {name: words[name] for name, _ in model.named_modules() if name in words}


def _layers(model: nn.Module) -> dict[str, str]:
    """The linear layers, as the model's own plan or ours names them."""
    hf: Any = model
    theirs: dict[str, str] = tp_plan(model)
    known = _KNOWN.get(hf.config.model_type, {})
    prefix = "" if hf.base_model is model else f"{hf.base_model_prefix}."
    plan = {f"{prefix}{pattern}": word for pattern, word in known.items()}
    for pattern, word in theirs.items():
        if word in _THEIRS:
            plan.setdefault(pattern, _THEIRS[word])
        elif word not in _EXPERT_WORDS:
            raise ModelError(
                f"the tensor-parallel plan of {type(model).__name__} has the word {word!r} for {pattern!r}, which "
                f"has no counterpart here; write a plan of your own as {PLAN_KEY}, or use layout.tp: 1"
            )
    words: dict[str, str] = {}
    modules = dict(model.named_modules())
    # In a stage of a pipeline something without parameters stands for the head or the embedding of another one.
    for name in (name for name, module in modules.items() if any(True for _ in module.parameters())):
        for pattern, word in plan.items():
            if name and matches(name, pattern):
                words[name] = _by_head(name, word, modules)
    return words


def _by_head(name: str, word: str, modules: Mapping[str, nn.Module]) -> str:
    parent, _, last = name.rpartition(".")
    has_heads = isinstance(getattr(modules[parent], "head_dim", None), int)
    return _HEADS.get(last, word) if word == "colwise" and has_heads else word


def _add_vocabulary(model: nn.Module, words: dict[str, str]) -> None:
    hf: Any = model
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    for name, module in model.named_modules():
        if module is embedding and isinstance(module, nn.Embedding):
            words[name] = "vocab_embedding"
        elif module is head and isinstance(module, nn.Linear):
            words[name] = "vocab_head"


def _add_scalars(model: nn.Module, words: dict[str, str]) -> None:
    """Activations with parameters of one number each, between columns and rows: each rank has a summand of them."""
    for name, module in model.named_modules():
        own = [param for param in module._parameters.values() if param is not None]
        prefix = f"{name.rpartition('.')[0]}."
        beside = {word for key, word in words.items() if key.startswith(prefix) and "." not in key[len(prefix) :]}
        alone = own and name not in words and all(param.numel() == 1 for param in own)
        if alone and beside & _COLUMNS and beside & _ROWS:
            words[name] = "inner"


def _add_regions(model: nn.Module, words: dict[str, str]) -> None:
    """Modules that consist of layers with words only, columns first and rows last."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        inside = {key: word for key, word in words.items() if key.startswith(prefix) and word != "replicate"}
        with_parameters = {f"{prefix}{key}" for key, part in module.named_modules() if part._parameters}
        direct = {word for key, word in inside.items() if "." not in key[len(prefix) :]}
        if name and direct & _COLUMNS and direct & _ROWS and with_parameters <= inside.keys():
            words[name] = "region"


def _add_blocks(model: nn.Module, words: dict[str, str]) -> None:
    classes = getattr(model, "block_classes", None) or ()
    for name, module in list(model.named_modules()):
        if not name or not classes or not isinstance(module, classes):
            continue
        words[name] = "block"
        for key, part in module.named_children():
            child = f"{name}.{key}"
            if child not in words and any(True for _ in part.parameters()):
                words[child] = "sequence" if _is_norm(part) else "whole_sequence"


def _is_norm(module: nn.Module) -> bool:
    return not list(module.children()) and all(param.ndim == 1 for param in module.parameters())
