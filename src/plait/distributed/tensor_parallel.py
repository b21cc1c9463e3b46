"""Tensor parallelism (TP) and sequence parallelism: choose a style for each layer, and apply it to a model.

A *style* says how one module is sharded. Those of single layers (column-wise, row-wise, …) are in
`tensor_parallel_styles.py`. A *plan* maps patterns of module names to styles. A *region* is a module, such as attention
or a feed-forward layer, inside of which ranks work on different heads or features. A *block* is a transformer layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from plait.config import CustomTensorPlan, choose
from plait.distributed.collectives import all_gather_replicated, split
from plait.distributed.tensor_parallel_plans import (
    matches,
    peft_styles,
    transformers_styles,
    weights_read_elsewhere,
)
from plait.distributed.tensor_parallel_styles import (
    PLAN_KEY,
    SEQUENCE_KEY,
    Colwise,
    ColwiseGather,
    DTensorParams,
    Gathered,
    HeadParallel,
    KvHeads,
    LatentKv,
    QkvHeads,
    RankRng,
    Rowwise,
    RowwiseSplit,
    Site,
    Style,
    VocabEmbedding,
    VocabHead,
    draws_random,
    enter_region,
    is_linear,
    read_full,
    read_local,
    read_replicated,
    return_full_tensors,
    training_rng,
    wrap_forward,
)
from plait.errors import ConfigError, ModelError, Problem
from plait.plugins import call, load
from plait.torch_internals import enable_async_tensor_parallel
from plait.transformers_internals import is_transformers_model

# ---- async TP: collectives that overlap with the matrix multiplications before and after them


ASYNC_KEY = "strategy.tensor.async_tp"


def reason_not_async(device_type: str, *, sequence: bool) -> str | None:
    """Return the reason why async TP cannot work; None if it can."""
    if device_type != "cuda":
        return f"it copies between GPUs through symmetric memory, and this run is on {device_type}"
    if not sequence:
        return "it splits the collectives of sequence parallelism, which is off"
    if find_spec("triton") is None:
        return "it is a pass of torch.compile's inductor, which needs the package triton"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "symmetric memory needs a GPU of compute capability 8.0 or newer"
    return None


def enable_async(mesh: DeviceMesh, *, sequence: bool) -> None:
    """Let `torch.compile` split matrix multiplications into pieces that overlap with the collectives.

    The GPUs of the group need access to each other's memory, as those of one host have. Blocks that are not compiled
    are not changed. Raise a `ConfigError` where it cannot work.
    """
    reason = reason_not_async(mesh.device_type, sequence=sequence)
    if reason is not None:
        raise ConfigError(
            Problem(ASYNC_KEY, f"async tensor parallelism cannot work here: {reason}", "Set it to false.")
        )
    enable_async_tensor_parallel(mesh.get_group().group_name)


# ---- sequence parallelism: activations between regions, replicated or split along the sequence
#
# [Note: where the sequence is split]
# Activations are split along the sequence at the input of the first block, and all-gathered at the output of the last.
# Embedding, final norm, head and the next pipeline stage get whole sequences, so positions, masks and losses do not
# change. In the blocks, norms, dropout and the residual stream work on each rank's part of the sequence. A region
# all-gathers its input and reduce-scatters its output, which sends as much as the all-reduce that this replaces.


class Region(Style):
    """A module with tensor-parallel layers, such as attention; `enter_region` is applied to its input, once for all."""

    def problems(self) -> list[Problem]:
        """Return a problem for layers without a style, and, if the sequence is split, for dropout on gathered features.

        Ranks have partial gradients inside of a region, so a replicated layer without a style would get wrong ones.
        """
        if self.site.split and self._gathers() and draws_random(self.site.module):
            message = f"{self.site.name!r} all-gathers features and draws random numbers (dropout)"
            return [Problem(SEQUENCE_KEY, message, "Set dropout to 0, or leave sequence parallelism off.")]
        names = [key for key, submodule in self.site.module.named_modules() if submodule._parameters]
        missing = [name for key in names if (name := f"{self.site.name}.{key}".rstrip(".")) not in self._known()]
        if not missing:
            return []
        message = f"{', '.join(map(repr, missing))}: layers of the region {self.site.name!r} without a style"
        return [Problem(PLAN_KEY, message, "Give each of them a style; `inner` keeps parameters replicated.")]

    def _gathers(self) -> bool:
        """Return whether a layer inside all-gathers its features, so that all ranks need the same dropout after it."""
        inside = f"{self.site.name}."
        return any(style == "colwise_gather" and name.startswith(inside) for name, style in self.site.styles.items())

    def _known(self) -> set[str]:
        """Return the names of modules with a style, and of all modules inside of one with the style `inner`."""
        styles, site = self.site.styles, self.site
        held = (
            f"{name}.{key}"
            for name, style in styles.items()
            if style == "inner" and name.startswith(f"{site.name}.")
            for key, _ in site.module.get_submodule(name[len(site.name) + 1 :]).named_modules()
        )
        return {name for name, style in styles.items() if style not in ("region", "replicate")} | set(held)

    def parallelize(self) -> None:
        """Apply `enter_region` to the main input, and use random numbers of this rank inside."""
        site = self.site
        context = None
        # In a block whose sequence is split, `ResidualBlock` has switched to random numbers of this rank already.
        if draws_random(site.module) and not site.split and not self._gathers():
            # The row-wise layer switches back, before its all-reduce: its output is replicated, and dropout on it must
            # be the same on all ranks.
            site.random[site.name] = RankRng(site.rank)
            context = training_rng(site, site.random[site.name])
        wrap_forward(site.module, enter=partial(enter_region, site), context=context)


class ResidualBlock(Style):
    """A block, such as a transformer layer; the blocks of one list are called one after the other."""

    def parallelize(self) -> None:
        """With sequence parallelism, split the sequence before the first block, and all-gather it after the last."""
        site = self.site
        if not site.sequence:
            return
        listed = [
            name for name, style in site.styles.items() if style == "block" and _parent(name) == _parent(site.name)
        ]
        self._refuse_other_inputs()
        for key in list(site.module._parameters):  # such as a factor of the residual stream
            site.params.replicate(site.module, key)
        read_replicated(site.module, site.group)
        wrap_forward(
            site.module,
            enter=self._cut if site.name == listed[0] else None,
            leave=self._join if site.name == listed[-1] else None,
            context=training_rng(site, RankRng(site.rank)) if draws_random(site.module) else None,
        )

    def _refuse_other_inputs(self) -> None:
        """Make the block's forward raise for a second input with features of each token, which stays whole."""
        inner = self.site.module.forward
        names = list(inspect.signature(inner).parameters)

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            first, *others = {**dict(zip(names, args, strict=False)), **kwargs}.items()
            for key, x in others:
                tokens = isinstance(x, Tensor) and x.ndim == 3 and x.is_floating_point() and x.requires_grad
                if tokens and x.shape[0] == first[1].shape[0]:
                    raise ModelError(
                        f"{self.site.name!r} takes {key!r} for each token beside its hidden states, which sequence "
                        f"parallelism does not split; set {SEQUENCE_KEY}: false"
                    )
            return inner(*args, **kwargs)

        self.site.module.forward = forward

    def _cut(self, x: Tensor) -> Tensor:
        check_sequence(x.shape[1], self.site.size)
        return split(x, 1, self.site.group)

    def _join(self, x: Tensor) -> Tensor:
        return all_gather_replicated(x, 1, self.site.group)


