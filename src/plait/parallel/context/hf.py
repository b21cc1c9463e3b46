"""Context parallelism for `transformers` models, through the registries that they look their attention up in."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.errors import ModelError
from plait.ops import blocks_without_registry, mixer_without_mask
from plait.parallel.context.line import Line
from plait.parallel.context.split import Kind
from plait.parallel.context.ways import Way
from plait.transformers_internals import attn_implementation

_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some models hand to their attention beside the usual, and which changes its result."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def apply_to_transformers(model: Any, way: Way, line: Line, kind: Kind) -> None:
    """Register an attention and a mask for this line of ranks, and have the model use them.

    Document ids reach the attention as a mask of four dimensions, which these models pass on as they are. Positions
    that start anew are not taken for the start of a document, as some of their own attentions do.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    _check(model, way)
    # A name of its own for each line: the registries are shared by all models of the process.
    name = f"plait_{kind}_{line.group.group_name}"
    AttentionInterface.register(name, partial(_attention, way, line))
    AttentionMaskInterface.register(name, partial(_mask, way, line))
    model.set_attn_implementation(name)
    if attn_implementation(config) != name:
        raise ModelError(
            f"{type(model).__name__} does not take its attention from the registry of transformers, so it cannot "
            "attend over rows that are spread over ranks; set strategy.layout.cp: 1"
        )
    model.register_forward_pre_hook(partial(_take_documents, way), with_kwargs=True)


def _check(model: Any, way: Way) -> None:
    config = model.config.get_text_config()
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} does not attend causally; set strategy.layout.cp: 1")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise ModelError(
            f"{type(model).__name__} attends within chunks of {config.attention_chunk_size} tokens, which rows "
            "that are spread over ranks cannot; set strategy.layout.cp: 1"
        )
    mixer = mixer_without_mask(model)
    alone = None if mixer is not None else next(blocks_without_registry(model), None)
    if mixer is not None or alone is not None:
        what = mixer or f"a layer ({alone}) that does not take its attention from the registry of transformers"
        raise ModelError(
            f"{type(model).__name__} has {what}, which would see the tokens of its own rank only; set "
            "strategy.layout.cp: 1"
        )
    dropout = next((getattr(config, key) for key in _DROPOUTS if getattr(config, key, 0.0)), 0.0)
    way.check(getattr(config, "num_attention_heads", None), dropout)


def _take_documents(
    way: Way, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    documents = kwargs.pop("document_ids", None)
    if documents is None:
        return None
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "document_ids with output_router_logits: the balance loss of transformers cannot read such a mask; "
            "set output_router_logits: false or pack without document ids"
        )
    padding = kwargs.get("attention_mask")
    if padding is not None:
        documents = documents.masked_fill(padding == 0, -1)
    kwargs["attention_mask"] = _as_four_dimensions(way.mask(documents, _whole_mask))
    return args, kwargs


def _as_four_dimensions(mask: Tensor) -> Tensor:
    return mask if mask.ndim == 4 else mask.transpose(0, 1)[:, None]


def _whole_mask(document_ids: Tensor) -> Tensor:
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril()[:, None]


def _mask(
    way: Way, line: Line, *, attention_mask: Tensor | None = None, local_size: int | None = None, **shapes: Any
) -> Tensor | None:
    """What a model's own mask becomes: nothing where it is causal, documents where it tells padding from text."""
    # transformers 5.0 names the queries by their positions.
    queries = shapes["q_length"] if "q_length" in shapes else len(shapes["cache_position"])
    _check_window(local_size, queries * line.size)
    if attention_mask is None:
        return None
    return _as_four_dimensions(way.mask(attention_mask.to(torch.int64), _whole_mask))


def _attention(
    way: Way,
    line: Line,
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
            f"{type(module).__name__} has {key.shape[2]} keys for {query.shape[2]} queries: with rows spread over "
            "ranks there are no stored keys and no attention to other rows"
        )
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses {name}, which attention over spread rows does not have; "
                "set strategy.layout.cp: 1"
            )
    _check_window(sliding_window, query.shape[2] * line.size)
    inner = partial(_attend_whole, scale=scaling)
    mask = None if attention_mask is None else _as_way_made_it(attention_mask, query.shape[2], line)
    output = way.attend(query, key, value, mask, dropout, scale=scaling, inner=inner)
    return output.transpose(1, 2).contiguous(), None


def _as_way_made_it(mask: Tensor, tokens: int, line: Line) -> Tensor:
    """Undo `_as_four_dimensions`, and refuse a mask of pairs that somebody else has made of this rank's tokens."""
    if mask.dtype == torch.bool and mask.shape[-1] == tokens * line.size:
        return mask
    if not mask.is_floating_point() and mask.shape[-2:] == (line.size, tokens):
        return mask[:, 0].transpose(0, 1)
    raise ModelError(
        f"an attention mask of shape {tuple(mask.shape)} cannot say what tokens of other ranks may be attended to; "
        "give document_ids, or an attention_mask of shape (batch, tokens)"
    )


def _attend_whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, scale: float | None
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and grouped:
        # The kernels that take a mask have no grouped form.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _check_window(window: int | None, tokens: int) -> None:
    if window is not None and window < tokens:
        raise ModelError(
            f"attention in a sliding window of {window} tokens is not made for rows of {tokens} that are spread over "
            "ranks; shorten the rows, or set strategy.layout.cp: 1"
        )
