"""A plan of a run in 8 bits: the same arithmetic, and inputs of layers kept at half their size."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config import parse_sections
from plait.plan.hardware import find_hardware
from plait.plan.simulate import simulate

H100 = find_hardware("h100")
DIM, TOKENS = 128, 64 * 32


def account(precision: Any, layers: int, **strategy: Any) -> Any:
    sizes = {"vocab_size": 256, "dim": DIM, "layers": layers, "heads": 4, "ffn_dim": 256, "seq_len": 32}
    given = {"model": {"type": "llama", **sizes}, "batch": {"micro": 64}, "precision": precision}
    return simulate(parse_sections(**given, strategy=strategy).config, H100, ranks=1).ledger


def test_it_has_the_same_products_and_keeps_less_of_each_layer() -> None:
    accounts = {word: (account(word, 2), account(word, 4)) for word in ("bf16", "fp8")}
    wide, small = accounts["bf16"], accounts["fp8"]
    assert small[0].total("flops") == wide[0].total("flops")
    # Of a token: half of the inputs of attention and feed-forward; the output of attention is there both ways.
    saved = (wide[1].peak[1] - wide[0].peak[1]) - (small[1].peak[1] - small[0].peak[1])
    assert saved / 2 == pytest.approx(TOKENS * DIM, rel=0.2)


def test_recomputing_does_not_make_the_last_product_of_a_block_again() -> None:
    plain, again = (account("fp8", 2, recompute=mode).total("flops") for mode in ("none", "full"))
    forward = account("bf16", 2, recompute="full").total("flops") - account("bf16", 2).total("flops")
    assert again - plain == forward


def test_a_head_in_8_bits_has_the_same_products_in_less_time() -> None:
    wide, small = account("fp8", 2), account({"fp8": {"head": True}}, 2)
    assert small.total("flops") == wide.total("flops")
    spent = [sum(each.total("compute", phase, "matmul") for phase in ("forward", "backward")) for each in (small, wide)]
    assert 0 < spent[0] < spent[1]


def test_scales_of_earlier_steps_spare_readings_and_nothing_else() -> None:
    now, earlier = account("fp8", 2), account({"fp8": {"scales": "earlier"}}, 2)
    assert earlier.total("flops") == now.total("flops")
    for phase in ("forward", "backward"):
        assert earlier.total("compute", phase, "memory") < 0.75 * now.total("compute", phase, "memory")
        assert earlier.total("compute", phase, "matmul") == now.total("compute", phase, "matmul") > 0
