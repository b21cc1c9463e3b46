"""Rows are cut so that every rank has its share of the work, and nothing of the row is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.communication_volume import context_traffic
from tests.refusals import refused

from plait.distributed.context_parallel_attention import (
    CONTEXT_KINDS,
    ContextKind,
    padded_length,
    split,
    split_batch,
    unsplit,
)
from plait.errors import ModelError

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_joining_undoes_cutting(kind: ContextKind, size: int) -> None:
    x = torch.randn(2, 3, 4 * 2 * size, 5)
    parts = [split(x, rank, size, kind, dim=2) for rank in range(size)]
    assert all(part.shape == (2, 3, 8, 5) for part in parts)
    assert torch.equal(unsplit(parts, kind, dim=2), x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_every_rank_has_equally_many_pairs_of_query_and_key(kind: ContextKind, size: int) -> None:
    places = torch.arange(6 * size)[None]
    pairs = {int((split(places, rank, size, kind) + 1).sum()) for rank in range(size)}
    assert len(pairs) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_a_rank_without_positions_to_go_by_is_told_them(kind: ContextKind, size: int) -> None:
    ids = torch.arange(40 * size).view(2, -1)  # a token is its own place in the row
    for rank in range(size):
        mine = split_batch({"input_ids": ids}, rank, size, kind=kind)
        assert torch.equal(mine["positions"], mine["input_ids"][:1])
        named = split_batch({"input_ids": ids}, rank, size, kind=kind, positions_as="position_ids")
        assert torch.equal(named["position_ids"], mine["positions"])
        assert "positions" not in named


@pytest.mark.parametrize("name", ["positions", "position_ids"])
def test_positions_of_the_batch_are_kept(name: str) -> None:
    given = torch.randint(0, 9, (2, 12))
    mine = split_batch({"input_ids": torch.zeros(2, 12, dtype=torch.long), name: given}, 1, 2)
    assert torch.equal(mine[name], given[:, 3:9])
    assert mine.keys() == {"input_ids", name}


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_a_row_that_does_not_divide_is_filled_up_with_what_counts_for_nothing(kind: ContextKind) -> None:
    tokens, size = 13, 4
    batch: dict[str, Any] = {
        "input_ids": torch.randint(1, 9, (2, tokens)),
        "labels": torch.randint(1, 9, (2, tokens)),
        "positions": torch.randint(1, 9, (2, tokens)),
        "document_ids": torch.randint(1, 9, (2, tokens)),
        "attention_mask": torch.ones(2, tokens, dtype=torch.long),
    }
    parts = [split_batch(batch, rank, size, kind=kind) for rank in range(size)]
    assert padded_length(tokens, size, kind) == 16
    for name, filler in (
        ("input_ids", 0),
        ("labels", -100),
        ("positions", 0),
        ("document_ids", -1),
        ("attention_mask", 0),
    ):
        whole = unsplit([part[name] for part in parts], kind)
        assert torch.equal(whole[:, :tokens], batch[name])
        assert bool((whole[:, tokens:] == filler).all())


def test_what_does_not_run_along_the_sequence_stays_as_it_is() -> None:
    other = torch.randn(2, 12)
    mine = split_batch({"input_ids": torch.zeros(2, 12, dtype=torch.long), "temperature": other, "note": "x"}, 0, 2)
    assert mine["temperature"] is other
    assert mine["note"] == "x"


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.zeros(2, 8),), ["tuple", "`input_ids`", "strategy.layout.cp: 1"]),
        ({"image": torch.zeros(2, 3, 8, 8)}, ["image", "`input_ids`", "strategy.layout.cp: 1"]),
        (
            {"input_ids": torch.zeros(2, 8), "labels": torch.zeros(2)},
            ["labels", "tokens=8", "(2,)"],
        ),
        (
            {"input_ids": torch.zeros(2, 8), "attention_mask": torch.ones(2, 1, 8, 8)},
            ["attention_mask", "(2, 1, 8, 8)", "document_ids"],
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, named: list[str]) -> None:
    with refused(ModelError, *named):
        split_batch(batch, 0, 2)


def test_what_is_sent_grows_as_theory_says() -> None:
    sizes = {"batch": 1, "tokens": 2**17, "heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 32, "element_size": 2}
    ring = {size: context_traffic("ring", size=size, **sizes) for size in (8, 64, 1024)}
    for traffic in ring.values():
        # However many ranks: less than all keys and values once forward, three times as much backward.
        assert 0.85 < traffic.forward / (32 * 2 * 2**17 * 8 * 128 * 2) < 1
        assert traffic.backward == 3 * traffic.forward
    ulysses = {size: context_traffic("ulysses", size=size, **sizes).forward for size in (2, 4, 8)}
    assert ulysses[2] / ulysses[4] == pytest.approx(4 / 3)
    assert ulysses[8] < ring[8].forward
    assert context_traffic("ring", size=1, **sizes) == (0, 0)
