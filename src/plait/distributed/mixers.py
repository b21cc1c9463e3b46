"""Layers of `transformers` models that mix the tokens of a row other than by attention with a mask.

Attention has a mask, and comes from a registry in which Plait registers its own. A recurrent state, a convolution along
the row or an index of compressed tokens has neither. It would go on from one document of a packed row into the next,
and where a row is split over ranks (context parallelism), it would see the tokens of one rank only. Such a layer is a
*mixer* here.

[Note: a mixer and its documents] A mixer is found by what its module is: it takes what earlier tokens have left (a
cache, a state) or a mask, and does not look up the registry. It is called with each document of a row as a row of its
own, padded at the end, where nothing that is real can see the padding. So it computes what it computes for the document
alone, whatever it is inside: only that it treats rows alike and never looks ahead is presumed, and the check before the
first step (`engine.check_rows`) does not take that on trust. Documents whose lengths differ by less than a factor of
two are processed in one call, so less than half of its tokens are padding.

Where a row is split over ranks, every rank gathers it, computes the mixer for all of it, and keeps its own tokens: it
is correct for every mixer, and costs each rank the time and activations of the mixer for the full row.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial, wraps
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.distributed.context_parallel_attention import (
    ContextGroup,
    ContextKind,
    all_gather_stacked,
    gather_with_gradient,
    split,
    unsplit,
)
from plait.errors import ModelError, PlaitError
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import tree_map_only
from plait.transformers_internals import attention_by

_DOCUMENTS = "plait_documents"
"""The keyword by which modules hand documents to their own forward pass, also when that is recomputed."""
_HISTORY = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_params",
        "conv_mask",
        "layer_past",
        "past_key_value",
        "past_key_values",
        "seq_idx",
        "state",
        "use_cache",
    }
)
"""Names of the arguments by which a module of `transformers` gets what earlier tokens have left, or which to see."""
_CACHES = frozenset({"cache_params", "layer_past", "past_key_value", "past_key_values"})
_ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


class DocumentRows(NamedTuple):
    """Documents of similar lengths as rows of their own."""

    tokens: Tensor
    """(documents, longest): the index of each token in the flattened batch; padding repeats the last token."""
    real: Tensor
    """The indices in the flattened `tokens` of what is not padding."""


class Documents:
    """The document that each token of a batch of full rows belongs to."""

    def __init__(self, ids: Tensor) -> None:
        """`ids` are (batch, tokens); a document is a run of equal ids."""
        self.ids = ids

    @cached_property
    def groups(self) -> list[DocumentRows]:
        """All documents, grouped by length; empty where ids have no values, as in a plan."""
        return _group(self.ids)

    @cached_property
    def order(self) -> Tensor:
        """The order in which the real tokens of all groups are those of the flattened batch."""
        return torch.cat([rows.tokens.flatten()[rows.real] for rows in self.groups]).argsort()


def _no_groups(ids: Tensor) -> list[DocumentRows]:
    return []


@on_fake_tensors(_no_groups)
def _group(ids: Tensor) -> list[DocumentRows]:
    host = ids.detach().cpu()
    begins = torch.ones_like(host, dtype=torch.bool)
    begins[:, 1:] = host[:, 1:] != host[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([host.numel()]))
    sizes = torch.tensor([(length - 1).bit_length() for length in lengths.tolist()])
    groups = []
    for size in sorted(set(sizes.tolist())):
        first, length = starts[sizes == size, None], lengths[sizes == size, None]
        offsets = torch.arange(int(length.max()))
        index, real = first + offsets.minimum(length - 1), (offsets < length).flatten().nonzero()[:, 0]
        groups.append(DocumentRows(index.to(ids.device), real.to(ids.device)))
    return groups


_documents: ContextVar[Documents | None] = ContextVar("documents", default=None)


def current_documents() -> Documents | None:
    """Return the documents of the batch that a prepared model is being called with; None where rows are whole."""
    return _documents.get()


def with_documents(kwargs: dict[str, Any], ids: Tensor | None) -> dict[str, Any]:
    """Return the keywords of a call of a prepared model, with the document ids of full rows."""
    return kwargs if ids is None else {**kwargs, _DOCUMENTS: Documents(ids)}


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# ---- finding mixers


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that mix the tokens of a row other than by attention from the registry, by name.

    Attention from the registry is one of them if something inside of it (an index, a convolution) mixes tokens too, and
    so is attention of the same class: it may be given what the index of another layer has chosen.
    """
    mixers = dict(_mixers_in(model, "", inside=False))
    indexed = {type(mixer) for mixer in mixers.values() if uses_attention_registry(mixer)}
    return {name: module for name, module in model.named_modules() if name in mixers or type(module) in indexed}


