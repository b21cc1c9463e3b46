"""Tensor-parallel plans for `transformers` models, from their own plans and from the shapes of their layers.

`transformers` declares column-wise and row-wise layers for some models. Other styles follow from the structure: regions
are modules that consist of such layers, blocks are the repeated layers, the other modules of a block are norms or need
whole sequences, and embedding and head are sharded along the vocabulary.

[Note: layers that no plan names]
Of a linear layer that no plan names, each rank computes some of the output features, and gathers the others
(`gathered`): input and output are whole, so whatever the code around it does stays correct; code that reads the weight
itself gets all of it (`read_full`). The layers of a feed-forward that computes each hidden feature on its own need one
sum in place of these gathers. That it does is tested with small matrices; see `last_of_feed_forward`. Every other
parameter is replicated.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from plait.distributed.tensor_parallel_styles import PLAN_KEY, in_features, is_linear, out_features
from plait.errors import ModelError
from plait.torch_internals import disable_current_modes
from plait.transformers_internals import is_transformers_model, tp_plan

_TRANSFORMERS_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "local_colwise": "colwise",
        "rowwise": "rowwise",
        "local_rowwise": "rowwise",
        "colwise_gather_output": "colwise_gather",
        "colwise_rep": "colwise_gather",
        "rowwise_split_input": "rowwise_split",
        "rowwise_rep": "rowwise_split",
        "embedding_rowwise": "vocab_embedding",
        "replicated_with_grad_allreduce": "inner",
        "local_params": "local_params",
        "mla_kv_a_proj": "mla_kv_a",
        "replicate": "replicate",
    }
)
"""Styles of `transformers` → the style here with the same meaning."""

_OTHERWISE = frozenset(
    {
        *("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_router", "ep_dispatch_experts"),
        *("sequence_parallel", "embedding_colwise", "gather", "local"),
    }
)
"""Styles of `transformers` for what is done otherwise here: expert parallelism shards experts as wholes, sequence
parallelism finds its norms itself, and a module without a style is replicated."""

_PLANS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {
            "h.*.attn.c_attn": "qkv_heads",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        }
    }
)
"""Model type → plan for its base model, for types for which `transformers` has no plan."""

_HEADS = MappingProxyType({"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"})
_COLUMNS = frozenset({"colwise", "colwise_gather", "heads", "kv_heads", "qkv_heads"})
_ROWS = frozenset({"rowwise", "rowwise_split"})
_NOT_FORWARD = re.compile(r"__init__|_?init_|_?tie_|_?set_|_?resize_")
"""The methods of a model that make, initialize and tie weights, none of which runs while it trains."""
_NARROW = 16
"""A layer with this many times more input than output features, such as a router, is not worth a collective."""


def transformers_styles(model: nn.Module, ranks: int = 1) -> dict[str, str]:
    """Return the style of each module of a `transformers` model, by name; `ModelError` if none can be sharded.

    A layer that no plan names has one only if it can be sharded evenly over `ranks`.
    """
    styles = _declared_styles(model)
    _add_vocabulary(model, styles)
    _add_scalars(model, styles)
    _add_regions(model, styles)
    declared = {name for name, style in styles.items() if style in _COLUMNS | _ROWS}
    _add_unnamed_layers(model, styles, ranks)
    if not styles:
        raise ModelError(
            f"a {type(model).__name__} has no layer that tensor parallelism can shard: neither does transformers have "
            f"a plan for it, nor has it a linear layer; write one as {PLAN_KEY}, or use layout.tp: 1"
        )
    if declared:  # else nothing says which inputs of a block's modules are split along the sequence
        _add_blocks(model, styles)
    return {name: styles[name] for name, _ in model.named_modules() if name in styles}


def peft_styles(model: nn.Module, ranks: int = 1) -> dict[str, str]:
    """Return the style of each module of a `peft` model with LoRA adapters, by name.

    [Note: adapters of a tensor-parallel layer]
    An adapter adds B(A(x)) to a layer's output. Behind a column-wise layer B is column-wise too. Behind a row-wise
    layer A is row-wise, so B has a whole input and output. In a region, which sums the gradient of its input once for
    all, an A that is not sharded has partial gradients.
    """
    prefix, base = next((name, module) for name, module in model.named_modules() if is_transformers_model(module))
    path = f"{prefix}." if prefix else ""
    with _without_adapters(base):
        styles = {f"{path}{name}": style for name, style in transformers_styles(base, ranks).items()}
    adapted = {name: model.get_submodule(name) for name in styles if hasattr(model.get_submodule(name), "base_layer")}
    parents = {name.rpartition(".")[0] for name in adapted if styles[name] in _HEADS.values()}
    plan: dict[str, str] = {}
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if parent in parents and style in _HEADS.values():
            # A head style finds the sibling layers by name, which adapters change.
            _refuse_uneven_heads(model.get_submodule(parent), name, ranks)
            style = "colwise"
        if name not in adapted:
            plan[name] = style
            continue
        if style in _ROWS:
            down, up = style, "sequence"
        elif style in _COLUMNS - {"qkv_heads"} | {"gathered"}:
            down, up = "inner" if _in_region(name, styles) else "sequence", style
        else:
            raise ModelError(
                f"{name} has an adapter, and tensor parallelism gives it the style {style!r}, which an adapter cannot "
                "follow; leave it out of target_modules, or use strategy.layout.tp: 1"
            )
        plan[f"{name}.base_layer"] = style
        for matrix, of_matrix in (("lora_A", down), ("lora_B", up)):
            plan |= {f"{name}.{matrix}.{adapter}": of_matrix for adapter in getattr(adapted[name], matrix, {})}
    return plan


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the layers that have adapters in the place of their wrappers in this context, as in the model's own plan."""
    wrapped = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if hasattr(child, "base_layer")
    ]
    for parent, key, child in wrapped:
        parent._modules[key] = child.base_layer  # type: ignore[assignment]
    try:
        yield
    finally:
        for parent, key, child in wrapped:
            parent._modules[key] = child


