"""Draws from all words, by the twin and, where Triton's interpreter runs, by the kernels; against float64."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch
from torch import Tensor

from plait.kernels.decode.embed_sample import embed, sample_head
from plait.kernels.decode.sampling import COUNTER_RNG_BITS, PIECE, CounterRNG, sample_tokens, sample_tokens_plain
from plait.kernels.decode.skinny_gemm import GemmConfig, Norm, ResidualStream, make_counters, project
from plait.kernels.triton import interprets

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's words, in the interpreter

SHORT = torch.float16 if interprets() else torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, SHORT], ids=str)
TEMPERATURES = pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
CLOSE = 4e-6
"""How near to a border a chance may fall to the wrong side: the rounding of 64 weights of 24 bits, and of powers."""


def some_chance(rows: int) -> CounterRNG:
    keys = torch.randint(-(2**62), 2**62, (rows,)) >> torch.randint(63, (rows,))
    return CounterRNG(keys, torch.randint(2**20, (rows,)), random.randrange(-(2**63), 2**63))


def assert_drawn(
    logits: Tensor, temperature: float, bits: Tensor, found: tuple[Tensor, Tensor], close: float = CLOSE
) -> None:
    """The chance lies in the token's share of the row, up to rounding, and the log-probability is the model's."""
    token, logprob = found
    place, exact = token[:, None], logits.double()
    share = (exact / temperature).softmax(-1)
    high = share.cumsum(-1).gather(1, place).squeeze(1)
    own = share.gather(1, place).squeeze(1)
    aim = bits.double() / 2**COUNTER_RNG_BITS
    assert (own > 0).all()
    assert (aim - high).max() <= close
    assert (high - own - aim).max() <= close
    wanted = exact.log_softmax(-1).gather(1, place).squeeze(1)
    torch.testing.assert_close(logprob.double(), wanted, rtol=1e-5, atol=1e-5)


@DTYPES
@TEMPERATURES
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 63), (130, 65), (17, 512), (5, 9001), (40, 4097)])
def test_a_chance_falls_into_the_share_of_its_token(
    rows: int, vocabulary: int, temperature: float, dtype: torch.dtype
) -> None:
    logits = (random.choice((0.1, 1.0, 4.0)) * torch.randn(rows, vocabulary)).to(dtype)
    logits[:, random.randrange(vocabulary)] = logits[:, 0]  # of two that are alike, each has its own share
    chance = some_chance(rows)
    found = sample_tokens(logits, temperature, chance)
    assert_drawn(logits, temperature, chance.bits(), found)
    plain = sample_tokens_plain(logits, temperature, chance)
    assert_drawn(logits, temperature, chance.bits(), plain)
    assert (found[0] != plain[0]).sum() <= 1 + rows // 10
    given = sample_tokens(logits, temperature, chance.bits())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, given, strict=True))


def test_chances_are_what_they_were() -> None:
    def mixed(bits: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits = (bits ^ (bits >> shift)) * factor % 2**32
        return bits ^ (bits >> 16)

    keys, counts, seed = chance = some_chance(200)
    for key, count, found in zip(keys.tolist(), counts.tolist(), chance.bits().tolist(), strict=True):
        begun = mixed((seed ^ (seed >> 32)) % 2**32)
        keyed = mixed(mixed((begun + key) % 2**32) ^ ((key >> 32) % 2**32))
        assert found == mixed((keyed + count * 0x9E3779B9) % 2**32) >> 4


@TEMPERATURES
def test_a_row_gets_its_token_whatever_else_is_in_the_batch_and_however_it_is_cut(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocabulary = 30, random.randint(1000, 1400)
    logits, chance = 2.0 * torch.randn(rows, vocabulary), some_chance(rows)
    whole, _ = sample_tokens(logits, temperature, chance)
    some = torch.randperm(rows)[:7]
    part, _ = sample_tokens(logits[some], temperature, CounterRNG(chance.keys[some], chance.counts[some], chance.seed))
    assert torch.equal(part, whole[some])
    monkeypatch.setattr(import_module("plait.kernels.decode.sampling"), "_BLOCK", random.choice((PIECE, 4 * PIECE)))
    assert torch.equal(sample_tokens(logits, temperature, chance)[0], whole)


@DTYPES
@TEMPERATURES
def test_what_is_impossible_is_never_drawn_and_no_numbers_lead_nowhere(temperature: float, dtype: torch.dtype) -> None:
    vocabulary = random.randint(300, 900)
    only, hole = random.randrange(vocabulary), random.randrange(vocabulary - 150)
    logits = torch.randn(9, vocabulary).to(dtype)
    logits[0] = -torch.inf
    logits[0, only] = -3.0
    logits[1, hole : hole + 150] = -torch.inf
    logits[2] = torch.nan
    logits[3, only] = torch.nan
    logits[4] = -torch.inf
    logits[5, only] = torch.inf
    logits[6, : vocabulary - 1] = -torch.inf
    logits[7] = logits[7, 0]
    for _ in range(3):
        bits = torch.randint(2**COUNTER_RNG_BITS, (9,))
        bits[:2] = random.choice((0, 2**COUNTER_RNG_BITS - 1))
        token, logprob = found = sample_tokens(logits, temperature, bits)
        good = torch.tensor([0, 1, 6, 7, 8])
        assert_drawn(logits[good], temperature, bits[good], tuple(each[good] for each in found))  # type: ignore[arg-type]
        assert token[0] == only
        assert token[6] == vocabulary - 1
        assert ((token >= 0) & (token < vocabulary)).all()
        assert not logprob[2:6].isfinite().any()


def test_any_temperature_above_zero_can_be() -> None:
    logits, bits = torch.randn(6, 777), torch.randint(2**COUNTER_RNG_BITS, (6,))
    logits[3, 5:] = -torch.inf
    for temperature in (1e-300, 1e-40, 1e-9):
        assert torch.equal(sample_tokens(logits, temperature, bits)[0], logits.argmax(-1))
    logits[3] = 0.0
    for temperature in (1e9, 1e300):
        token, _ = sample_tokens(logits, temperature, bits)
        assert (token.double() / 777 - bits / 2**COUNTER_RNG_BITS).abs().max() < 2 / 777


@TEMPERATURES
def test_tokens_come_as_often_as_they_should(temperature: float) -> None:
    draws, vocabulary = 500 if interprets() else 20000, random.randint(90, 150)
    logits = torch.randn(vocabulary)
    chance = CounterRNG(torch.arange(draws), torch.full((draws,), random.randrange(99)), random.randrange(2**40))
    token, _ = sample_tokens(logits.repeat(draws, 1), temperature, chance)
    expected = draws * (logits.double() / temperature).softmax(-1)
    found, order = torch.bincount(token, minlength=vocabulary).double(), expected.argsort()
    # Words that are seldom drawn are counted together, so that each count is about normally distributed.
    group = torch.zeros(vocabulary, dtype=torch.int64)
    group[order] = expected[order].cumsum(0).div(max(10.0, float(expected.max()))).long()
    sums = torch.zeros(2, int(group.max()) + 1, dtype=torch.float64).index_add_(
        1, group, torch.stack((found, expected))
    )
    far = ((sums[0] - sums[1]).square() / sums[1].clamp(min=1.0)).sum()
    assert torch.special.gammaincc(torch.tensor((sums.shape[1] - 1) / 2).double(), far / 2) > 1e-9


@DTYPES
@pytest.mark.parametrize(("rows", "carried"), [(1, True), (7, False), (33, True), (70, True), (130, True)])
def test_who_multiplies_weighs_too(
    dtype: torch.dtype, rows: int, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.kernels.decode.embed_sample.WIDE", 1)
    monkeypatch.setattr("plait.kernels.decode.skinny_gemm.WIDE", 1)
    vocabulary, width, counters = random.randint(500, 700), 80, make_counters(torch.device("cpu"))
    head, norm = (0.3 * torch.randn(vocabulary, width)).to(dtype), Norm(torch.ones(width).to(dtype), 1e-5)
    stream = embed(torch.randint(40, (rows,)), torch.randn(40, width).to(dtype), norm)
    stream = stream if carried else ResidualStream(stream.x, stream.norm)
    logits = project(stream, [head], counters)
    for temperature in (1.0, random.choice((0.3, 0.7, 2.0))):
        chance = some_chance(rows)
        found = sample_head(stream, head, temperature, chance, counters)
        assert_drawn(logits, temperature, chance.bits(), found)
        token, logprob = sample_tokens(logits, temperature, chance)
        assert torch.equal(found[0], token)
        torch.testing.assert_close(found[1], logprob, rtol=1e-5, atol=1e-5)
        # Tiles that no piece fits into are no way to weigh.
        small = {("wide", each): GemmConfig(n=32, k=64, warps=4, stages=2) for each in (16, 32, 64, 128)}
        assert_drawn(
            logits, temperature, chance.bits(), sample_head(stream, head, temperature, chance, counters, table=small)
        )


def test_more_words_than_whole_numbers_can_count_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("plait.kernels.decode.sampling"), "MOST_PIECES", 2)
    logits, chance = torch.randn(4, 3 * PIECE), some_chance(4)
    found, plain = sample_tokens(logits, 0.9, chance), sample_tokens_plain(logits, 0.9, chance)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plain, strict=True))
