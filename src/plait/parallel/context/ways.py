"""One object for each kind: what takes the place of a model's mask, and of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import ModelError
from plait.parallel.context.allgather import allgather_attention, visible
from plait.parallel.context.line import Line, gather_from_all
from plait.parallel.context.ring import ring_attention
from plait.parallel.context.split import Kind, join
from plait.parallel.context.ulysses import check_heads, ulysses_attention

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


def make_way(kind: Kind, line: Line) -> Way:
    """The way that `kind` names."""
    ways: dict[Kind, Callable[[Line], Way]] = {"ring": Ring, "ulysses": Ulysses, "allgather": AllGather}
    return ways[kind](line)


class Ring:
    """See [Note: the ring], ring.py. Its masks are the document ids of all ranks."""

    def __init__(self, line: Line) -> None:
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

    def __init__(self, line: Line) -> None:
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

    def __init__(self, line: Line) -> None:
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