def _in_region(name: str, styles: Mapping[str, str]) -> bool:
    return any(styles.get(parent) == "region" for parent in _ancestors(name))


def _refuse_uneven_heads(attention: nn.Module, name: str, ranks: int) -> None:
    head_dim: Any = attention.head_dim
    for key in _HEADS:
        layer = getattr(attention, key, None)
        heads = out_features(getattr(layer, "base_layer", layer)) // head_dim if isinstance(layer, nn.Module) else ranks
        if heads % ranks:
            raise ModelError(
                f"the {heads} heads of {key!r} do not divide by tensor parallel {ranks}, and {name!r} has an adapter, "
                "or one beside it: lower strategy.layout.tp, or leave the attention without adapters"
            )


def replicated_parameters(model: nn.Module) -> dict[str, int]:
    """Return the sizes of the parameters that every rank holds whole, by their names with `*` for layer numbers."""
    from torch.distributed.tensor import DTensor

    sizes: Counter[str] = Counter()
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor) or all(placement.is_replicate() for placement in param.placements):
            sizes[re.sub(r"\.\d+(?=\.)", ".*", name)] += param.numel()
    return dict(sizes.most_common())


def matches(name: str, pattern: str) -> bool:
    """Return whether a module name matches a pattern, segment by segment: a wildcard never matches a dot."""
    segments, pattern_segments = name.split("."), pattern.split(".")
    return len(segments) == len(pattern_segments) and all(map(fnmatchcase, segments, pattern_segments))


# ---- what transformers declares