def _mixers_in(module: nn.Module, prefix: str, *, inside: bool) -> Iterator[tuple[str, nn.Module]]:
    listed = isinstance(module, nn.ModuleList)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        repeated = inside or listed
        if not repeated or not _takes_history(child):
            yield from _mixers_in(child, path, inside=repeated)
            continue
        inner = [module for module in child.modules() if module is not child]
        if uses_attention_registry(child):
            if any(map(_takes_history, inner)):
                yield path, child
        elif (listed and any(map(_takes_history, inner))) or any(map(uses_attention_registry, inner)):
            yield from _mixers_in(child, path, inside=True)
        else:
            yield path, child


@cache
def _takes(forward: Callable[..., Any]) -> bool:
    return not _HISTORY.isdisjoint(inspect.signature(forward).parameters)


@cache
def _reads_mask(forward: Callable[..., Any]) -> bool:
    """Whether a forward pass does anything with an `attention_mask`."""
    used = (operation.argval for operation in dis.get_instructions(inspect.unwrap(forward)))
    return any("attention_mask" in (name if isinstance(name, tuple) else (name,)) for name in used)


def _takes_history(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv1d):
        return module.kernel_size[0] > 1
    return _takes(type(module).forward)


def uses_attention_registry(module: nn.Module) -> bool:
    """Whether a module takes its attention from the registry of `transformers`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _ATTENTION_REGISTRY in code.co_names


def mask_functions_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the functions for masks of `transformers` that forward passes in the model refer to."""
    return frozenset(
        name
        for cls in {type(module) for module in model.modules()}
        for function in _called_functions(cls)
        for name in _names_in(function.__code__)
        if getattr(function.__globals__.get(name), "__module__", None) == "transformers.masking_utils"
    )


def _called_functions(cls: type[nn.Module]) -> list[FunctionType]:
    """Return the forward of a class, and the methods and functions of its own file that this may call."""
    functions: list[FunctionType] = []
    waiting: list[Any] = [cls.forward]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if not isinstance(function, FunctionType) or function in functions:
            continue
        functions.append(function)
        for name in _names_in(function.__code__):
            called: Any = getattr(cls, name, None) or function.__globals__.get(name)
            if getattr(called, "__module__", None) == cls.__module__:
                waiting.append(called)
    return functions


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function refers to, in the functions written inside of it too."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def need_pairs(model: nn.Module, mixers: Iterable[nn.Module]) -> bool:
    """Whether mixers are attention that needs a mask of pairs of tokens, also where it is causal.

    That is so for an index in attention from the registry, and for what reads a mask in a model that makes no other
    masks (of padding, for recurrent layers).
    """
    pairs_only = "create_recurrent_attention_mask" not in mask_functions_of(model)
    return any(uses_attention_registry(m) or (pairs_only and getattr(m, "plait_masked", False)) for m in mixers)


# ---- calling mixers


def prepare_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Make the mixers of a `transformers` model respect documents and split rows, in place; return them by name.

    The classes of the mixers, and of the modules that contain them, are replaced by subclasses, as `fully_shard` does.
    """
    if isinstance(model, _Carrier):
        return {name: module for name, module in model.named_modules() if isinstance(module, _Mixer)}
    mixers = find_mixers(model)
    for name, mixer in mixers.items():
        _extend(mixer, _Mixer)
        inner = [module for module in mixer.modules() if module is mixer or _takes_history(module)]
        mixer.plait_name = name  # type: ignore[assignment]
        alone = not uses_attention_registry(mixer)  # an index prefers, of equal scores, what comes first in the row
        mixer.plait_masked = alone and all(_reads_mask(type(module).forward) for module in inner)  # type: ignore[assignment]
    around = {name.rsplit(".", depth)[0] for name in mixers for depth in range(1, name.count(".") + 1)}
    for name in ["", *sorted(around)]:
        module = model.get_submodule(name)
        if not isinstance(module, _Carrier | nn.ModuleList | nn.ModuleDict):
            _extend(module, _Carrier)
    return mixers


def split_rows(mixer: nn.Module, cp: ContextGroup, kind: ContextKind, implementation: str) -> None:
    """Make a prepared mixer gather the full row from the ranks of `cp`, and return this rank's part of its result.

    Attention inside of it is computed by `implementation`, the model's own.
    """
    mixer.plait_context = _Context(cp, kind, implementation)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Context:
    cp: ContextGroup
    kind: ContextKind
    implementation: str


def _extend(module: nn.Module, base: type[_Carrier]) -> None:
    original = type(module)
    members = {"__module__": original.__module__, "forward": base.around(original.forward)}
    module.__class__ = type(original.__name__, (base, original), members)
    module.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Add the documents to a module's keywords, which a recomputation keeps, unlike a context variable."""
    documents = _documents.get()
    return None if documents is None or _DOCUMENTS in kwargs else (args, {**kwargs, _DOCUMENTS: documents})


