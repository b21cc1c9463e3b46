"""Of stacks a rank computes only its region, with the values of the full tensor."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from plait.distributed import stacks
from plait.distributed.stacks import StackShard, WholeStackError, blocks, fill_shards

CPU = torch.device("cpu")


def initialize(up: Tensor, down: Tensor, bias: Tensor) -> None:
    """As models do it: some values are overwritten, others scaled."""
    nn.init.normal_(up, std=0.02)
    nn.init.uniform_(down, -0.5, 0.5)
    nn.init.normal_(bias)
    up.data.normal_(1.0, 0.5).mul_(0.1)
    down.data.add_(1.0)
    nn.init.zeros_(bias)


@pytest.mark.parametrize("block", [1, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_has_the_values_of_the_full_tensor(
    block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "BLOCK", block)
    count, width = random.randrange(3, 9), random.randrange(3, 7)
    up, down = torch.empty(count, width, 3, dtype=dtype), torch.empty(count, 3, width, dtype=dtype)
    seed, bias = random.randrange(2**31), torch.empty(count)
    torch.manual_seed(seed)
    initialize(up, down, bias)
    after = torch.rand(1)

    first, last = sorted(random.sample(range(count + 1), 2))
    region = (slice(first, last), slice(1, 3), slice(0, 3))
    shards = [
        StackShard(nn.Parameter(tensor), region, dtype, CPU)
        for tensor in (torch.empty_like(up), torch.empty_like(down))
    ]
    torch.manual_seed(seed)
    with torch.no_grad(), fill_shards(shards):
        initialize(*(nn.Parameter(shard.stand_in) for shard in shards), bias)
    assert torch.equal(shards[0].local, up[region])
    assert torch.equal(shards[1].local, down[region])
    assert torch.equal(torch.rand(1), after), "what is drawn next has changed"


def test_blocks_cover_all_rows_and_are_drawn_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "BLOCK", 64)
    ranges = list(blocks(torch.Size((21, 4, 2))))
    assert [row for rows in ranges for row in rows] == list(range(21))
    assert {len(rows) * 8 for rows in ranges[:-1]} == {64}
    assert len(ranges[-1]) * 8 >= 16


@pytest.mark.parametrize(
    "write",
    [lambda stack: stack[0].normal_(), lambda stack: stack.copy_(torch.ones(4, 2, 2)), lambda stack: stack.sum()],
    ids=["by slices", "from a tensor", "reads"],
)
def test_what_is_impossible_with_a_part_says_so(write: object) -> None:
    shard = StackShard(nn.Parameter(torch.empty(4, 2, 2)), (slice(0, 1), slice(0, 2), slice(0, 2)), torch.float32, CPU)
    with pytest.raises(WholeStackError), torch.no_grad(), fill_shards([shard]):
        write(shard.stand_in)  # type: ignore[operator]
