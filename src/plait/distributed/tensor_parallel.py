"""Tensor and sequence parallelism: applying a plan to a model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from plait.config import CustomTensorPlan, choose
from plait.distributed import tensor_parallel_styles
from plait.distributed.tensor_parallel_styles import (
    PLAN_KEY,
    SEQUENCE_KEY,
    Colwise,
    ColwiseGather,
    HeadParallel,
    KvHeads,
    OwnRandom,
    Placed,
    QkvHeads,
    Rowwise,
    RowwiseSplit,
    Site,
    Style,
    VocabEmbedding,
    VocabHead,
    answer_whole,
    around,
    drops,
    enter_region,
    is_linear,
    read_shared,
    while_training,
)
from plait.errors import ConfigError, ModelError, Problem
from plait.plugins import call, load
from plait.torch_internals import enable_async_tensor_parallel
from plait.transformers_internals import tp_plan

# Collectives that overlap with the matrix products around them (async TP).


ASYNC_KEY = "strategy.tensor.async_tp"


def why_no_async(device_type: str, *, sequence: bool) -> str | None:
    """The reason why async TP cannot work; none where it can."""
    if device_type != "cuda":
        return f"it copies between GPUs through symmetric memory, and this run is on {device_type}"
    if not sequence:
        return "it takes apart the gathers and scatters of sequence parallelism, which is off"
    if find_spec("triton") is None:
        return "it is a pass of torch.compile's inductor, which needs the package triton"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "symmetric memory needs a GPU of compute capability 8.0 or newer"
    return None


def enable_async(mesh: DeviceMesh, *, sequence: bool) -> None:
    """Have compiled blocks split their products into pieces that overlap with the collectives.

    The ranks of the group have to reach each other's memory, as GPUs of one host do. It changes code that
    `torch.compile` makes, so it does nothing for blocks that are not compiled.
    """
    reason = why_no_async(mesh.device_type, sequence=sequence)
    if reason is not None:
        raise ConfigError(
            Problem(ASYNC_KEY, f"async tensor parallelism cannot work here: {reason}", "Set it to false.")
        )
    enable_async_tensor_parallel(mesh.get_group().group_name)


# Between the tensor-parallel regions: activations whole on every rank, or split along the sequence.
#
# [Note: where the sequence is split]
# Sequence parallelism begins where the first block is entered and ends where the last one is left. Embedding, final
# norm and head see whole sequences, so positions, masks and losses are what they always are, whoever computes them,
# and so does a pipeline's next stage. Inside, norms, dropout and the residual stream work on parts: a region gathers
# at its entry and scatters its sum at its exit, which sends as much as the one all-reduce it replaces.


class Region(Style):
    """A module, such as attention, whose inside is tensor-parallel: its input is brought in once, for all layers."""

    def problems(self) -> list[Problem]:
        """Each rank has a summand of the gradients in here, so nothing may be left to do whole work."""
        if self.site.split and self._gathers() and drops(self.site.module):
            message = f"{self.site.name!r} puts features together again and draws random numbers (dropout)"
            return [Problem(SEQUENCE_KEY, message, "Set dropout to 0, or leave sequence parallelism off.")]
        names = [key for key, part in self.site.module.named_modules() if part._parameters]
        forgotten = [name for key in names if (name := f"{self.site.name}.{key}".rstrip(".")) not in self._known()]
        if not forgotten:
            return []
        message = f"{', '.join(map(repr, forgotten))}: layers of the region {self.site.name!r} without a word"
        return [Problem(PLAN_KEY, message, "Give each of them a word; `inner` keeps parameters whole.")]

    def _gathers(self) -> bool:
        """Whether all ranks do the same work in between, and so must drop the same."""
        inside = f"{self.site.name}."
        return any(word == "colwise_gather" and name.startswith(inside) for name, word in self.site.words.items())

    def _known(self) -> set[str]:
        """Every module that has a word, or lies in an `inner`, which takes all it holds."""
        words, site = self.site.words, self.site
        held = (
            f"{name}.{key}"
            for name, word in words.items()
            if word == "inner" and name.startswith(f"{site.name}.")
            for key, _ in site.module.get_submodule(name[len(site.name) + 1 :]).named_modules()
        )
        return {name for name, word in words.items() if word not in ("region", "replicate")} | set(held)

    def place(self) -> None:
        """Change the main input, and the random numbers inside."""
        site = self.site
        context = None
        # In a split block all random numbers are a rank's own already.
        if drops(site.module) and not site.split and not self._gathers():
            # Shared work ends in the row-parallel layer, and so do they: what follows it may be dropped out again.
            site.random[site.name] = OwnRandom(site.rank)
            context = while_training(site, site.random[site.name])
        around(site.module, enter=partial(enter_region, site), context=context)


class ResidualBlock(Style):
    """One layer of the model: the blocks of one list pass the residual stream on to each other."""

    def place(self) -> None:
        """With sequence parallelism, split where the first begins and join where the last ends."""
        site = self.site
        if not site.sequence:
            return
        listed = [name for name, word in site.words.items() if word == "block" and _list(name) == _list(site.name)]
        around(
            site.module,
            enter=self._cut if site.name == listed[0] else None,
            leave=self._join if site.name == listed[-1] else None,
            context=while_training(site, OwnRandom(site.rank)) if drops(site.module) else None,
        )

    def _cut(self, x: Tensor) -> Tensor:
        check_sequence(x.shape[1], self.site.size)
        return tensor_parallel_styles.cut(x, 1, self.site.group)

    def _join(self, x: Tensor) -> Tensor:
        return tensor_parallel_styles.join(x, 1, self.site.group)


class Sequence(Style):
    """A norm between regions: on a part of the sequence its parameters' gradients are summands."""

    def place(self) -> None:
        """Repeat the parameters, where the sequence is split; elsewhere there is nothing to do."""
        if self.site.split:
            _use_for_own_part(self)


