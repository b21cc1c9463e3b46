"""Context parallelism (CP): the attention of a model over rows of tokens that are split over ranks.

This file replaces the attention functions of a model. Ring attention, Ulysses and all-gather attention themselves are
in `context_parallel_attention.py`. A *full row* is a row with the tokens of all ranks, in order.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from plait.distributed.context_parallel_attention import (
    CONTEXT_KINDS,
    ContextGroup,
    ContextKind,
    all_gather_stacked,
    allgather_attention,
    check_heads,
    gather_with_gradient,
    pack,
    ring_attention,
    split,
    ulysses_attention,
    unpack,
    unsplit,
    visible,
)
from plait.distributed.dtensor import to_local
from plait.distributed.mixers import (
    current_documents,
    need_pairs,
    prepare_mixers,
    split_rows,
    uses_attention_registry,
    with_documents,
)
from plait.errors import ConfigError, ModelError, Problem
from plait.transformers_internals import attn_implementation, is_transformers_model, no_split_modules, setting

Attend = Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]
"""A function of q, k, v, mask and dropout that returns attention over full rows."""
MakeMask = Callable[[Tensor], Any]
"""A function that returns the mask of such an attention from the document ids of full rows."""


class SequenceAttention(ABC):
    """Attention over a sequence that is split over the ranks of a group, and its masks."""

    def __init__(self, cp: ContextGroup) -> None:
        self._cp = cp

    def check(self, heads: int | None, dropout: float) -> None:  # noqa: B027  # refuses nothing by default
        """Raise a `ModelError` for a number of heads (None: unknown) or a dropout that is not supported."""

    @abstractmethod
    def mask(self, document_ids: Tensor, make: MakeMask) -> Any:
        """Return the mask of `attend` from this rank's document ids. A collective, called once per forward pass."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Return causal attention of this rank's queries over full rows; `inner` is the model's own attention."""


class Ring(SequenceAttention):
    """Ring attention; see [Note: the ring], `context_parallel_attention.py`."""

    def check(self, heads: int | None, dropout: float) -> None:
        """Raise a `ModelError` for dropout; any number of heads is supported."""
        if dropout:
            raise ModelError(
                f"ring attention does not support attention dropout (dropout={dropout}): weights are computed again in "
                "the backward pass, with other random numbers; use ulysses or allgather, or set the attention dropout "
                "to 0"
            )

    def mask(self, document_ids: Tensor, make: MakeMask) -> Tensor:
        """Return the document ids of all ranks, stacked: (rank, batch, tokens)."""
        return all_gather_stacked(document_ids, self._cp)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Return ring attention: keys and values are sent from rank to rank."""
        self.check(q.shape[1], dropout)
        _check_halves(q)
        q, k, v = _cast_for_attention(q, k, v)
        return ring_attention(q, k, v, self._cp, documents=mask, scale=scale)


class Ulysses(SequenceAttention):
    """Ulysses: each rank computes attention over full rows, for some of the heads."""

    def check(self, heads: int | None, dropout: float) -> None:
        """Raise a `ModelError` if heads do not divide by the ranks; the model's own attention does dropout."""
        if heads is not None:
            check_heads(heads, self._cp.size)

    def mask(self, document_ids: Tensor, make: MakeMask) -> Any:
        """Return the mask that the model itself makes for full rows."""
        return make(unsplit(list(all_gather_stacked(document_ids, self._cp)), "ulysses"))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Exchange tokens for heads (all-to-all), call `inner` with full rows, exchange back; return its result."""

        def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return inner(q, k, v, mask, dropout)

        q, k, v = _cast_for_attention(q, k, v)
        return ulysses_attention(q, k, v, self._cp, attend_whole)


class AllGather(SequenceAttention):
    """All-gather attention: every rank gathers all keys and values, and computes attention of its own queries."""

    def mask(self, document_ids: Tensor, make: MakeMask) -> Tensor:
        """Return the part of the full mask for this rank's queries; see `visible`."""
        return visible(all_gather_stacked(document_ids, self._cp), self._cp)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """All-gather keys and values; return attention of this rank's queries to them."""
        _check_halves(q)
        q, k, v = _cast_for_attention(q, k, v)
        return allgather_attention(q, k, v, self._cp, mask=mask, dropout=dropout, scale=scale)


