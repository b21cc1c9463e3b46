"""Attention over rows that are spread over ranks, for a model that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from plait.distributed.context_parallel_attention import (
    KINDS,
    Kind,
    SequenceRanks,
    allgather_attention,
    check_heads,
    gather_from_all,
    join,
    ring_attention,
    ulysses_attention,
    visible,
)
from plait.distributed.dtensor import to_local
from plait.distributed.tensor_parallel import is_transformers_model
from plait.errors import ConfigError, ModelError, Problem
from plait.kernels import blocks_without_registry, mixer_without_mask
from plait.transformers_internals import attn_implementation

# One object for each kind: what takes the place of a model's mask, and of its attention.


Attend = Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]
"""(q, k, v, mask, dropout) to what attention gives, over whole rows."""
MakeMask = Callable[[Tensor], Any]
"""From the document ids of whole rows to what such an attention takes as a mask."""


class Way(Protocol):
    """How attention works on a line of ranks."""

    def check(self, heads: int | None, dropout: float) -> None:
        """Refuse, before anything is sent, what cannot work; the number of heads may be unknown as yet."""

    def mask(self, document_ids: Tensor, make: MakeMask) -> Any:
        """From this rank's document ids to what `attend` takes as a mask. Asks all ranks, once a forward."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Causal attention of this rank's queries; `inner` is the attention that would do it for whole rows."""


def make_way(kind: Kind, line: SequenceRanks) -> Way:
    """The way that `kind` names."""
    ways: dict[Kind, Callable[[SequenceRanks], Way]] = {"ring": Ring, "ulysses": Ulysses, "allgather": AllGather}
    return ways[kind](line)


class Ring:
    """See [Note: the ring], `context_parallel_attention.py`. Its masks are the document ids of all ranks."""

    def __init__(self, line: SequenceRanks) -> None:
        self._line = line

    def check(self, heads: int | None, dropout: float) -> None:
        """Any number of heads; no dropout."""
        if dropout:
            raise ModelError(
                f"ring attention cannot drop out attention weights (dropout={dropout}): a weight is computed once "
                "in the forward and once in the backward pass, and nothing would make both draw the same; "
                "choose ulysses or allgather, or set the dropout of attention to 0"
            )

    def mask(self, document_ids: Tensor, make: MakeMask) -> Tensor:
        """The ids of all ranks."""
        return gather_from_all(document_ids, self._line)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Ring attention: keys and values go round the ranks."""
        self.check(q.shape[1], dropout)
        _check_halves(q)
        q, k, v = _of_one_dtype(q, k, v)
        return ring_attention(q, k, v, self._line, documents=mask, scale=scale)


class Ulysses:
    """Whole rows of some heads. Its masks are those of the model itself, for whole rows."""

    def __init__(self, line: SequenceRanks) -> None:
        self._line = line

    def check(self, heads: int | None, dropout: float) -> None:
        """Heads that divide; dropout is that of the model's own attention."""
        if heads is not None:
            check_heads(heads, self._line.size)

    def mask(self, document_ids: Tensor, make: MakeMask) -> Any:
        """What the model itself would make of whole rows."""
        return make(join(list(gather_from_all(document_ids, self._line)), "ulysses"))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Trade tokens for heads, attend over whole rows, and trade back."""

        def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return inner(q, k, v, mask, dropout)

        q, k, v = _of_one_dtype(q, k, v)
        return ulysses_attention(q, k, v, self._line, attend_whole)


class AllGather:
    """All keys and values on every rank. Its masks say which tokens this rank's may attend to."""

    def __init__(self, line: SequenceRanks) -> None:
        self._line = line

    def check(self, heads: int | None, dropout: float) -> None:
        """Any number of heads; each rank drops out in rows of its own."""

    def mask(self, document_ids: Tensor, make: MakeMask) -> Tensor:
        """This rank's rows of the mask of all tokens."""
        return visible(gather_from_all(document_ids, self._line), self._line)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, *, scale: float | None, inner: Attend
    ) -> Tensor:
        """Collect all keys and values, then attend with this rank's queries."""
        _check_halves(q)
        q, k, v = _of_one_dtype(q, k, v)
        return allgather_attention(q, k, v, self._line, mask=mask, dropout=dropout, scale=scale)


def _check_halves(q: Tensor) -> None:
    if q.shape[2] % 2:
        raise ModelError(
            f"a rank's part of a row has two halves, but there are {q.shape[2]} tokens; cut batches with `split_batch`"
        )


