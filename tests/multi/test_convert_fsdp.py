"""A checkpoint that FSDP wrote, in chunks from several ranks, is read whole by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.checkpoint.convert.detect import open_source
from tests.multi.ranks import RankPool


def train_and_save(rank: int, size: int, folder: str, seed: int, flat: bool) -> dict[str, Tensor]:
    """Two steps under `fully_shard` and a checkpoint by torch; returns the whole state under Plait's names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optim: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(model), "optim": optim}, checkpoint_id=folder)

    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    found = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"optim.{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_chunks_of_all_ranks_are_put_together(
    request: pytest.FixtureRequest, tmp_path: Path, ranks: str, flat: bool
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    print(f"seed {seed}")
    expected = pool.run(train_and_save, str(tmp_path / "dcp"), seed, flat)[0]
    with open_source(tmp_path / "dcp") as source:
        assert source.kind == "dcp"
        assert int(source.facts["files"]) > 1
        assert source.state["engine"]["steps"] == 2
        assert source.entries.keys() == expected.keys()
        for name, tensor in expected.items():
            if "running" not in name:  # those differ by rank, and one of them is saved
                assert torch.equal(source.read(name), tensor), name