def _declared_styles(model: nn.Module) -> dict[str, str]:
    """Return the styles of modules, by name, from the model's own plan or from `_PLANS`.

    A module is left out, with all others in the same parent, if its style is unknown here or does not fit it, or if the
    parent is a feed-forward whose hidden features depend on each other: their styles belong together, and
    `_add_unnamed_layers` finds others for them.
    """
    hf: Any = model
    known = _PLANS.get(hf.config.model_type, {})
    prefix = "" if hf.base_model is model else f"{hf.base_model_prefix}."
    plan = {f"{prefix}{pattern}": style for pattern, style in known.items()}
    for pattern, style in tp_plan(model).items():
        plan.setdefault(pattern, _TRANSFORMERS_STYLES.get(style, style))
    styles: dict[str, str] = {}
    modules = dict(model.named_modules())
    # In a pipeline stage a module without parameters replaces the head or the embedding of another stage.
    for name in (name for name, module in modules.items() if any(True for _ in module.parameters())):
        for pattern, style in plan.items():
            if name and style not in _OTHERWISE and matches(name, pattern):
                styles[name] = _by_head(name, style, modules)
    dropped = {name.rpartition(".")[0] for name, style in styles.items() if not _fits(style, modules[name])}
    tested: dict[Any, bool] = {}
    for name, direct in _styles_of_children(styles).items():
        unnamed = any(param is not None for param in modules[name]._parameters.values()) and name not in styles
        if unnamed and direct & _COLUMNS and direct & _ROWS:  # nothing says how the parameters of its own are used
            dropped.add(name)
        if direct == {"colwise", "rowwise"} and _once(tested, _kind(modules[name]), partial(_mixes, modules[name])):
            dropped.add(name)
    return {name: style for name, style in styles.items() if dropped.isdisjoint((name, *_ancestors(name)))}


def _mixes(module: nn.Module) -> bool:
    """Return whether a feed-forward computes its hidden features from each other: Gemma 3n's sparsity, for example."""
    linears = {key: layer for key, layer in module.named_children() if is_linear(layer)}
    last = [key for key, layer in linears.items() if in_features(layer) != out_features(layer)][-1:]
    others = [layer for key, layer in linears.items() if key not in last]
    fits = last and all(out_features(layer) == in_features(linears[last[0]]) for layer in others)
    return bool(fits) and _adds_up(module, linears, last[0]) is False


def _fits(style: str, module: nn.Module) -> bool:
    """Return whether a style is known, and is one for such a module."""
    if style in _COLUMNS | _ROWS | {"mla_kv_a"}:
        return is_linear(module)
    return style in _TRANSFORMERS_STYLES.values()


def _by_head(name: str, style: str, modules: Mapping[str, nn.Module]) -> str:
    parent, _, last = name.rpartition(".")
    has_heads = isinstance(getattr(modules[parent], "head_dim", None), int)
    return _HEADS.get(last, style) if style == "colwise" and has_heads else style