def _of_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """As autocast would have it for attention; without autocast, tensors that are alike already."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


# Context parallelism for `transformers` models, through the registries that they look their attention up in.


_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""What some models hand to their attention beside the usual, and which changes its result."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def apply_to_transformers(model: Any, way: Way, line: SequenceRanks, kind: Kind) -> None:
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
    way: Way, line: SequenceRanks, *, attention_mask: Tensor | None = None, local_size: int | None = None, **shapes: Any
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
    line: SequenceRanks,
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


def _as_way_made_it(mask: Tensor, tokens: int, line: SequenceRanks) -> Tensor:
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


def apply_context_parallel(module: nn.Module, where: DeviceMesh | dist.ProcessGroup, *, kind: Kind) -> None:
    """Make a model attend over all tokens of its rows, of which each rank of `where` has a part.

    | kind      | what is sent                          | asks for                       | drops out |
    |-----------|---------------------------------------|--------------------------------|-----------|
    | ring      | keys and values, rank to rank         |                                | no        |
    | ulysses   | heads against tokens, all to all      | heads that divide by the ranks | yes       |
    | allgather | all keys and values to all            | memory for those of a row      | yes       |

    From then on the model is called with what `split_batch` gives for the same kind, and answers with the loss and
    count, or the logits, of this rank's tokens. Sums over the ranks, of losses and of gradients, are those of
    one process. Ranks need random states of their own where the model has dropout, as they hold different tokens.

    Works on models whose attention modules have an `attend` and which make their masks by `make_mask` (Plait's own),
    and on `transformers` models, unedited. No parameter is touched, so it may come before or after anything
    that splits heads, on the meta device or not. All attention has to be causal self-attention.
    """
    if kind not in KINDS:
        raise ConfigError(Problem("strategy.context.kind", f"there is no kind {kind!r}", f"Use {', '.join(KINDS)}."))
    line = SequenceRanks.of(where)
    if line.size == 1:
        return
    way = make_way(kind, line)
    if is_transformers_model(module):
        apply_to_transformers(module, way, line, kind)
    else:
        _apply_to_own(module, way)
    module.register_forward_pre_hook(_ask_for_positions, with_kwargs=True)


def _apply_to_own(module: nn.Module, way: Way) -> None:
    attentions = {name: m for name, m in module.named_modules() if callable(getattr(m, "attend", None))}
    makers = [m for m in module.modules() if callable(getattr(m, "make_mask", None))]
    if not attentions:
        raise ModelError(
            f"{type(module).__name__} has no attention that context parallelism can reach: its attention modules need "
            "an attribute `attend(q, k, v, mask, dropout)`, and what makes their masks an attribute `make_mask`; "
            "or set strategy.layout.cp: 1"
        )
    for name, attention in attentions.items():
        try:
            way.check(_local_heads(attention), getattr(attention, "dropout", 0.0))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
    for attention in attentions.values():
        _replace(attention, "attend", partial(_attend, way, attention.attend))
    for maker in makers:
        _replace(maker, "make_mask", partial(_make_mask, way, maker.make_mask))


def _replace(module: Any, name: str, function: Any) -> None:
    present = getattr(module, name)
    assert getattr(present, "func", None) not in (_attend, _make_mask), "context parallelism was applied before"
    setattr(module, name, function)


def _local_heads(attention: Any) -> int | None:
    """How many heads this rank has, where it can be told from the projection of the queries."""
    weight = getattr(getattr(attention, "q", None), "weight", None)
    head_dim = getattr(attention, "head_dim", None)
    if weight is None or head_dim is None:
        return None
    return int(to_local(weight.detach()).shape[0]) // int(head_dim)


def _attend(way: Way, inner: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0) -> Tensor:
    return way.attend(q, k, v, mask, dropout, scale=None, inner=inner)


def _make_mask(way: Way, make: Any, document_ids: Tensor | None, **how: Any) -> Any:
    return None if document_ids is None else way.mask(document_ids, partial(make, **how))


def _ask_for_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call without positions: a rank would count its tokens from 0, and train on wrong ones."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or len(args) > 2:
        return
    if kwargs.get("positions") is None and kwargs.get("position_ids") is None:
        raise ModelError(
            f"{type(module).__name__} has rows that are spread over ranks, but was called without positions; "
            "call it with what `split_batch` gives"
        )
