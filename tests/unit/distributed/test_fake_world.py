"""One process plays any rank of any world, with tensors that have no values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.refusals import refused

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.errors import WorldError
from plait.torch_internals import has_values

MODEL = {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "seq_len": 16}


def config_of(**strategy: object) -> RunConfig:
    return parse_sections(model=MODEL, strategy=strategy, optim={"type": "AdamW"}).config


LAYOUT = config_of(layout={"pp": 2, "dp_shard": 4, "tp": 2})


@pytest.mark.parametrize("rank", [0, 1, 6, 15])
def test_a_rank_knows_its_place(rank: int) -> None:
    with fake_world(LAYOUT, rank=rank, size=16, per_host=8) as world:
        assert (world.rank, world.size, world.ranks.local_rank, world.ranks.local_size) == (rank, 16, rank % 8, 8)
        assert [world.coordinate(axis) for axis in ("pp", "dp_shard", "tp")] == [rank // 8, rank // 2 % 4, rank % 2]
        assert world.mesh is not None
        assert world.mesh.mesh.numel() == 16
        group = world.group("dp_shard")
        assert group is not None
        assert dist.get_process_group_ranks(group) == [8 * (rank // 8) + 2 * i + rank % 2 for i in range(4)]


@pytest.mark.parametrize("size", [2, 64, 1024])
def test_a_rank_holds_its_share_of_what_is_sharded(size: int) -> None:
    config = config_of(zero=3)
    with fake_world(config, rank=size - 1, size=size) as world:
        engine = prepare_native(Preparation(config, world))
        ids = torch.zeros(1, 16, dtype=torch.int64)
        engine.train_step([{"input_ids": ids, "labels": ids}])
        for param in engine.model.parameters():
            rows, local = param.shape[0], param._local_tensor
            share = -(-rows // size)
            assert local.shape[0] == max(0, min(rows, size * share) - (size - 1) * share)
            assert not has_values(local)


def test_a_world_of_one_has_no_process_group() -> None:
    with fake_world(config_of()) as world:
        assert world.mesh is None
        assert not dist.is_initialized()


def test_whoever_asks_a_tensor_for_its_value_gets_one() -> None:
    with fake_world(config_of()):
        assert torch.zeros(()).item() == 1.0
        assert bool(torch.zeros((), dtype=torch.bool))
        assert int(torch.full((), 9)) == 1


def test_what_is_built_on_meta_stays_there_until_it_is_given_storage() -> None:
    with fake_world(config_of()):
        with torch.device("meta"):
            layer = torch.nn.Linear(3, 5)
        assert layer.weight.is_meta
        layer.to_empty(device="cpu")
        assert layer.weight.device.type == "cpu"
        assert not has_values(layer.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_groups_have_a_shape_in_every_format(dtype: torch.dtype) -> None:
    def made() -> list[tuple[torch.Size, torch.dtype]]:
        rows = torch.randn(8, 16, dtype=dtype, requires_grad=True)
        weight = torch.randn(3, 24, 16, dtype=dtype, requires_grad=True)
        answer = torch.nn.functional.grouped_mm(rows, weight.mT, offs=torch.tensor([1, 1, 8], dtype=torch.int32))
        answer.square().sum().backward()
        assert rows.grad is not None
        assert weight.grad is not None
        return [(tensor.shape, tensor.dtype) for tensor in (answer, rows.grad, weight.grad)]

    with fake_world(config_of()):
        without_values = made()
    assert without_values == made()


def test_a_second_rank_can_be_played_after_the_first() -> None:
    for rank in (3, 0):
        with fake_world(LAYOUT, rank=rank, size=16) as world:
            assert dist.get_rank() == world.rank == rank
        assert not dist.is_initialized()
        assert has_values(torch.zeros(1))


@pytest.fixture
def joined() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("joined")
def test_a_process_that_has_joined_a_real_world_is_refused() -> None:
    with refused(WorldError, "fake"), fake_world(config_of(), size=2):
        pass
