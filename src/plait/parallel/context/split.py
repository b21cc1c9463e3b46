"""Which tokens of a row belong to which rank, and the cutting of batches.

[Note: balanced causal attention]
Late tokens attend to more than early ones. A row is therefore cut into twice as many chunks as there are ranks,
and rank r of n gets the chunks r and 2n - 1 - r: with four ranks

    rank      0  1  2  3  3  2  1  0
    chunk     0  1  2  3  4  5  6  7

so every rank has the same number of pairs of query and key. Ulysses gives every rank whole rows of some heads,
which is balanced anyway; there rank r has simply the r-th of n pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.errors import ModelError

Kind = Literal["ring", "ulysses", "allgather"]
"""How the ranks exchange what attention needs: see `apply_context_parallel`."""

KINDS: tuple[Kind, ...] = ("ring", "ulysses", "allgather")

_ALONG: Mapping[str, int] = MappingProxyType(
    {
        "input_ids": 0,
        "labels": -100,
        "positions": 0,
        "position_ids": 0,
        "document_ids": -1,
        "attention_mask": 0,
        "token_type_ids": 0,
    }
)
"""The inputs that run along the sequence, and what fills them up."""


def chunks_of(rank: int, size: int, kind: Kind) -> tuple[int, ...]:
    """The chunks of a row that a rank holds, in order; see [Note: balanced causal attention]."""
    return (rank,) if kind == "ulysses" or size == 1 else (rank, 2 * size - 1 - rank)


def chunk_count(size: int, kind: Kind) -> int:
    """How many chunks a row is cut into."""
    return size if kind == "ulysses" or size == 1 else 2 * size


def padded_length(tokens: int, size: int, kind: Kind) -> int:
    """The length of a row once it divides into chunks."""
    chunks = chunk_count(size, kind)
    return -(-tokens // chunks) * chunks


def cut(x: Tensor, rank: int, size: int, kind: Kind, *, dim: int = 1) -> Tensor:
    """A rank's part of a tensor whose `dim` runs along the sequence and divides."""
    chunks = x.chunk(chunk_count(size, kind), dim=dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, size, kind)], dim=dim)


def join(parts: Sequence[Tensor], kind: Kind, *, dim: int = 1) -> Tensor:
    """The whole tensor, in the order of the sequence, from the parts of all ranks: undoes `cut`."""
    size = len(parts)
    chunks: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        mine = chunks_of(rank, size, kind)
        chunks.update(zip(mine, part.chunk(len(mine), dim=dim), strict=True))
    return torch.cat([chunks[i] for i in range(len(chunks))], dim=dim)


def split_batch(
    inputs: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    kind: Kind = "ring",
    positions_as: str = "positions",
    real_as: str | None = None,
) -> dict[str, Any]:
    """A rank's part of a batch of token rows: the inputs of a model for `apply_context_parallel` of this kind.

    `input_ids`, `labels`, `positions`, `position_ids`, `document_ids`, `token_type_ids` and a 2-D `attention_mask`
    are cut along the sequence; everything else stays as it is. Labels have to be shifted already (as Plait's
    data has them): the neighbour of a token may be on another rank.

    Positions are always explicit in the result, since a rank cannot count them itself. Where the batch has
    none, they are 0, 1, 2, … of the whole row, under the name `positions_as` ("position_ids" for a bare
    `transformers` model).

    A row that does not divide into chunks is filled up at its end: with token 0, label -100, position 0, document
    -1. No real token attends to what comes after it, and no loss is taken there, so the sum of the loss, its
    count and all gradients are those of the row as it was. A model that counts tokens is told which ones are real,
    under the name `real_as`.
    """
    rows = _rows(inputs)
    tokens = rows.shape[1]
    whole = dict(inputs)
    if all(whole.get(name) is None for name in ("positions", "position_ids")):
        whole[positions_as] = torch.arange(tokens, device=rows.device)[None]
    missing = padded_length(tokens, size, kind) - tokens
    for name, filler in _ALONG.items():
        x = whole.get(name)
        if x is None:
            continue
        _check_runs_along(name, x, tokens)
        whole[name] = cut(F.pad(x, (0, missing), value=filler) if missing else x, rank, size, kind)
    if missing and real_as is not None:
        real = torch.arange(tokens + missing, device=rows.device) < tokens
        whole[real_as] = cut(real.expand(len(rows), -1), rank, size, kind)
    return whole


def _rows(inputs: Mapping[str, Any]) -> Tensor:
    rows = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(rows, Tensor) or rows.ndim != 2:
        found = f"those of {', '.join(inputs)}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise ModelError(
            "context parallelism cuts rows of tokens, so a batch has to be a mapping with `input_ids` of shape "
            f"(batch, tokens), not {found}; set strategy.layout.cp: 1 for other data"
        )
    return rows


def _check_runs_along(name: str, x: object, tokens: int) -> None:
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != tokens:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ModelError(
            f"{name} has to be of shape (batch, tokens={tokens}) to be cut along the sequence, not {found}"
            + ("; give document_ids instead of a mask of pairs" if name == "attention_mask" else "")
        )
