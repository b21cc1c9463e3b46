"""Which rank has which experts, over ranks that see different tokens and ranks that see the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.refusals import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.config import parse_sections
from plait.distributed import to_local
from plait.distributed.expert_parallel import ExpertPlacement
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.engine.native import NativeEngine
from plait.errors import ConfigError

MODEL = {"type": "moe", "vocab_size": 32, "dim": 16, "layers": 1, "heads": 4, "experts": 4, "expert_dim": 8}
ATTENTION = {"blocks.*": "block", "blocks.*.attention_norm": "sequence", "blocks.*.ffn_norm": "sequence"}
ATTENTION |= {f"blocks.*.attention{part}": word for part, word in {"": "region", ".out": "rowwise"}.items()}
ATTENTION |= {
    f"blocks.*.attention.{part}": word for part, word in zip("qkv", ("heads", *["kv_heads"] * 2), strict=True)
}


@contextmanager
def placement_of(rank: int, ep: int, tp: int, experts: int) -> Iterator[ExpertPlacement]:
    dist.init_process_group("fake", rank=rank, world_size=ep * tp, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield ExpertPlacement.on(init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp")), experts)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_each_choice_is_taken_by_one_of_the_ranks_that_see_it_and_goes_to_the_rank_of_its_expert(
    ep: int, tp: int
) -> None:
    experts = ep * random.randrange(1, 7)
    index = torch.cat([torch.arange(experts), torch.randint(experts, (20,))])
    held: list[int] = []
    taken = torch.zeros_like(index)
    for rank in range(ep * tp):
        with placement_of(rank, ep, tp, experts) as placement:
            held += range(experts)[placement.local_experts()]
            chosen, none = placement.local_choices(index), ep * placement.experts_per_rank
            taken += chosen < none
            for expert, number in zip(index.tolist(), chosen.tolist(), strict=True):
                if number < none:
                    there, place = divmod(number, placement.experts_per_rank)
                    assert expert == (there * tp + rank % tp) * placement.experts_per_rank + place
            assert placement.local_choices(torch.tensor(experts)) == none  # a choice that was dropped stays so
    assert held == list(range(experts))
    assert taken.eq(ep).all()  # once on each rank of ep, which stand for tokens of their own


def shapes(strategy: dict[str, Any], *, size: int, **sizes: Any) -> set[tuple[int, ...]]:
    """Of what one rank has of the experts' stacks."""
    config = parse_sections(model={**MODEL, **sizes}, strategy=strategy).config
    with fake_world(config, size=size) as world:
        engine = prepare_native(Preparation(config, world))
        assert isinstance(engine, NativeEngine)
        stacks = {name: param for name, param in engine.model.named_parameters() if ".experts." in name}
        with torch.no_grad():
            return {tuple(to_local(param).shape) for param in stacks.values()}


def test_a_rank_has_its_share_of_the_experts_along_both_axes() -> None:
    assert shapes({"layout": {"tp": 2}}, size=2) == {(2, 8, 16), (2, 16, 8)}
    assert shapes({"layout": {"tp": 2, "ep": 2}}, size=4) == {(1, 8, 16), (1, 16, 8)}
    assert shapes({"layout": {"tp": 2, "dp_shard": 2}, "zero": 3}, size=4) == {(2, 4, 16), (2, 8, 8)}


def test_experts_that_a_plan_keeps_whole_stay_whole() -> None:
    plan = {**ATTENTION, "blocks.*.ffn": "replicate"}
    assert shapes({"layout": {"tp": 2}, "tensor": {"plan": plan}}, size=2) == {(4, 8, 16), (4, 16, 8)}
    assert shapes({"layout": {"tp": 2, "ep": 2}, "tensor": {"plan": plan}}, size=4) == {(2, 8, 16), (2, 16, 8)}


def test_a_plan_that_would_give_each_rank_other_tokens_for_shared_experts_is_refused() -> None:
    tensor = {"plan": ATTENTION, "sequence_parallel": True}
    with refused(ConfigError, "'blocks.0.ffn.experts'", "`whole_sequence`", key="strategy.tensor.plan"):
        shapes({"layout": {"tp": 2}, "tensor": tensor}, size=2)


def test_uneven_experts_that_cannot_be_sharded_further_are_refused_with_what_can() -> None:
    strategy = {"layout": {"tp": 2, "dp_shard": 3}, "zero": 3}
    with refused(ConfigError, "3 experts", "2 ranks", "(8, 16)", "model.expert_dim", key="strategy.layout.dp_shard"):
        shapes(strategy, size=6, experts=3)
    assert shapes(strategy, size=6, experts=3, expert_dim=9) == {(2, 3, 16), (2, 16, 3)}


def test_ranks_that_would_have_no_experts_to_shard_are_refused_with_how_many_can() -> None:
    strategy = {"layout": {"tp": 2, "ep": 2}, "zero": 3}
    with refused(ConfigError, "6 experts", "4 ranks", "1, 2 or 3", "zero: 0", key="strategy.layout.tp"):
        shapes(strategy, size=4, experts=6)
    assert shapes({**strategy, "zero": 0}, size=4, experts=6) == {(2, 8, 16), (2, 16, 8)}
