from __future__ import annotations

import pytest
import torch
from tests.communication_volume import tensor_traffic
from tests.refusals import refused
from torch import nn

from plait.config.model import GptConfig
from plait.distributed.tensor_parallel import check_sequence, reason_not_async
from plait.distributed.tensor_parallel_styles import RankRng, chunk_of, draws_random, kv_heads_of
from plait.errors import ModelError
from plait.models.common.vocab_parallel_cross_entropy import logit_grads, row_statistics


@pytest.mark.parametrize("length", [1, 7, 8, 61])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_those_of_torch_chunk(length: int, size: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(size)]
    parts = [chunk_of(length, size, rank) for rank in range(size)]
    assert [list(range(start, start + count)) for start, count in parts if count] == chunks
    assert sum(count for _, count in parts) == length


@pytest.mark.parametrize(
    ("queries", "heads", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 1, 8), (12, 6, 4), (12, 4, 3)]
)
def test_each_query_finds_its_own_keys_on_its_rank(queries: int, heads: int, size: int) -> None:
    for rank in range(size):
        mine = kv_heads_of(rank, size, queries=queries, heads=heads)
        count = queries // size
        assert count % len(mine) == 0
        paired = [mine[query // (count // len(mine))] for query in range(count)]
        assert paired == [(rank * count + query) // (queries // heads) for query in range(count)]


def test_keys_are_computed_twice_only_where_queries_do_not_fall_evenly() -> None:
    assert kv_heads_of(1, 4, queries=8, heads=2) == [0]
    assert kv_heads_of(1, 2, queries=8, heads=4) == [2, 3]
    assert kv_heads_of(0, 4, queries=12, heads=6) == [0, 0, 1]


def test_random_numbers_of_ones_own_leave_the_common_ones_in_step() -> None:
    def draw(rank: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(4)
        own, common = [], []
        for count in (1 + rank, 2 + 3 * rank):
            with RankRng(rank).fork(torch.device("cpu")):
                own.append(float(torch.rand(count)[0]))
            common.append(float(torch.rand(())))
        return own, common

    (one, common_one), (other, common_other) = draw(0), draw(1)
    assert common_one == common_other
    assert len({*one, *other, *common_one}) == 6
    assert draw(1) == (other, common_other)


def test_the_common_numbers_go_on_after_an_error() -> None:
    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError), RankRng(1).fork(torch.device("cpu")):
        raise ZeroDivisionError
    after = torch.rand(())
    torch.manual_seed(4)
    with RankRng(1).fork(torch.device("cpu")):
        torch.rand(5)
    assert torch.equal(torch.rand(()), after)


def test_dropout_is_found_in_layers_and_in_settings() -> None:
    from plait.models.gpt import GptBlock

    assert draws_random(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not draws_random(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert draws_random(GptBlock(GptConfig(dim=8, heads=2, dropout=0.1)).attention)
    assert not draws_random(GptBlock(GptConfig(dim=8, heads=2)))


def test_a_sequence_length_is_checked_before_a_run() -> None:
    check_sequence(12, 4)
    with refused(ModelError, "4 ranks", "13", "16", "12", "strategy.tensor.sequence_parallel: false"):
        check_sequence(13, 4)


def test_async_is_refused_with_the_reason() -> None:
    assert "cpu" in (reason_not_async("cpu", sequence=True) or "")
    assert "sequence" in (reason_not_async("cuda", sequence=False) or "")


def test_splitting_the_sequence_sends_no_more_for_the_layers() -> None:
    sizes = {"tokens": 64, "dim": 32, "layers": 5, "itemsize": 2, "vocabulary": False}
    whole, split = (tensor_traffic(sequence=sequence, **sizes) for sequence in (False, True))  # type: ignore[arg-type]
    assert split.sent(4) - 2 * 64 * 32 * 2 * 3 / 4 == whole.sent(4) == 5 * 4 * 2 * 64 * 32 * 2 * 3 / 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [5, 1000, 20001])
def test_the_kernels_agree_with_their_plain_twins(dtype: torch.dtype, columns: int) -> None:
    from plait.kernels.cross_entropy import logit_grads_triton, row_statistics_triton

    logits = (3 * torch.randn(17, columns, device="cuda")).to(dtype)
    place = torch.randint(-1, columns, (17,), device="cuda")
    expected = row_statistics(logits, place)
    found = row_statistics_triton(logits, place)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    log_total = expected[0] + expected[1].log() + 0.5
    slopes = logit_grads(logits, place, log_total)
    torch.testing.assert_close(logit_grads_triton(logits, place, log_total), slopes, rtol=1e-2, atol=1e-5)
