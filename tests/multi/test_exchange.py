"""Pieces that ranks send one another directly are those that gloo's own collectives deliver."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plait.distributed.fsdp import use_point_to_point_collectives
from tests.multi.ranks import RankPool

STEPS, BACKWARDS = 3, 2


def twins(rank: int, size: int, param_dtype: torch.dtype | None, keep: bool) -> None:
    """Two equal models, one of them by direct exchange: the same parameters and gradients at every step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    # 7 rows on any number of ranks: filled up, and more of them on some.
    ours: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3))
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        for part in (model[0], model[4], model):
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=not keep,
                mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
            )
        for part in (model[0], model[4], model):
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    use_point_to_point_collectives([part for part in ours.modules() if isinstance(part, FSDPModule)], mesh, keep=keep)
    torch.manual_seed(100 + rank)
    for _ in range(STEPS):
        for _ in range(BACKWARDS):
            batch = torch.randn(4, 5, dtype=param_dtype)
            outputs = [model(batch) for model in (ours, theirs)]
            assert torch.equal(*outputs)
            for output in outputs:
                output.float().square().mean().backward()
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            torch.testing.assert_close(mine.grad.to_local(), its.grad.to_local())
            with torch.no_grad():
                mine.to_local().sub_(its.grad.to_local())
                its.to_local().sub_(its.grad.to_local())
            mine.grad = its.grad = None


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keep", [False, True], ids=["memory-taken-anew", "memory-kept"])
def test_direct_exchange_delivers_what_gloo_does(
    four_ranks: RankPool, param_dtype: torch.dtype | None, keep: bool
) -> None:
    four_ranks.run(twins, param_dtype, keep)