class _Carrier(nn.Module):
    """A module that hands documents to the modules inside of it."""

    @staticmethod
    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the class's forward pass, from its original one."""

        @wraps(forward)
        def carried(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            documents = kwargs.pop(_DOCUMENTS, None)
            if documents is None:
                return forward(self, *args, **kwargs)
            with _set(_documents, documents):
                return forward(self, *args, **kwargs)

        return carried


class _Mixer(_Carrier):
    """A mixer; see [Note: a mixer and its documents]."""

    plait_name: str
    plait_masked: bool
    """Whether a mask of pairs of tokens, if it is called with one, holds for everything inside of it."""
    plait_context: _Context | None = None
    plait_takes_documents = False
    """Whether it has been called with documents as rows of their own, and returned."""

    @staticmethod
    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the class's forward pass, from its original one."""

        @wraps(forward)
        def mixed(self: _Mixer, *args: Any, **kwargs: Any) -> Any:
            documents = kwargs.pop(_DOCUMENTS, None)
            if documents is None and self.plait_context is None:
                return forward(self, *args, **kwargs)
            return _mix(self, forward, documents, args, kwargs)

        return mixed


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes follow from the documents
def _mix(
    mixer: _Mixer,
    forward: Callable[..., Any],
    documents: Documents | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    # A cache that the model has made though it trains would carry the state of one document into the next.
    given: Any = (args, {name: None if name in _CACHES else value for name, value in kwargs.items()})
    batch, tokens = _rows_of(mixer, given)
    context, full = mixer.plait_context, tokens
    if context is not None:
        full *= context.cp.size
        given = _map(partial(_gather, mixer, batch, tokens), given)
    with nullcontext() if context is None else attention_by(mixer, context.implementation):
        if documents is None or (mixer.plait_masked and _has_mask(given, full)):
            output = forward(mixer, *given[0], **given[1])
        else:
            output = _by_document(mixer, forward, documents, given, batch, full)
    return output if context is None else _map(partial(_local, mixer, batch, full), output)


def _rows_of(mixer: _Mixer, given: Any) -> tuple[int, int]:
    """Return the batch size and the number of tokens of a call: those of its first tensor with features."""
    hidden: list[Tensor] = []
    _map(lambda x: hidden.append(x) if x.ndim == 3 and x.is_floating_point() else None, given)
    if not hidden:
        raise ModelError(
            f"{mixer.plait_name} ({type(mixer).__name__}) mixes the tokens of a row and is not called with tensors of "
            f"shape (batch, tokens, features), so {_REMEDY}"
        )
    return hidden[0].shape[0], hidden[0].shape[1]


_REMEDY = (
    "neither documents in a row nor split rows are supported; set data.document_mask: false (sft.packing: false) and "
    "strategy.layout.cp: 1"
)


def _has_mask(given: Any, tokens: int) -> bool:
    masks: list[bool] = []
    _map(lambda x: masks.append(x.ndim == 4 and x.shape[-2:] == (tokens, tokens)), given)
    return any(masks)


def _by_document(
    mixer: _Mixer, forward: Callable[..., Any], documents: Documents, given: Any, batch: int, tokens: int
) -> Any:
    if documents.ids.shape != (batch, tokens):
        raise ModelError(
            f"{mixer.plait_name} ({type(mixer).__name__}) was called for {batch} rows of {tokens} tokens, but there "
            f"are document ids for {tuple(documents.ids.shape)}, so {_REMEDY}"
        )
    if not documents.groups:
        return forward(mixer, *given[0], **given[1])
    outputs = []
    for rows in documents.groups:
        args, kwargs = _map(partial(_rows, mixer, rows.tokens, batch, tokens), given)
        try:
            output = forward(mixer, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if mixer.plait_takes_documents or isinstance(error, (PlaitError, torch.OutOfMemoryError)):
                raise
            raise ModelError(
                f"{mixer.plait_name} ({type(mixer).__name__}) mixes the tokens of a row and cannot be called with a "
                f"document of its own ({str(error).strip().splitlines()[0]:.120}), so {_REMEDY}"
            ) from error
        outputs.append(_map(partial(_real, rows), output))
    mixer.plait_takes_documents = True

    def joined(*tensors: Tensor) -> Tensor:
        width = max(x.shape[-1] for x in tensors)
        flat = torch.cat([_widen(x, width) for x in tensors])[documents.order]
        return flat.view(batch, tokens, *flat.shape[1:])

    return _zip(joined, outputs)


def _widen(x: Tensor, width: int) -> Tensor:
    """Repeat the last column up to `width`: of the tokens of short documents, an index has chosen fewer."""
    missing = width - x.shape[-1]
    return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], dim=-1) if missing else x


def _rows(mixer: _Mixer, index: Tensor, batch: int, tokens: int, x: Tensor) -> Tensor:
    """Return an argument of the mixer for documents as rows."""
    if x.ndim == 0:
        return x
    row, column = index // tokens, index % tokens
    if x.shape[0] == 1:
        row = torch.zeros_like(row)
    if x.ndim == 4 and x.shape[-2:] == (tokens, tokens) and x.shape[0] in (1, batch):
        mask = x.transpose(1, 2)[row, column].transpose(1, 2)
        mask = mask.gather(3, column[:, None, None, :].expand(-1, *mask.shape[1:3], -1))
        later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=x.device).triu(1)  # padding repeats a token
        return mask.masked_fill(later, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
    if x.ndim >= 2 and x.shape[0] in (1, batch) and x.shape[1] == tokens:
        return x[row, column]
    raise _unknown(mixer, x, batch, tokens)


def _unknown(mixer: _Mixer, x: Tensor, batch: int, tokens: int) -> ModelError:
    return ModelError(
        f"{mixer.plait_name} ({type(mixer).__name__}) mixes the tokens of a row and is called with a tensor of shape "
        f"{tuple(x.shape)}, which has no axis of the {tokens} tokens of {batch} rows, so {_REMEDY}"
    )


def _real(rows: DocumentRows, x: Tensor) -> Tensor | None:
    """Return the tokens of an output that are not padding, flattened; None for an output that has no tokens."""
    return x.flatten(0, 1)[rows.real] if x.shape[:2] == rows.tokens.shape else None


def _gather(mixer: _Mixer, batch: int, tokens: int, x: Tensor) -> Tensor:
    """Return an argument of the mixer for full rows."""
    if x.ndim == 0:
        return x
    assert mixer.plait_context is not None
    cp, kind = mixer.plait_context.cp, mixer.plait_context.kind
    if x.ndim == 4 and x.shape[-2:] == (tokens, tokens * cp.size):
        return unsplit(list(_stack(x, cp)), kind, dim=2)
    if x.ndim >= 2 and x.shape[0] in (1, batch) and x.shape[1] == tokens:
        return unsplit(list(_stack(x, cp)), kind)
    raise _unknown(mixer, x, batch, tokens)


def _stack(x: Tensor, cp: ContextGroup) -> Tensor:
    if x.dtype == torch.bool:
        return all_gather_stacked(x.to(torch.uint8), cp).bool()
    return gather_with_gradient(x.contiguous(), cp) if x.is_floating_point() else all_gather_stacked(x, cp)


def _local(mixer: _Mixer, batch: int, tokens: int, x: Tensor) -> Tensor | None:
    """Return this rank's part of an output; None for an output that has no tokens."""
    assert mixer.plait_context is not None
    cp, kind = mixer.plait_context.cp, mixer.plait_context.kind
    return split(x, cp.rank, cp.size, kind) if x.shape[:2] == (batch, tokens) else None


def _map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return tree_map_only(Tensor, function, tree)


def _zip(function: Callable[..., Tensor], outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return function(*outputs)
    if isinstance(first, tuple | list):
        return type(first)(_zip(function, [output[i] for output in outputs]) for i in range(len(first)))
    return first