SEQUENCE_ATTENTIONS: Mapping[ContextKind, type[SequenceAttention]] = MappingProxyType(
    {"ring": Ring, "ulysses": Ulysses, "allgather": AllGather}
)


def _check_halves(q: Tensor) -> None:
    if q.shape[2] % 2:
        raise ModelError(
            f"a rank has two chunks of a row, but there are {q.shape[2]} tokens; split batches with `split_batch`"
        )


def _cast_for_attention(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors cast as autocast casts for attention; unchanged without autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


# ---- `transformers` models, through their registries of attention and mask functions


_OWN_FUNCTION = ("softcap", "s_aux")
"""Arguments that change the result of attention: it is computed by the model's own function then."""
_UNSUPPORTED = ("position_bias", "head_mask")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_EXPLICIT = ("sdpa", "eager")
"""Implementations of attention that take a mask of any pairs of tokens."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """How one `transformers` model computes attention over rows that are split over ranks.

    [Note: attention of a model's own] Ring attention, Ulysses and all-gather attention are causal attention within
    documents, and nothing else. Attention in a window or in chunks, with a cap on its scores or with sinks is computed
    by the function that the model would use in one process: for this rank's queries, with all keys and values of the
    row, which are all-gathered, and a mask of (queries of this rank, all tokens).
    """

    attention: SequenceAttention
    cp: ContextGroup
    kind: ContextKind
    implementation: str
    """The name of the model's attention before context parallelism."""
    explicit: bool
    """Whether layers need a mask of pairs of tokens even where attention is causal: they do not use the registry."""

    def pairs(self, tokens: int, ids: Tensor | None, device: torch.device, allowed: Allowed | None = None) -> Tensor:
        """Return which of `tokens` tokens this rank's may attend to: (batch, 1, tokens of this rank, tokens)."""
        positions = torch.arange(tokens, device=device)[None]
        queries, ids = self.local(positions), torch.zeros_like(positions) if ids is None else ids
        mask = (queries[:, :, None] >= positions[:, None, :]) & (self.local(ids)[:, :, None] == ids[:, None, :])
        if allowed is not None:
            begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
            inside = positions - torch.where(begins, positions, 0).cummax(1).values  # of their documents
            mask = mask & allowed(self.local(inside)[:, :, None], inside[:, None, :])
        return mask[:, None]

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of full rows (batch, tokens)."""
        return split(x, self.cp.rank, self.cp.size, self.kind)

    def whole(self, x: Tensor) -> Tensor:
        """Return full rows of document ids from those of this rank."""
        return unsplit(list(all_gather_stacked(x, self.cp)), self.kind)

    def in_form(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a boolean mask in the form that the model's own function takes."""
        if self.implementation not in _EXPLICIT:
            raise ModelError(
                f"layers of this model need a mask of pairs of tokens where rows are split over ranks, which attention "
                f"{self.implementation!r} does not take; set attn_implementation to 'sdpa' or 'eager' in the model's "
                "config, or set strategy.layout.cp: 1"
            )
        if self.implementation == "sdpa":
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


Allowed = Callable[[Tensor, Tensor], Tensor]
"""A function of the places of queries and keys in their documents that returns whether they may attend."""


def apply_to_transformers(model: Any, attention: SequenceAttention, cp: ContextGroup, kind: ContextKind) -> None:
    """Register an attention and a mask function for this group, and make the model use them.

    Layers that mix tokens other than by attention from the registry gather the full row. Only document ids separate
    documents: positions that restart at 0 do not, unlike in some attention functions of `transformers`. A model that is
    not supported is a `ModelError`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    mixers = prepare_mixers(model)
    _check(model, attention, mixers)
    registry = any(uses_attention_registry(module) for module in model.modules())
    explicit = need_pairs(model, mixers.values())
    rows = _Rows(attention, cp, kind, attn_implementation(config), explicit)
    # The name has the group in it: all models of the process share the registries.
    name = f"plait_{kind}_{cp.group.group_name}_{rows.implementation}{'_explicit' * explicit}"
    AttentionInterface.register(name, partial(_attention, rows))
    AttentionMaskInterface.register(name, partial(_mask, rows))
    model.set_attn_implementation(name)
    if registry and attn_implementation(config) != name:
        raise ModelError(
            f"{type(model).__name__} does not take its attention from the registry of transformers, so context "
            "parallelism does not support it; set strategy.layout.cp: 1"
        )
    for mixer in mixers.values():
        split_rows(mixer, cp, kind, rows.implementation)
    model.register_forward_pre_hook(partial(_pass_documents, rows), with_kwargs=True, prepend=True)


def _check(model: Any, attention: SequenceAttention, mixers: Mapping[str, nn.Module]) -> None:
    config = model.config.get_text_config()
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} does not attend causally; set strategy.layout.cp: 1")
    if getattr(config, "output_router_logits", False):
        raise ModelError(
            "output_router_logits with strategy.layout.cp: each rank would balance the experts over its own tokens, "
            "which is another loss; set output_router_logits: false in the model's config"
        )
    alone = next(_blocks_without_registry(model, mixers.values()), None)
    if alone is not None:
        raise ModelError(
            f"{type(model).__name__} has a layer ({alone}) that does not take its attention from the registry of "
            "transformers, which would see the tokens of one rank only; set strategy.layout.cp: 1"
        )
    dropout = next((value for key in _DROPOUTS if (value := setting(config, key))), 0.0)
    attention.check(setting(config, "num_attention_heads"), dropout)


def _pass_documents(
    rows: _Rows, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    documents = kwargs.pop("document_ids", None)
    return None if documents is None else (args, with_documents(kwargs, rows.whole(documents)))


def _to_4d(mask: Tensor) -> Tensor:
    return mask if mask.ndim == 4 else mask.transpose(0, 1)[:, None]


def _full_mask(document_ids: Tensor) -> Tensor:
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def _mask(
    rows: _Rows,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **shapes: Any,
) -> Tensor | None:
    """The registered mask function: return None for a causal mask, document ids where there are any, or pairs."""
    if shapes.get("use_vmap") or "allow_is_bidirectional_skip" in shapes:
        raise ModelError(
            "the model has an attention mask of its own that is not causal, which context parallelism does not "
            "support; set strategy.layout.cp: 1"
        )
    # transformers 5.0 passes the positions of the queries, not their number.
    queries = shapes["q_length"] if "q_length" in shapes else len(shapes["cache_position"])
    tokens = queries * rows.cp.size
    documents = current_documents()
    ids = None if documents is None else rows.local(documents.ids)
    if attention_mask is not None:
        real = attention_mask.to(torch.int64)
        ids = real if ids is None else ids.masked_fill(real == 0, -1)
    local = local_size is not None and local_size < tokens
    if not local and not rows.explicit:
        return None if ids is None else _to_4d(rows.attention.mask(ids, _full_mask))
    device = torch.device(shapes.get("device") or "cpu") if ids is None else ids.device
    whole = None if ids is None else rows.whole(ids)
    mask = rows.pairs(tokens, whole, device, _near(config, local_size) if local else None)
    return rows.in_form(mask, shapes.get("dtype") or torch.get_default_dtype()).expand(
        shapes.get("batch_size", -1), -1, -1, -1
    )


def _near(config: Any, size: int | None) -> Allowed:
    """Return which tokens of a document are near enough: those of the same chunk, or in the window before."""
    assert size is not None
    text = config.get_text_config()
    window, chunk = (setting(text, key) for key in ("sliding_window", "attention_chunk_size"))
    if size not in (window, chunk) or window == chunk:
        raise ModelError(
            f"layers of {type(config).__name__} attend to {size} tokens, by neither its sliding_window ({window}) nor "
            f"its attention_chunk_size ({chunk}) alone; set strategy.layout.cp: 1"
        )
    if size == chunk:
        return lambda query, key: query // size == key // size
    return lambda query, key: key > query - size


def _attention(
    rows: _Rows,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError(f"{type(module).__name__} does not attend causally; set strategy.layout.cp: 1")
    if query.shape[2] != key.shape[2]:
        raise ModelError(
            f"{type(module).__name__} has {key.shape[2]} keys for {query.shape[2]} queries: context parallelism "
            "supports neither a KV cache nor cross-attention"
        )
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses {name}, which context parallelism does not support; "
                "set strategy.layout.cp: 1"
            )
    tokens = query.shape[2]
    pairs = attention_mask is not None and attention_mask.shape[-2:] == (tokens, tokens * rows.cp.size)
    if any(options.get(name) is not None for name in _OWN_FUNCTION) or (pairs and rows.kind != "allgather"):
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return _attend_by_own_function(rows, module, query, key, value, attention_mask, options)
    if sliding_window is not None and sliding_window < tokens * rows.cp.size and not pairs:
        raise ModelError(
            f"{type(module).__name__} attends in a window of {sliding_window} of {tokens * rows.cp.size} tokens, but "
            "got a mask without one, so context parallelism does not support it; set strategy.layout.cp: 1"
        )
    inner = partial(_attend_full_rows, scale=scaling)
    mask = None if attention_mask is None else _document_mask_of(attention_mask, tokens, rows.cp)
    output = rows.attention.attend(query, key, value, mask, dropout, scale=scaling, inner=inner)
    return output.transpose(1, 2).contiguous(), None


def _attend_by_own_function(
    rows: _Rows, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, None]:
    """Return attention by the model's own function; see [Note: attention of a model's own]."""
    tokens = query.shape[2]
    if mask is None or mask.shape[-2:] != (tokens, tokens * rows.cp.size):
        ids = None if mask is None else unsplit(list(_document_mask_of(mask, tokens, rows.cp)), rows.kind)
        mask = rows.in_form(rows.pairs(tokens * rows.cp.size, ids, query.device), query.dtype)
    query, key, value = _cast_for_attention(query, key, value)
    if mask.is_floating_point():
        mask = mask.to(query.dtype)
    gathered = gather_with_gradient(pack(key, value), rows.cp)
    messages = [unpack(flat, key.shape, value.shape) for flat in gathered]
    key, value = (unsplit([message[i] for message in messages], rows.kind, dim=2) for i in range(2))
    return _own_function(rows, module)(module, query, key, value, mask, **options)[0], None


def _own_function(rows: _Rows, module: Any) -> Callable[..., Any]:
    from transformers import AttentionInterface

    if rows.implementation != "eager":
        function: Any = AttentionInterface()[rows.implementation]  # type: ignore[no-untyped-call]
        return function  # type: ignore[no-any-return]
    scope = inspect.unwrap(type(module).forward).__globals__
    if "eager_attention_forward" not in scope:
        raise ModelError(
            f"{type(module).__name__} has no eager attention that can be called for a part of a row; set "
            "attn_implementation: sdpa in the model's config, or set strategy.layout.cp: 1"
        )
    return scope["eager_attention_forward"]  # type: ignore[no-any-return]


def _document_mask_of(mask: Tensor, tokens: int, cp: ContextGroup) -> Tensor:
    """Return the mask that `_to_4d` made four-dimensional, as `attend` takes it.

    Raise a `ModelError` for any other mask of (query, key) pairs.
    """
    if mask.dtype == torch.bool and mask.shape[-1] == tokens * cp.size:
        return mask
    if not mask.is_floating_point() and mask.shape[-2:] == (cp.size, tokens):
        return mask[:, 0].transpose(0, 1)
    raise ModelError(
        f"an attention mask of shape {tuple(mask.shape)} does not cover the tokens of other ranks; "
        "pass document_ids, or an attention_mask of shape (batch, tokens)"
    )


def _attend_full_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, scale: float | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and grouped:
        # The kernels that take a mask do not support fewer key heads than query heads.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def apply_context_parallel(module: nn.Module, where: DeviceMesh | dist.ProcessGroup, *, kind: ContextKind) -> None:
    """Make a model compute attention over full rows, which are split over the ranks of `where`.

    | kind      | what is sent                          | needs                          | dropout   |
    |-----------|---------------------------------------|--------------------------------|-----------|
    | ring      | keys and values, rank to rank         |                                | no        |
    | ulysses   | heads for tokens, all-to-all          | heads that divide by the ranks | yes       |
    | allgather | all keys and values to all ranks      | memory for those of a row      | yes       |

    From then on the model has to be called with what `split_batch` returns for the same kind. It returns the loss and
    count, or the logits, of this rank's tokens. Losses and gradients, summed over the ranks, equal those of one
    process. If the model has dropout, ranks need different random states, because they hold different tokens.

    Supported are models whose attention modules have an `attend` and whose masks come from a `make_mask` (Plait's own),
    and unedited `transformers` models; anything else is a `ModelError`. All attention has to be causal self-attention.
    No parameter is changed, so it may be applied before or after tensor parallelism, on the meta device or not.
    """
    if kind not in CONTEXT_KINDS:
        raise ConfigError(
            Problem(
                "strategy.context.kind",
                f"{kind!r} is not a kind of context parallelism",
                f"Use {', '.join(CONTEXT_KINDS)}.",
            )
        )
    cp = ContextGroup.of(where)
    if cp.size == 1:
        return
    attention = SEQUENCE_ATTENTIONS[kind](cp)
    if is_transformers_model(module):
        apply_to_transformers(module, attention, cp, kind)
    else:
        _apply_to_attend(module, attention)
    module.register_forward_pre_hook(_require_positions, with_kwargs=True)


def _apply_to_attend(module: nn.Module, attention: SequenceAttention) -> None:
    layers = {name: m for name, m in module.named_modules() if callable(getattr(m, "attend", None))}
    makers = [m for m in module.modules() if callable(getattr(m, "make_mask", None))]
    if not layers:
        raise ModelError(
            f"{type(module).__name__} has no attention that context parallelism supports: its attention modules need "
            "an attribute `attend(q, k, v, mask, dropout)`, and what makes their masks an attribute `make_mask`; "
            "or set strategy.layout.cp: 1"
        )
    for name, layer in layers.items():
        try:
            attention.check(_local_heads(layer), getattr(layer, "dropout", 0.0))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
    for layer in layers.values():
        _set_once(layer, "attend", partial(_attend, attention, layer.attend))
    for maker in makers:
        _set_once(maker, "make_mask", partial(_make_mask, attention, maker.make_mask))


def _set_once(module: Any, name: str, function: Any) -> None:
    present = getattr(module, name)
    assert getattr(present, "func", None) not in (_attend, _make_mask), "context parallelism was applied already"
    setattr(module, name, function)


def _local_heads(layer: Any) -> int | None:
    """Return how many heads this rank has, from the size of the query projection; None where that is unknown."""
    weight = getattr(getattr(layer, "q", None), "weight", None)
    head_dim = getattr(layer, "head_dim", None)
    if weight is None or head_dim is None:
        return None
    return int(to_local(weight.detach()).shape[0]) // int(head_dim)


def _attend(
    attention: SequenceAttention, inner: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0
) -> Tensor:
    return attention.attend(q, k, v, mask, dropout, scale=None, inner=inner)


def _make_mask(attention: SequenceAttention, make: Any, document_ids: Tensor | None, **how: Any) -> Any:
    return None if document_ids is None else attention.mask(document_ids, partial(make, **how))


def _require_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a `ModelError` for a call without positions: each rank would count its tokens from 0, which is wrong."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or len(args) > 2:
        return
    if kwargs.get("positions") is None and kwargs.get("position_ids") is None:
        raise ModelError(
            f"{type(module).__name__} has rows that are split over ranks, but was called without positions; "
            "call it with what `split_batch` returns"
        )


def _blocks_without_registry(model: Any, mixers: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the names of layers with neither a mixer nor attention from the registry of `transformers`."""
    handled = set(mixers)
    classes = no_split_modules(model)
    for name, block in model.named_modules():
        listed = type(block).__name__ in classes and name.rpartition(".")[2].isdigit()
        if listed and not any(uses_attention_registry(module) or module in handled for module in block.modules()):
            yield name