class Inner(Style):
    """A module inside a region with parameters that all ranks have, such as a norm of each head."""

    def place(self) -> None:
        """Repeat the parameters; each rank's gradients are summands."""
        _use_for_own_part(self)


class WholeSequence(Style):
    """A module that must see all tokens, such as a mixture of experts: all ranks do the same work in it."""

    def problems(self) -> list[Problem]:
        """Its ranks would drop different elements of the same activations."""
        if self.site.split and drops(self.site.module):
            message = f"{self.site.name!r} works on the whole sequence and draws random numbers (dropout, jitter)"
            return [Problem(SEQUENCE_KEY, message, "Set them to 0, or leave sequence parallelism off.")]
        return []

    def place(self) -> None:
        """Join before, cut after."""
        if self.site.split:
            self._rows = 0
            around(self.site.module, enter=self._join, leave=self._cut)

    def _join(self, x: Tensor) -> Tensor:
        joined = tensor_parallel_styles.join(x, 1, self.site.group)
        self._rows, self._tokens = joined.shape[:2]
        return joined

    def _cut(self, x: Tensor) -> Tensor:
        if x.shape[:2] != (self._rows, self._tokens):  # some answer with the tokens of all rows in a line
            if x.shape[0] != self._rows * self._tokens:
                raise ModelError(
                    f"{self.site.name!r} was given {self._rows} rows of {self._tokens} tokens and answered with shape "
                    f"{tuple(x.shape)}, of which no dimension is the tokens; set {SEQUENCE_KEY}: false"
                )
            x = x.view(self._rows, self._tokens, *x.shape[1:])
        return tensor_parallel_styles.cut(x, 1, self.site.group)


def check_sequence(length: int, size: int) -> None:
    """Refuse a sequence that the ranks cannot share evenly."""
    if length % size:
        longer = -(-length // size) * size
        raise ModelError(
            f"sequence parallelism over {size} ranks cannot split rows of {length} tokens evenly: make them "
            f"{longer} or {longer - size} tokens long (pad with label -100), or set {SEQUENCE_KEY}: false"
        )


def _use_for_own_part(style: Style) -> None:
    for module in style.site.module.modules():
        for key in list(module._parameters):
            style.site.placed.repeat(module, key)
        read_shared(module, style.site.group)


def _list(name: str) -> str:
    return name.rpartition(".")[0]


# From a plan, which gives words to patterns of module names, to one word for each module.


class Replicated(Style):
    """A module that stays whole, with everything in it: every rank does all of its work."""

    def place(self) -> None:
        """There is nothing to do; the word only says that it was thought of."""


WORDS: Mapping[str, type[Style]] = MappingProxyType(
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
        "sequence": Sequence,
        "whole_sequence": WholeSequence,
        "replicate": Replicated,
    }
)
"""What each word of a plan does to its module."""


