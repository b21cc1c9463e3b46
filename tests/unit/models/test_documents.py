"""Masks of packed rows in blocks: every allowed place lies in a block that is looked at."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from plait.models.common.attention import BLOCK, document_blocks, document_mask, packing_mask


def packed(batch: int, tokens: int, longest: int) -> Tensor:
    """Documents one after another, of any length from 1."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    for row in ids:
        at, number = 0, random.randrange(5)
        while at < tokens:
            length = random.randint(1, longest)
            row[at : at + length] = number
            at, number = at + length, number + 1
    return ids


def by_torch(ids: Tensor) -> BlockMask:
    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[batch, query] == ids[batch, key])

    return create_block_mask(allowed, ids.shape[0], None, ids.shape[1], ids.shape[1], device="cpu")


def listed(counts: Tensor, which: Tensor) -> Tensor:
    """Which blocks a list names, as (batch, rows, columns)."""
    found = torch.zeros(which.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, counts.shape)):
        at = tuple(place.tolist())
        found[(*at, which[at][: counts[at]].long())] = True
    return found[:, 0]


@pytest.mark.parametrize("tokens", [1, 100, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 7])
@pytest.mark.parametrize("longest", [3, 200, 10_000])
def test_for_documents_one_after_another_the_blocks_are_those_of_torch(tokens: int, longest: int) -> None:
    ids = packed(3, tokens, longest)
    found, expected = document_blocks(ids), by_torch(ids)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    names += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    for name in names:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE


def test_ids_in_any_order_lose_nothing() -> None:
    tokens = 4 * BLOCK + 30
    ids = torch.randint(-1, 3, (2, tokens // 10)).repeat_interleave(10, dim=1)[:, :tokens]
    tokens = ids.shape[1]
    blocks, mask = document_blocks(ids), document_mask(ids)[:, 0]
    partly = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partly & full).any()

    def spread(chosen: Tensor) -> Tensor:
        return chosen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :tokens, :tokens]

    assert (spread(partly | full) | ~mask).all()
    assert (mask | ~spread(full)).all()


def test_attention_by_blocks_is_attention_by_places() -> None:
    ids = packed(2, BLOCK + 20, 60)
    q, k, v = (torch.randn(2, 2, BLOCK + 20, 16) for _ in range(3))
    found = flex_attention(q, k, v, block_mask=document_blocks(ids))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(ids))
    torch.testing.assert_close(found, expected)


def test_on_a_cpu_the_mask_is_a_tensor() -> None:
    assert isinstance(packing_mask(packed(1, 8, 4), head_dim=16), Tensor)
    assert packing_mask(None, head_dim=16) is None
