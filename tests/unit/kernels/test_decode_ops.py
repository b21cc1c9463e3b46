"""Kernels of single tokens, by their twins and, where Triton's interpreter runs, themselves; against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from plait.kernels.decode.attention import attend_cached
from plait.kernels.decode.dependent_launch import LINE, Prefetch
from plait.kernels.decode.embed_sample import RowPositions, embed, greedy_head
from plait.kernels.decode.sampling import greedy, logprob_of
from plait.kernels.decode.skinny_gemm import (
    CONFIGS,
    GemmConfig,
    Norm,
    ResidualStream,
    add,
    gated,
    make_counters,
    prefetch_of,
    project,
)
from plait.kernels.decode.tokens import TokenRecords, record_tokens, record_tokens_plain
from plait.kernels.triton import interprets

NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# numpy, which plays kernels, has no bf16 to multiply with.
SHORT = torch.float16 if interprets() else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, SHORT], ids=str)
EXACT = torch.float64


def near(ours: Tensor, exact: Tensor) -> bool:
    """Whether rounding explains the difference."""
    return bool((ours.to(EXACT) - exact).abs().max() <= NEAR[ours.dtype] * exact.abs().max().clamp(min=1.0))


def some_norm(width: int, dtype: torch.dtype) -> Norm:
    return Norm((1.0 + 0.2 * torch.randn(width)).to(dtype), 1e-5)


def wide(stream: ResidualStream) -> ResidualStream:
    """The same stream in float64, which carries nothing along."""
    return ResidualStream(stream.x.to(EXACT), Norm(stream.norm.weight.to(EXACT), stream.norm.eps))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (7, 1040), (33, 320), (70, 160), (130, 48)])
def test_a_stream_is_looked_up_read_and_added_to(dtype: torch.dtype, rows: int, width: int) -> None:
    counters = make_counters(torch.device("cpu"))
    embedding, tokens = torch.randn(40, width).to(dtype), torch.randint(40, (rows,))
    stream = embed(tokens, embedding, some_norm(width, dtype))
    assert torch.equal(stream.x, embedding[tokens])
    for early in random.sample((True, False), 2):  # a second time, with what the first has left in the counters
        features = [random.randint(1, 50) for _ in range(random.randint(1, 3))]
        weights = [(torch.randn(each, width) / width**0.5).to(dtype) for each in features]
        exact = [weight.to(EXACT) for weight in weights]
        assert near(project(stream, weights, counters, early=early), project(wide(stream), exact, counters))
        assert near(gated(stream, weights[0], -weights[0], early=early), gated(wide(stream), exact[0], -exact[0]))
        hidden = random.choice((24, 256, 1500))
        y, weight = torch.randn(rows, hidden).to(dtype), (torch.randn(width, hidden) / hidden**0.5).to(dtype)
        after = add(stream, y, weight, some_norm(width, dtype), counters, early=early)
        expected = add(wide(stream), y.to(EXACT), weight.to(EXACT), after.norm, counters)
        assert near(after.x, expected.x)
        assert not counters.any()
        stream = after


def test_every_form_has_tiles_for_every_number_of_rows() -> None:
    assert set(CONFIGS) == {(form, rows) for form in ("project", "add", "gated", "wide") for rows in (16, 32, 64, 128)}


@DTYPES
@pytest.mark.parametrize(("rows", "kv_heads", "group", "width"), [(1, 1, 3, 32), (4, 2, 4, 16), (2, 3, 1, 64)])
def test_each_row_sees_all_before_its_place_and_its_own_token(
    dtype: torch.dtype, rows: int, kv_heads: int, group: int, width: int
) -> None:
    slots, counters = 192, make_counters(torch.device("cpu"))
    mixed = torch.randn(rows, (group + 2) * kv_heads * width).to(dtype)
    keys, values = (torch.randn(rows, kv_heads, slots, width).to(dtype) for _ in range(2))
    places, angles = torch.randint(1, slots, (rows,)), torch.randn(slots, width // 2)
    places[0] = random.choice((0, 1, 63, 64, 65, slots - 1))
    for row, place in enumerate(places.tolist()):  # what lies behind must not matter
        keys[row, :, place:], values[row, :, place:] = torch.inf, torch.nan
    exact = [each.clone().to(EXACT) for each in (keys, values)]
    for row, place in enumerate(places.tolist()):
        for each in exact:
            each[row, :, place:] = 0.0
    table = angles.cos(), angles.sin()
    for each in (keys, values) if not interprets() else ():  # the twin's mask cannot hide what is no number
        each.nan_to_num_(0.0, 0.0, 0.0)
    found = attend_cached(mixed, *table, keys, values, places, counters, early=random.random() < 0.5)
    wanted = attend_cached(mixed.to(EXACT), *(each.to(EXACT) for each in table), *exact, places, counters)
    assert near(found, wanted)
    number = torch.arange(rows)
    for ours, theirs in zip((keys, values), exact, strict=True):
        assert near(ours[number, :, places], theirs[number, :, places])
    assert not counters.any()


@DTYPES
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's words, in the interpreter
def test_the_first_of_the_likeliest_tokens_is_chosen(dtype: torch.dtype) -> None:
    logits = (3.0 * torch.randn(6, 9001)).to(dtype)
    logits[0, :5000] = -torch.inf
    logits[1, 17] = logits[1, 8999] = 20.0
    logits[2] = torch.nan
    token, logprob = greedy(logits)
    expected = logits.to(EXACT).log_softmax(-1)
    assert token[1] == 17
    assert 0 <= token[2] < 9001
    assert logprob[2].isnan()
    rows = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(logits[rows, token[rows]], logits[rows].max(1).values)
    torch.testing.assert_close(logprob[rows], expected[rows, token[rows]].float(), rtol=1e-5, atol=1e-5)
    other = torch.randint(5000, 9001, (6,))
    found = logprob_of(logits, other)
    assert found[2].isnan()
    torch.testing.assert_close(found[rows], expected[rows, other[rows]].float(), rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_a_row_that_is_full_stays_at_its_last_place(dtype: torch.dtype, rows: int) -> None:
    lengths, last = torch.randint(1, 9, (rows,)), torch.full((rows,), 6)
    at, embedding = RowPositions(lengths.clone(), last, torch.zeros_like(lengths)), torch.randn(9, 24).to(dtype)
    for step in range(5):
        tokens = torch.randint(9, (rows,))
        stream = embed(tokens, embedding, some_norm(24, dtype), at=at)
        assert torch.equal(stream.x, embedding[tokens])
        assert torch.equal(at.positions, (lengths + step).clamp(max=6))
        assert torch.equal(at.lengths, lengths + step + 1)


@DTYPES
@pytest.mark.parametrize(("rows", "carried"), [(1, True), (7, False), (33, True), (130, True)])
def test_the_likeliest_token_is_found_without_logits(
    dtype: torch.dtype, rows: int, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.kernels.decode.embed_sample.WIDE", 1)
    monkeypatch.setattr("plait.kernels.decode.skinny_gemm.WIDE", 1)
    vocabulary, width, counters = random.randint(500, 700), 80, make_counters(torch.device("cpu"))
    head = torch.randn(vocabulary, width).to(dtype)
    head[random.randrange(vocabulary)] = head[7]  # of two that are alike, the first is chosen
    stream = embed(torch.randint(40, (rows,)), torch.randn(40, width).to(dtype), some_norm(width, dtype))
    stream = stream if carried else ResidualStream(stream.x, stream.norm)
    token, logprob = greedy_head(stream, head, counters)
    expected = greedy(project(stream, [head], counters))
    assert torch.equal(token, expected[0])
    torch.testing.assert_close(logprob, expected[1], rtol=1e-5, atol=1e-5)


def test_tokens_are_noted_until_a_row_is_done() -> None:
    rows, width = random.randint(1, 300), 6
    stops = torch.tensor(random.choice(([], [3], [0, 5])), dtype=torch.int64)
    limits = torch.randint(1, width + 1, (rows,))

    def empty() -> TokenRecords:
        tokens, count = torch.zeros(rows, width + 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        done = torch.zeros(rows, dtype=torch.bool)
        return TokenRecords(
            count.clone(), tokens, torch.zeros(rows, width + 1), count, limits, done, done.clone(), stops
        )

    ours, plain, said = empty(), empty(), []
    for _ in range(width + 1):
        said.append((torch.randint(9, (rows,)), torch.randn(rows)))
        record_tokens(*said[-1], ours)
        record_tokens_plain(*said[-1], plain)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
        assert torch.equal(ours.latest, said[-1][0])
    for row in range(rows):
        texts = [int(token[row]) for token, _ in said]
        ends = [n for n, token in enumerate(texts[: limits[row]], 1) if token in stops]
        length = ends[0] if ends else int(limits[row])
        assert ours.counts[row] == length
        assert ours.stopped[row] == bool(ends)
        assert ours.done[row]
        assert ours.tokens[row, :length].tolist() == texts[:length]
        assert ours.logprobs[row, :length].tolist() == [float(logprob[row]) for _, logprob in said[:length]]


def test_what_is_fetched_ahead_keeps_to_its_bytes() -> None:
    weights = [torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (2048, 512)]
    bytes_of_a_line = 2 * LINE * 2560
    assert Prefetch(weights, budget=9 * bytes_of_a_line).line_bits() == 3
    assert Prefetch(weights, budget=1).line_bits() == 0  # one line of each row at least
    assert Prefetch(weights, budget=1 << 40).line_bits() == 6  # whole rows at most
    assert Prefetch(weights, 4, 1024, 9 * bytes_of_a_line).line_bits() == 1
    assert Prefetch(weights, 4, 1024, 1 << 40).line_bits() == 4


def test_what_is_fetched_ahead_is_where_the_programs_begin() -> None:
    tiles = GemmConfig(n=32, k=128, warps=4, stages=4, programs=132)
    down, head = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((2048, 8192), (128256, 2048)))
    assert prefetch_of("add", 128, [down], table={("add", 128): tiles})[1:3] == (2, 4096)
    assert prefetch_of("add", 3, [down], table={("add", 16): tiles._replace(n=16, programs=528)})[1:3] == (4, 2048)
    assert prefetch_of("wide", 200, [head])[1:3] == (1, 2048)
    assert prefetch_of("cache", 8, [head])[1] == 1


if interprets():
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    from plait.kernels.decode.dependent_launch import address_of_line

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def lines_kernel(out, first, second, third, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Addresses of the first two lines of both halves of rows of 512 numbers: five rows, three, and others."""
        number = tl.arange(0, block)
        tl.store(out + number, address_of_line(number, first, second, third, 5, 3, 512, 256, 1, 1))

    def test_lines_ahead_are_counted_along_parts_then_rows_then_matrices() -> None:
        weights = [torch.zeros(rows, 512, dtype=torch.float16) for rows in (5, 3, 8)]
        found = torch.zeros(64, dtype=torch.int64)
        lines_kernel[(1,)](found, *weights, block=64)
        for rows, own in zip((5, 3, 8), found.split([20, 12, 32]), strict=True):
            wanted = [2 * (512 * row + column) for row in range(rows) for column in (0, 64, 256, 320)]
            assert (own - own[0]).tolist() == wanted