def resolve_plan(model: nn.Module, plan: Mapping[str, str], *, stage: bool = False) -> dict[str, str]:
    """The word of each module that a pattern names, in the order of the model.

    A pattern is a module name of which each part may have wildcards: `blocks.*.ffn.up`. One that matches nothing is
    an error, unless the model is a `stage`, a part of the model that the plan was written for.
    """
    problems: list[Problem] = []
    found: dict[str, dict[str, str]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, word in plan.items():
        if word not in WORDS:
            problems.append(Problem(f"{PLAN_KEY}.{pattern}", f"unknown word {word!r}", choose(word, WORDS, "word")))
            continue
        matched = [name for name in names if matches(name, pattern)]
        if not matched and not stage:
            problems.append(Problem(PLAN_KEY, f"{pattern!r} matches no module", _examples(names)))
        for name in matched:
            found.setdefault(name, {})[pattern] = word
    for name, words in found.items():
        if len(set(words.values())) > 1:
            said = " and ".join(f"{pattern!r} says {word}" for pattern, word in words.items())
            problems.append(
                Problem(PLAN_KEY, f"two patterns disagree about {name!r}: {said}", "Let one of them match.")
            )
    if problems:
        raise ConfigError(problems)
    return {name: next(iter(found[name].values())) for name in names if name in found}


def load_tensor_plan(plan: dict[str, str] | CustomTensorPlan, model: nn.Module) -> Mapping[str, str] | None:
    """The plan that `strategy.tensor.plan` says, or makes of the model; None where it says nothing."""
    if not isinstance(plan, CustomTensorPlan):
        return plan or None
    made = call(load(plan, PLAN_KEY), PLAN_KEY, model, name=str(plan), arguments=plan.arguments)
    if not isinstance(made, Mapping) or not all(isinstance(each, str) for pair in made.items() for each in pair):
        message = f"{str(plan)!r} returned a {type(made).__name__}, and patterns with words were expected"
        raise ConfigError(Problem(PLAN_KEY, message, "Return {'layers.*.mlp.up': 'colwise', …}."))
    return made


def matches(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern, part by part: a wildcard never reaches over a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def check_sequence_plan(words: Mapping[str, str]) -> None:
    """Sequence parallelism begins and ends at blocks, so a plan has to name them."""
    if "block" not in words.values():
        raise ConfigError(
            Problem(
                SEQUENCE_KEY,
                "the tensor plan names no `block`, so nothing says where the sequence may be split",
                "Give the repeated layers the word `block` and their norms the word `sequence`.",
            )
        )


def enclosing_module(name: str, words: Mapping[str, str], word: str) -> str | None:
    """The innermost module around another that has a word, if any."""
    while name := name.rpartition(".")[0]:
        if words.get(name) == word:
            return name
    return None


def _examples(names: list[str]) -> str:
    shown = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))
    return f"there are: {', '.join(shown[:24])}{', …' if len(shown) > 24 else ''}"


# A plan for a `transformers` model, from its own tensor-parallel plan and its structure.
#
# `transformers` names the layers that are split by columns and rows. What its plans leave out follows from the model:
# which modules these layers make up (regions), which layers are repeated (blocks), which are norms between them, and
# that embedding and head share the vocabulary.


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


def transformers_styles(model: nn.Module) -> dict[str, str]:
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


# Knowing a model of `transformers` when one comes, without loading the package.


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a model comes from `transformers`. As long as nobody has loaded the package, none does."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)


def train_without_caches(model: nn.Module) -> None:
    """Keep models of `transformers` from filling a cache of keys and values while they learn.

    Most would, if nobody says otherwise. A layer that is computed again would find there what it wrote the first time,
    and write once more.
    """
    for module in model.modules():
        if is_transformers_model(module) and "use_cache" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("past_key_values") is not None:
        raise ModelError(
            f"{type(module).__name__} was given past_key_values, which layers that are computed again would write to "
            "twice; set strategy.recompute: none, or leave them out"
        )
    return args, {**kwargs, "use_cache": False}