def _styles_of_children(styles: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the styles of the direct children of each module, by the module's name."""
    children: dict[str, set[str]] = {}
    for name, style in styles.items():
        children.setdefault(name.rpartition(".")[0], set()).add(style)
    return children


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules around a module."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _add_vocabulary(model: nn.Module, styles: dict[str, str]) -> None:
    """Add styles for the input embedding, for other embeddings that share its table, and for the head."""
    hf: Any = model
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    table = getattr(embedding, "weight", None)
    alone = isinstance(embedding, nn.Embedding) and _is_lookup(embedding)
    tied = [module for module in model.modules() if getattr(module, "_parameters", {}).get("weight") is table]
    if table is not None and any(not isinstance(module, nn.Embedding | nn.Linear) for module in tied):
        return  # a module that needs all of the table
    for name, module in model.named_modules():
        if styles.get(name) == "replicate" or module._parameters.get("weight") is None:
            continue
        if alone and isinstance(module, nn.Embedding) and module.weight is table:
            styles[name] = "vocab_embedding"
        elif module is head and is_linear(module) and (alone or head.weight is not table):
            styles[name] = "vocab_head"
        elif styles.get(name) == "vocab_embedding":
            del styles[name]


def _is_lookup(embedding: nn.Embedding) -> bool:
    """Return whether an embedding has only its table: then what it adds to the lookup is at most a factor."""
    return not list(embedding.children()) and list(embedding._parameters) == ["weight"]


def _add_scalars(model: nn.Module, styles: dict[str, str]) -> None:
    """Add the style `inner` for activation functions with scalar parameters between column-wise and row-wise layers.

    They run on sharded features, so each rank has partial gradients of these parameters.
    """
    children = _styles_of_children(styles)
    for name, module in model.named_modules():
        params = [param for param in module._parameters.values() if param is not None]
        siblings = children.get(name.rpartition(".")[0], set())
        scalars_only = params and name not in styles and all(param.numel() == 1 for param in params)
        if scalars_only and siblings & _COLUMNS and siblings & _ROWS:
            styles[name] = "inner"


def _add_regions(model: nn.Module, styles: dict[str, str]) -> None:
    """Add the style `region` for modules with column-wise and row-wise children whose parameters all have styles."""
    styled = {name: style for name, style in styles.items() if style != "replicate"}
    for name, direct in _styles_of_children(styled).items():
        if not name or not direct & _COLUMNS or not direct & _ROWS:
            continue
        submodules = model.get_submodule(name).named_modules()
        if all(f"{name}.{key}" in styled for key, submodule in submodules if submodule._parameters):
            styles[name] = "region"


# ---- layers that no plan names


def _add_unnamed_layers(model: nn.Module, styles: dict[str, str], ranks: int) -> None:
    """Add styles for linear layers without one; see [Note: layers that no plan names]."""
    closed = {name for name, style in styles.items() if style in ("region", "replicate")}
    used = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    read = weights_read_elsewhere(model)
    tested: dict[Any, str | None] = {}

    def is_open(name: str, module: nn.Module) -> bool:
        alone = all(used[id(param)] == 1 for param in module.parameters())
        return alone and name not in styles and closed.isdisjoint(_ancestors(name))

    for name, module in model.named_modules():
        children = {key: child for key, child in module.named_children() if any(True for _ in child.parameters())}
        layers = [f"{name}.{key}" for key in children]
        if name and is_open(name, module) and all(is_open(layer, module) for layer in layers):
            last = _once(tested, _kind(module), partial(last_of_feed_forward, module))
            if last and in_features(children[last]) % ranks == 0 and not read & children.keys():
                styles |= {name: "region", **dict.fromkeys(layers, "colwise"), f"{name}.{last}": "rowwise"}
                closed.add(name)
        if name and is_linear(module) and is_open(name, module):
            inputs, outputs = in_features(module), out_features(module)
            if outputs % ranks == 0 and outputs * _NARROW > inputs:
                styles[name] = "gathered"


def _once(known: dict[Any, Any], key: Any, answer: Callable[[], Any]) -> Any:
    if key not in known:
        known[key] = answer()
    return known[key]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """Return what two modules have in common that compute the same function of their input and weights."""
    children = tuple(
        (key, type(child), *(tuple(param.shape) for param in child.parameters()))
        for key, child in module.named_children()
    )
    settings = ((key, value) for key, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
    return type(module), children, tuple(item for item in settings if item[0] != "layer_idx")


def last_of_feed_forward(module: nn.Module) -> str | None:
    """Return the name of the last layer of a feed-forward that may be sharded by its features; None for other modules.

    Such a module has one or two linear layers to hidden features, and one back from them. That it computes each hidden
    feature on its own is tested: the outputs of two halves of the features add up to the output of all of them.
    """
    layers = dict(module.named_children())
    linears = {key: layer for key, layer in layers.items() if is_linear(layer)}
    parameters = sum(1 for _ in module.parameters())
    if len(linears) not in (2, 3) or parameters != sum(len(list(layer.parameters())) for layer in linears.values()):
        return None
    if any(True for _ in module.buffers()) or len(_needed(module)) != 1:
        return None
    for key, layer in linears.items():
        others = [other for name, other in linears.items() if name != key]
        fits = all(
            (in_features(other), out_features(other)) == (out_features(layer), in_features(layer)) for other in others
        )
        if fits and _adds_up(module, linears, key):
            return key
    return None


def _needed(module: nn.Module) -> list[str]:
    """Return the names of the arguments that a module's forward needs."""
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [argument.name for argument in arguments if argument.default is argument.empty and argument.kind in named]


def _adds_up(module: nn.Module, linears: Mapping[str, nn.Module], last: str) -> bool | None:
    """Return whether two copies of a feed-forward with half of the hidden features each add up to the whole one.

    None if it cannot be called with matrices of other sizes.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    wide, half, dim = 8, 4, 6

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    def sliced(key: str, features: slice, *, bias: bool) -> nn.Module:
        weight, offset = matrices[key]
        rows = key == last
        keeps = offset is not None and (bias or not rows)
        weight = weight[:, features] if rows else weight[features]
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=keeps, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if offset is not None and keeps:
            layer.bias = nn.Parameter(offset if rows else offset[features], requires_grad=False)
        return layer

    def output(features: slice, *, bias: bool) -> Tensor:
        small = copy.copy(module)
        small.__dict__["_modules"] = {
            key: sliced(key, features, bias=bias) if key in linears else copy.deepcopy(child)
            for key, child in module._modules.items()
            if child is not None
        }
        small.eval()
        result: Tensor = type(module).forward(small, x)
        return result

    try:
        with disable_current_modes(), torch.no_grad(), torch.device("cpu"):
            x = normal(2, 3, dim)
            matrices = {
                key: (
                    normal(dim, wide) if key == last else normal(wide, dim),
                    normal(dim if key == last else wide) if layer.bias is not None else None,
                )
                for key, layer in linears.items()
            }
            whole = output(slice(0, wide), bias=True)
            halves = output(slice(0, half), bias=True) + output(slice(half, wide), bias=False)
            return whole.shape == x.shape and torch.allclose(whole, halves, rtol=1e-4, atol=1e-4)
    except Exception:  # its code needs its own sizes, or is not a feed-forward
        return None


def weights_read_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of attributes whose weight or bias some code of the model reads without calling the module."""
    files = {inspect.getsourcefile(base) for module in model.modules() for base in _own_bases(type(module))}
    return {name for file in files if file is not None for name in _weights_read_in(file)}


def _own_bases(cls: type) -> list[type]:
    """Return the classes of a module's that only models have: neither torch's nor the common ones of transformers."""
    library = re.compile(r"(torch|builtins|plait|transformers\.(?!models\.))\b")
    return [base for base in cls.__mro__ if not library.match(base.__module__) and base.__module__ in sys.modules]


@cache
def _weights_read_in(file: str) -> frozenset[str]:
    names: set[str] = set()
    method = ""
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if head := re.match(r"\s*def (\w+)", line):
            method = head[1]
        if not _NOT_FORWARD.match(method):
            names.update(re.findall(r"\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape))", line))
    return frozenset(names)


# ---- blocks


def _add_blocks(model: nn.Module, styles: dict[str, str]) -> None:
    classes = getattr(model, "block_classes", None) or ()
    for name, module in list(model.named_modules()):
        if not name or not classes or not isinstance(module, classes):
            continue
        styles[name] = "block"
        for child_name, child_module in _called_children(name, module):
            if child_name not in styles and any(True for _ in child_module.parameters()):
                styles[child_name] = "sequence" if _is_norm(child_module) else "whole_sequence"


def _called_children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a module calls, and those in its lists, which are not called themselves."""
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(f"{name}.{key}", child)
        else:
            yield f"{name}.{key}", child


def _is_norm(module: nn.Module) -> bool:
    return not list(module.children()) and all(param.ndim == 1 for param in module.parameters())
