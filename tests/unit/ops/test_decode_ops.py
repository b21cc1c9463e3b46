"""Kernels of single tokens, by their twins and, where Triton's interpreter runs, themselves; against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from plait.ops.decode_attention import attend_cached
from plait.ops.greedy import greedy, logprob_of
from plait.ops.skinny import TILES, Norm, Stream, add, gated, look_up, make_counters, project
from plait.ops.triton import interprets

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


def wide(stream: Stream) -> Stream:
    """The same stream in float64, which carries nothing along."""
    return Stream(stream.x.to(EXACT), Norm(stream.norm.weight.to(EXACT), stream.norm.eps))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (7, 1040), (33, 320), (70, 160), (130, 48)])
def test_a_stream_is_looked_up_read_and_added_to(dtype: torch.dtype, rows: int, width: int) -> None:
    counters = make_counters(torch.device("cpu"))
    embedding, tokens = torch.randn(40, width).to(dtype), torch.randint(40, (rows,))
    stream = look_up(tokens, embedding, some_norm(width, dtype))
    assert torch.equal(stream.x, embedding[tokens])
    for _ in range(2):  # a second time, with what the first has left in the counters
        features = [random.randint(1, 50) for _ in range(random.randint(1, 3))]
        weights = [(torch.randn(each, width) / width**0.5).to(dtype) for each in features]
        exact = [weight.to(EXACT) for weight in weights]
        assert near(project(stream, weights, counters), project(wide(stream), exact, counters))
        assert near(gated(stream, weights[0], -weights[0]), gated(wide(stream), exact[0], -exact[0]))
        hidden = random.choice((24, 256, 1500))
        y, weight = torch.randn(rows, hidden).to(dtype), (torch.randn(width, hidden) / hidden**0.5).to(dtype)
        after = add(stream, y, weight, some_norm(width, dtype), counters)
        expected = add(wide(stream), y.to(EXACT), weight.to(EXACT), after.norm, counters)
        assert near(after.x, expected.x)
        assert not counters.any()
        stream = after


def test_every_form_has_tiles_for_every_number_of_rows() -> None:
    assert set(TILES) == {(form, rows) for form in ("project", "add", "gated", "wide") for rows in (16, 32, 64, 128)}


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
    found = attend_cached(mixed, *table, keys, values, places, counters)
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