def apply_tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    async_tp: bool = False,
    stage: bool = False,
) -> None:
    """Share the work of a model's layers among the ranks of a 1-D mesh, in place.

    `plan` gives words (see `WORDS`) to patterns of module names; absent, it is the model's own `tensor_plan()`,
    or made from the plan of `transformers`. `sequence` splits activations along the sequence between the regions.
    `stage`: the module is a part of the model the plan was written for, so patterns may match nothing.

    Works on the meta device and on real ones; where parameters have values, all ranks must have the same. Afterwards
    parameters that are split, or whose gradients are summed over ranks, are DTensors on `mesh`; the others are plain
    and, like their gradients, the same on every rank. Names do not change. Input and answer of the model are whole
    and the same on every rank of the mesh; so is the loss, which must not be summed over it.
    """
    assert mesh.ndim == 1, "tensor parallelism goes along one mesh axis"
    if async_tp:
        enable_async(mesh, sequence=sequence)
    if mesh.size() == 1:
        return
    words = styles_of(module, plan, stage=stage)
    if sequence and not stage:
        check_sequence_plan(words)
    placed, random = Placed(mesh), dict[str, OwnRandom]()
    styles = {name: _style(name, module, words, mesh, placed, random, sequence=sequence) for name in words}
    problems = [problem for style in styles.values() for problem in style.problems()]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    parallelize_module(module, mesh, dict(styles), src_data_rank=None)
    loose = list(placed.left_behind(module))
    if loose:
        raise ConfigError(
            Problem(
                PLAN_KEY,
                f"{', '.join(loose)} shares its tensor with a layer of the plan, and has no word itself",
                "Give both the same kind of word, such as vocab_embedding and vocab_head.",
            )
        )
    if any(words[name] == "vocab_head" and is_linear(module.get_submodule(name)) for name in words):
        answer_whole(module)


def styles_of(module: nn.Module, plan: Mapping[str, str] | None = None, *, stage: bool = False) -> dict[str, str]:
    """The word of each module that takes part, by name; from the given plan, or the model's, or `transformers`'."""
    if plan is not None:
        return resolve_plan(module, plan, stage=stage)
    declared = getattr(module, "tensor_plan", None)
    if callable(declared):
        return resolve_plan(module, declared(), stage=True)
    if is_transformers_model(module):
        return transformers_styles(module)
    raise ModelError(
        f"nothing says how the ranks share the layers of a {type(module).__name__}: give it a method `tensor_plan()`, "
        f"write a plan as {PLAN_KEY}, or use layout.tp: 1"
    )


def experts_are_replicated(
    module: nn.Module, plan: Mapping[str, str] | None = None, *, sequence: bool = False, stage: bool = False
) -> Callable[[str], bool]:
    """Whether a plan keeps experts, by the name of what holds them, whole on purpose, so that all ranks have them all.

    That is `replicate`, for the module or for one around it. Experts that ranks share must see the same tokens on each
    of them, so where `sequence` splits these the answer is an error. To be asked for before the plan is applied.
    """
    words = styles_of(module, plan, stage=stage)

    def answer(name: str) -> bool:
        def within(word: str) -> bool:
            return words.get(name) == word or enclosing_module(name, words, word) is not None

        if not within("replicate") and sequence and within("block") and not within("whole_sequence"):
            message = f"{name!r} holds experts, which need all tokens, in a block where the sequence is split"
            raise ConfigError(Problem(PLAN_KEY, message, "Give the mixture around them the word `whole_sequence`."))
        return within("replicate")

    return answer


def _style(
    name: str,
    model: nn.Module,
    words: dict[str, str],
    mesh: DeviceMesh,
    placed: Placed,
    random: dict[str, OwnRandom],
    *,
    sequence: bool,
) -> Style:
    site = Site(
        name=name,
        module=model.get_submodule(name),
        parent=model.get_submodule(name.rpartition(".")[0]),
        words=words,
        mesh=mesh,
        group=mesh.get_group(),
        size=mesh.size(),
        rank=mesh.get_local_rank(),
        placed=placed,
        sequence=sequence,
        split=sequence
        and enclosing_module(name, words, "block") is not None
        and enclosing_module(name, words, "whole_sequence") is None,
        region=enclosing_module(name, words, "region"),
        random=random,
    )
    return WORDS[words[name]](site)
