"""Attention over rows that are spread over ranks, for a model that knows nothing of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from plait.errors import ConfigError, ModelError, Problem
from plait.parallel.context.hf import apply_to_transformers
from plait.parallel.context.line import Line
from plait.parallel.context.split import KINDS, Kind
from plait.parallel.context.ways import Attend, Way, make_way
from plait.parallel.hf import is_transformers_model
from plait.world import local_part


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
    line = Line.of(where)
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
    return int(local_part(weight.detach()).shape[0]) // int(head_dim)


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