class SequenceSharded(Style):
    """A norm outside of regions; if the sequence is split, each rank has partial gradients of its parameters."""

    def parallelize(self) -> None:
        """Replicate the parameters, and sum their gradients over ranks, if the sequence is split; else do nothing."""
        if self.site.split:
            _replicate_params(self)


class Inner(Style):
    """A module inside a region with replicated parameters, such as a norm of each head."""

    def parallelize(self) -> None:
        """Replicate the parameters, and sum their gradients over ranks."""
        _replicate_params(self)


class WholeSequence(Style):
    """A module that needs all tokens, such as a mixture of experts: all ranks compute the same in it."""

    def problems(self) -> list[Problem]:
        """Return a problem if the module draws random numbers: they would differ between ranks."""
        if self.site.split and draws_random(self.site.module):
            message = f"{self.site.name!r} works on the whole sequence and draws random numbers (dropout, jitter)"
            return [Problem(SEQUENCE_KEY, message, "Set them to 0, or leave sequence parallelism off.")]
        return []

    def parallelize(self) -> None:
        """All-gather the input along the sequence, and split the output, if the sequence is split; else do nothing."""
        if self.site.split:
            self._rows = 0
            wrap_forward(self.site.module, enter=self._join, leave=self._cut, leave_others=self._cut_tokens)

    def _join(self, x: Tensor) -> Tensor:
        joined = all_gather_replicated(x, 1, self.site.group)
        self._rows, self._tokens = joined.shape[:2]
        return joined

    def _cut(self, x: Tensor) -> Tensor:
        if x.shape[:2] != (self._rows, self._tokens):  # some modules return the tokens of all rows in one dimension
            if x.shape[0] != self._rows * self._tokens:
                raise ModelError(
                    f"{self.site.name!r} got {self._rows} rows of {self._tokens} tokens and returned shape "
                    f"{tuple(x.shape)}, of which no dimension is the tokens; set {SEQUENCE_KEY}: false"
                )
            x = x.view(self._rows, self._tokens, *x.shape[1:])
        return split(x, 1, self.site.group)

    def _cut_tokens(self, x: Any) -> Any:
        """Split a further output if it has features of each token, as those of hyper-connections do."""
        features = isinstance(x, Tensor) and x.ndim > 2 and x.is_floating_point() and x.requires_grad
        return split(x, 1, self.site.group) if features and x.shape[:2] == (self._rows, self._tokens) else x


