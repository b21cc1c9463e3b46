"""Context parallelism (CP): the attention of a model over rows of tokens that are split over ranks.

This file replaces the attention functions of a model. Ring attention, Ulysses and all-gather attention themselves are
in `context_parallel_attention.py`. A *full row* is a row with the tokens of all ranks, in order.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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
    ring_attention,
    ulysses_attention,
    unsplit,
    visible,
)
from plait.distributed.dtensor import to_local
from plait.errors import ConfigError, ModelError, Problem
from plait.transformers_internals import attn_implementation, is_stateful, is_transformers_model, no_split_modules

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


_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments that some models pass to their attention and that change its result: not supported."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def apply_to_transformers(model: Any, attention: SequenceAttention, cp: ContextGroup, kind: ContextKind) -> None:
    """Register an attention and a mask function for this group, and make the model use them.

    Document ids reach the attention as a four-dimensional mask, because these models pass such a mask on unchanged.
    Only document ids separate documents: positions that restart at 0 do not, unlike in some attention functions of
    `transformers`. A model that is not supported is a `ModelError`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    _check(model, attention)
    # The name has the group in it: all models of the process share the registries.
    name = f"plait_{kind}_{cp.group.group_name}"
    AttentionInterface.register(name, partial(_attention, attention, cp))
    AttentionMaskInterface.register(name, partial(_mask, attention, cp))
    model.set_attn_implementation(name)
    if attn_implementation(config) != name:
        raise ModelError(
            f"{type(model).__name__} does not take its attention from the registry of transformers, so context "
            "parallelism does not support it; set strategy.layout.cp: 1"
        )
    model.register_forward_pre_hook(partial(_pass_documents, attention), with_kwargs=True)


def _check(model: Any, attention: SequenceAttention) -> None:
    config = model.config.get_text_config()
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} does not attend causally; set strategy.layout.cp: 1")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"{type(model).__name__} attends within chunks of {config.attention_chunk_size} tokens, which context "
            "parallelism does not support; set strategy.layout.cp: 1"
        )
    mixer = mixer_without_mask(model)
    alone = None if mixer is not None else next(_blocks_without_registry(model), None)
    if mixer is not None or alone is not None:
        what = mixer or f"a layer ({alone}) that does not take its attention from the registry of transformers"
        raise ModelError(
            f"{type(model).__name__} has {what}, which would see the tokens of one rank only; set strategy.layout.cp: 1"
        )
    dropout = next((getattr(config, key) for key in _DROPOUTS if getattr(config, key, 0.0)), 0.0)
    attention.check(getattr(config, "num_attention_heads", None), dropout)


def _pass_documents(
    attention: SequenceAttention, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    documents = kwargs.pop("document_ids", None)
    if documents is None:
        return None
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "document_ids with output_router_logits: the balance loss of transformers does not support such a mask; "
            "set output_router_logits: false or pack without document ids"
        )
    padding = kwargs.get("attention_mask")
    if padding is not None:
        documents = documents.masked_fill(padding == 0, -1)
    kwargs["attention_mask"] = _to_4d(attention.mask(documents, _full_mask))
    return args, kwargs


def _to_4d(mask: Tensor) -> Tensor:
    return mask if mask.ndim == 4 else mask.transpose(0, 1)[:, None]


def _full_mask(document_ids: Tensor) -> Tensor:
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def _mask(
    attention: SequenceAttention,
    cp: ContextGroup,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **shapes: Any,
) -> Tensor | None:
    """The registered mask function: return None for a causal mask, document ids where there is padding."""
    # transformers 5.0 passes the positions of the queries, not their number.
    queries = shapes["q_length"] if "q_length" in shapes else len(shapes["cache_position"])
    _check_window(local_size, queries * cp.size)
    if attention_mask is None:
        return None
    return _to_4d(attention.mask(attention_mask.to(torch.int64), _full_mask))


def _attention(
    attention: SequenceAttention,
    cp: ContextGroup,
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
    _check_window(sliding_window, query.shape[2] * cp.size)
    inner = partial(_attend_full_rows, scale=scaling)
    mask = None if attention_mask is None else _document_mask_of(attention_mask, query.shape[2], cp)
    output = attention.attend(query, key, value, mask, dropout, scale=scaling, inner=inner)
    return output.transpose(1, 2).contiguous(), None


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


def _check_window(window: int | None, tokens: int) -> None:
    if window is not None and window < tokens:
        raise ModelError(
            f"context parallelism does not support sliding-window attention (window {window} < sequence length "
            f"{tokens}); shorten the rows, or set strategy.layout.cp: 1"
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


# Layers of `transformers` models that mix the tokens of a row other than by attention.
#
# Attention has a mask, and comes from a registry in which Plait can register its own. A recurrent state, a convolution
# along the row or an index of compressed tokens has neither. It would mix the documents of a packed row, and where a
# row is split over ranks, it would mix the tokens of one rank only.


_MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "window_attention"})
"""Layer types of `transformers` in which a token sees only the tokens that the attention mask allows."""
_TOKENWISE_LAYERS = frozenset({"moe", "sparse", "dense", "mlp"})
"""Layer types of `transformers` that process each token alone."""
_ATTENTION_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


def mixer_without_mask(model: nn.Module) -> str | None:
    """Return a description of what mixes tokens without an attention mask in a model; None if nothing is known to."""
    for module in model.modules():
        types = {str(layer) for layer in getattr(getattr(module, "config", None), "layer_types", None) or ()}
        if other := sorted(types - _MASKED_LAYERS - _TOKENWISE_LAYERS):
            return f"layers of type {', '.join(map(repr, other))}"
        if is_stateful(module):
            return "a recurrent state"
    return None


def _blocks_without_registry(model: Any) -> Iterator[str]:
    """Yield the names of layers in which no module takes its attention from the registry of `transformers`."""
    classes = no_split_modules(model)
    for name, block in model.named_modules():
        listed = type(block).__name__ in classes and name.rpartition(".")[2].isdigit()
        if listed and not any(_uses_attention_registry(type(module)) for module in block.modules()):
            yield name


def _uses_attention_registry(cls: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and _ATTENTION_REGISTRY in code.co_names
