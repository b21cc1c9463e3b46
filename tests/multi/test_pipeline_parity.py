"""A pipeline does what one process does: losses, gradients, and parameters after three steps."""

from __future__ import annotations

import pytest
import torch

from plait.distributed.pipeline_schedule import SCHEDULES
from tests.multi.pipelines import Way, assert_near, assert_parity, train_alone, train_pipeline
from tests.multi.ranks import RankPool


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_two_ranks(two_ranks: RankPool, schedule: str) -> None:
    assert_parity(two_ranks, "llama", 4, Way(schedule))


@pytest.mark.parametrize(
    "name", ["llama-tied", "gpt", "hf-llama", "hf-gpt2", "bare-gpt2", "hf-mixtral", "hf-qwen3", "pairs"]
)
def test_every_kind_of_model(two_ranks: RankPool, name: str) -> None:
    assert_parity(two_ranks, name, 3, Way("1f1b"))


@pytest.mark.parametrize("name", ["llama-tied", "hf-gpt2", "pairs", "layers"])
def test_first_and_last_stage_on_one_rank(two_ranks: RankPool, name: str) -> None:
    assert_parity(two_ranks, name, 4, Way("zbv"))


def test_layers_that_share_by_key_over_four_ranks(four_ranks: RankPool) -> None:
    found = assert_parity(four_ranks, "layers", 4, Way("1f1b"))
    copies = [trace.extra["copies"] for trace in found if trace.extra["copies"]]
    owned = {name: tensor for trace in found for name, tensor in trace.weights.items()}
    assert len(copies) == 2
    for name, tensor in (item for held in copies for item in held.items()):
        assert torch.equal(tensor, owned[name])


def test_interleaved_over_four_ranks(four_ranks: RankPool) -> None:
    assert_parity(four_ranks, "llama-8", 8, Way("interleaved_1f1b", virtual=2))


@pytest.mark.parametrize("reshard", [False, True], ids=["whole", "resharded"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zb", "dualpipev"])
def test_sharded_stages(four_ranks: RankPool, schedule: str, reshard: bool) -> None:
    assert_parity(four_ranks, "llama-tied", 8, Way(schedule, replicas=2, reshard=reshard))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_sharded_stages_of_a_transformers_model(four_ranks: RankPool, schedule: str) -> None:
    assert_parity(four_ranks, "hf-gpt2", 8, Way(schedule, replicas=2, reshard=True))


def test_replicas_whose_micro_batches_differ_in_size(four_ranks: RankPool) -> None:
    assert_parity(four_ranks, "llama", 8, Way("1f1b", (2, 2, 2, 1, 2, 3, 2, 2), replicas=2, reshard=True))


def test_alexnet_with_a_batch_of_256_in_micro_batches_of_8(two_ranks: RankPool) -> None:
    found = assert_parity(two_ranks, "alexnet", 32, Way("1f1b", (8,)))
    assert all(trace.weights for trace in found)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("name", ["llama", "pairs"])
def test_micro_batches_of_different_sizes(two_ranks: RankPool, schedule: str, name: str) -> None:
    assert_parity(two_ranks, name, 5, Way(schedule, (3, 1, 2)))


@pytest.mark.parametrize(
    "way",
    [
        Way("1f1b", recompute=True),
        Way("zbv", recompute=True),
        Way("zbv", recompute=True, splits_backward=False),
        Way("1f1b", compiled=True),
        Way("dualpipev", compiled=True),
        Way("1f1b", split=["blocks.3"]),
        Way("zbv", split=["1", "2", "3"]),
    ],
    ids=["recompute", "recompute-halves", "recompute-whole", "compiled", "compiled-whole", "named", "named-zbv"],
)
def test_blocks_that_are_changed_or_cut_otherwise(two_ranks: RankPool, way: Way) -> None:
    assert_parity(two_ranks, "llama", 4, way)


def test_bf16(two_ranks: RankPool) -> None:
    assert_parity(two_ranks, "llama", 4, Way("zbv", dtype=torch.bfloat16), tolerance=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_that_are_tensor_parallel_inside(four_ranks: RankPool, schedule: str) -> None:
    assert_parity(four_ranks, "llama", 4, Way(schedule, replicas=2, tensor_parallel=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_zb"])
def test_hooks_on_accumulation_see_every_gradient(two_ranks: RankPool, schedule: str) -> None:
    found = two_ranks.run(train_pipeline, "llama", 4, Way(schedule, steps=1, through_hooks=True))
    collected = {name: gradient for trace in found for name, gradient in trace.extra["collected"].items()}
    expected = train_alone("llama", 4, steps=1).gradients
    assert collected.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(name, collected[name], gradient, 1e-5)