class LocalParams(WholeSequence):
    """A module with a parameter per head, such as an attention with sinks: each rank has those of its heads.

    Its column-wise layers enter the sharded work each on its own.
    """

    def problems(self) -> list[Problem]:
        """Return a problem if the module draws random numbers, or a parameter does not divide by the ranks."""
        params = self.site.module.named_parameters(recurse=False)
        uneven = (self.indivisible(f"entries of {key}", param.shape[0]) for key, param in params)
        return [*super().problems(), *(problem for problems in uneven for problem in problems)]

    def parallelize(self) -> None:
        """Shard the module's own parameters along their first dimension, and let its code read this rank's part."""
        super().parallelize()
        for key in list(self.site.module._parameters):
            self.site.params.shard(self.site.module, key, 0)
        read_local(self.site.module)


def check_sequence(length: int, size: int) -> None:
    """Raise a `ModelError` for a sequence length that does not divide by the number of ranks."""
    if length % size:
        longer = -(-length // size) * size
        raise ModelError(
            f"sequence parallelism over {size} ranks cannot split rows of {length} tokens evenly: make them "
            f"{longer} or {longer - size} tokens long (pad with label -100), or set {SEQUENCE_KEY}: false"
        )


def _replicate_params(style: Style) -> None:
    for module in style.site.module.modules():
        for key in list(module._parameters):
            style.site.params.replicate(module, key)
        read_replicated(module, style.site.group)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


# ---- tensor plans: from a style per pattern of module names to a style per module


class Replicated(Style):
    """A module that is replicated, with everything in it: every rank computes all of it."""

    def parallelize(self) -> None:
        """Do nothing: plain parameters are replicated."""


STYLES: Mapping[str, type[Style]] = MappingProxyType(
    {
        "colwise": Colwise,
        "colwise_gather": ColwiseGather,
        "rowwise": Rowwise,
        "rowwise_split": RowwiseSplit,
        "heads": HeadParallel,
        "kv_heads": KvHeads,
        "qkv_heads": QkvHeads,
        "vocab_embedding": VocabEmbedding,
        "vocab_head": VocabHead,
        "region": Region,
        "inner": Inner,
        "block": ResidualBlock,
        "sequence": SequenceSharded,
        "whole_sequence": WholeSequence,
        "local_params": LocalParams,
        "gathered": Gathered,
        "mla_kv_a": LatentKv,
        "replicate": Replicated,
    }
)
"""The styles of a plan, by name."""


def resolve_plan(model: nn.Module, plan: Mapping[str, str], *, stage: bool = False) -> dict[str, str]:
    """Return the style of each module that matches a pattern: module name → style, in the order of the model.

    A pattern is a module name of which each segment may have wildcards: `blocks.*.ffn.up`. A pattern that matches
    nothing raises a `ConfigError`, unless the model is a pipeline `stage` of the model that the plan was written for.
    """
    problems: list[Problem] = []
    matches_of: dict[str, dict[str, str]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if style not in STYLES:
            problems.append(
                Problem(f"{PLAN_KEY}.{pattern}", f"unknown style {style!r}", choose(style, STYLES, "style"))
            )
            continue
        matched = [name for name in names if matches(name, pattern)]
        if not matched and not stage:
            problems.append(Problem(PLAN_KEY, f"{pattern!r} matches no module", _examples(names)))
        for name in matched:
            matches_of.setdefault(name, {})[pattern] = style
    for name, styles in matches_of.items():
        if len(set(styles.values())) > 1:
            texts = " and ".join(f"{pattern!r} says {style}" for pattern, style in styles.items())
            problems.append(
                Problem(PLAN_KEY, f"two patterns disagree about {name!r}: {texts}", "Let one of them match.")
            )
    if problems:
        raise ConfigError(problems)
    return {name: next(iter(matches_of[name].values())) for name in names if name in matches_of}


def load_tensor_plan(plan: dict[str, str] | CustomTensorPlan, model: nn.Module) -> Mapping[str, str] | None:
    """Return the plan in `strategy.tensor.plan`, or the one that the function named there returns; None if empty."""
    if not isinstance(plan, CustomTensorPlan):
        return plan or None
    loaded = call(load(plan, PLAN_KEY), PLAN_KEY, model, name=str(plan), arguments=plan.arguments)
    if not isinstance(loaded, Mapping) or not all(isinstance(text, str) for pair in loaded.items() for text in pair):
        message = f"{str(plan)!r} returned a {type(loaded).__name__}, expected patterns with styles"
        raise ConfigError(Problem(PLAN_KEY, message, "Return {'layers.*.mlp.up': 'colwise', …}."))
    return loaded


def check_sequence_plan(styles: Mapping[str, str]) -> None:
    """Raise a `ConfigError` for a plan without blocks: nothing would say where the sequence is split."""
    if "block" not in styles.values():
        raise ConfigError(
            Problem(
                SEQUENCE_KEY,
                "the tensor plan names no `block`, so nothing says where the sequence may be split",
                "Set it to false, or write a plan with the style `block` for repeated layers, `sequence` for norms.",
            )
        )


def enclosing_module(name: str, styles: Mapping[str, str], style: str) -> str | None:
    """Return the name of the innermost module around another that has this style; None if there is none."""
    while name := name.rpartition(".")[0]:
        if styles.get(name) == style:
            return name
    return None


def _examples(names: list[str]) -> str:
    shown = list(
        dict.fromkeys(".".join("*" if segment.isdigit() else segment for segment in name.split(".")) for name in names)
    )
    return f"there are: {', '.join(shown[:24])}{', …' if len(shown) > 24 else ''}"


# ---- application


def apply_tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    async_tp: bool = False,
    stage: bool = False,
) -> None:
    """Apply tensor parallelism to a model over the ranks of a 1-D mesh, in place.

    `plan` gives styles (see `STYLES`) to patterns of module names; by default it is the model's own `tensor_plan()`,
    or made from the plan of `transformers`. `sequence` splits activations along the sequence between the regions.
    `stage`: the module is a pipeline stage of the model the plan was written for, so patterns may match nothing.

    Works on the meta device and on real ones; if parameters have values, all ranks must have the same. Afterwards
    parameters that are sharded, or whose gradients are summed over ranks, are DTensors on `mesh`. The others are plain
    tensors; they and their gradients are equal on every rank. Names do not change. Input and output of the model are
    full tensors, equal on every rank of the mesh. So is the loss, which must not be summed over the mesh.
    """
    assert mesh.ndim == 1, "tensor parallelism has one mesh axis"
    if async_tp:
        enable_async(mesh, sequence=sequence)
    if mesh.size() == 1:
        return
    styles = styles_of(module, plan, stage=stage, ranks=mesh.size())
    if sequence and not stage:
        check_sequence_plan(styles)
    params, random = DTensorParams(mesh), dict[str, RankRng]()
    applied = {name: _make_style(name, module, styles, mesh, params, random, sequence=sequence) for name in styles}
    problems = [problem for style in applied.values() for problem in style.problems()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    parallelize_module(module, mesh, dict(applied), src_data_rank=None)
    unplaced = list(params.unplaced(module))
    if unplaced:
        raise ConfigError(
            Problem(
                PLAN_KEY,
                f"{', '.join(unplaced)} shares its tensor with a layer of the plan, and has no style itself",
                "Give both a style of the same kind, such as vocab_embedding and vocab_head.",
            )
        )
    if is_transformers_model(module):
        read = weights_read_elsewhere(module)
        for name, style in styles.items():
            if style in ("vocab_embedding", "gathered") and name.rpartition(".")[2] in read:
                read_full(module.get_submodule(name), mesh.get_group())
    if any(style == "vocab_head" and is_linear(module.get_submodule(name)) for name, style in styles.items()):
        return_full_tensors(module)


def styles_of(
    module: nn.Module, plan: Mapping[str, str] | None = None, *, stage: bool = False, ranks: int = 1
) -> dict[str, str]:
    """Return the style of each module, by name; from the given plan, the model's, or `transformers_styles`."""
    if plan is not None:
        return resolve_plan(module, plan, stage=stage)
    declared = getattr(module, "tensor_plan", None)
    if callable(declared):
        return resolve_plan(module, declared(), stage=True)
    if is_transformers_model(module):
        return transformers_styles(module, ranks)
    if hasattr(module, "peft_config"):
        return peft_styles(module, ranks)
    raise ModelError(
        f"there is no tensor-parallel plan for {type(module).__name__}: give it a method `tensor_plan()`, "
        f"write a plan as {PLAN_KEY}, or use layout.tp: 1"
    )


def experts_are_replicated(
    module: nn.Module, plan: Mapping[str, str] | None = None, *, sequence: bool = False, stage: bool = False
) -> Callable[[str], bool]:
    """Return a function: module name → whether the plan replicates the experts of this module on all ranks.

    It does if the module, or one around it, has the style `replicate`. Experts that are sharded over ranks need the
    same tokens on all of them, so if `sequence` splits the tokens there, the function raises a `ConfigError`. Call this
    before the plan is applied.
    """
    styles = styles_of(module, plan, stage=stage)

    def answer(name: str) -> bool:
        def is_in(style: str) -> bool:
            return styles.get(name) == style or enclosing_module(name, styles, style) is not None

        if not is_in("replicate") and sequence and is_in("block") and not is_in("whole_sequence"):
            message = f"{name!r} holds experts, which need all tokens, in a block where the sequence is split"
            raise ConfigError(Problem(PLAN_KEY, message, "Give the mixture around them the style `whole_sequence`."))
        return is_in("replicate")

    return answer


def _computes_own_loss(model: nn.Module) -> bool:
    """Return whether a model computes its loss from full logits: one of `transformers`, unless Plait computes it."""
    inner = next((module for module in model.modules() if is_transformers_model(module)), None)
    is_own = inner is model or hasattr(model, "peft_config")
    return is_own and not getattr(inner, "takes_sharded_logits", False)


def _make_style(
    name: str,
    model: nn.Module,
    styles: dict[str, str],
    mesh: DeviceMesh,
    params: DTensorParams,
    random: dict[str, RankRng],
    *,
    sequence: bool,
) -> Style:
    site = Site(
        name=name,
        module=model.get_submodule(name),
        parent=model.get_submodule(name.rpartition(".")[0]),
        styles=styles,
        mesh=mesh,
        group=mesh.get_group(),
        size=mesh.size(),
        rank=mesh.get_local_rank(),
        params=params,
        sequence=sequence,
        split=sequence
        and enclosing_module(name, styles, "block") is not None
        and all(enclosing_module(name, styles, style) is None for style in ("whole_sequence", "local_params")),
        region=enclosing_module(name, styles, "region"),
        random=random,
        gathers_logits=partial(_computes_own_loss, model),
        root=model,
    )
    return STYLES[styles[name]](site)
