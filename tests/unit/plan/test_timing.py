"""A step's arithmetic is the model's own account of it, and its time is that of what holds it up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.config.strategy import resolve_layout
from plait.launch.heartbeat import Phase
from plait.plan.hardware import find_hardware
from plait.plan.simulate import Simulated, simulate
from plait.plan.timing import Timing

H100 = find_hardware("h100")
LAYERS, DIM, TOKENS = 2, 64, 32


def played(**sections: Any) -> Simulated:
    sizes = {"vocab_size": 128, "dim": DIM, "layers": LAYERS, "heads": 4, "ffn_dim": 160, "seq_len": TOKENS}
    config = parse_sections(
        model={"type": "llama", **sizes}, optim={"type": "AdamW"}, train={"clip_norm": 1.0}, **sections
    ).config
    return simulate(config, H100, ranks=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_flops_of_a_step_are_those_of_the_models_account(precision: str) -> None:
    seen = played(batch={"micro": random.randint(1, 4), "accumulation": 2}, precision=precision, strategy="single")
    tokens = seen.ledger.numbers["tokens"]
    assert seen.flops_per_token is not None
    account = seen.flops_per_token * tokens
    # The account has 6 FLOPs for the parameters of norms too, which are in no matrix product.
    norms = 6 * (2 * LAYERS + 1) * DIM * tokens
    # A backward pass of attention makes the scores again: one product more, of causal rows half of it.
    scores = LAYERS * DIM * TOKENS * tokens
    assert seen.ledger.numbers["flops"] == account - norms + scores


def test_recomputed_blocks_run_their_forward_pass_again() -> None:
    once, again = (
        played(batch={"micro": 2}, precision="bf16", strategy={"recompute": mode}).ledger.numbers["flops"]
        for mode in ("none", "full")
    )
    # The last product of a block is not made again: nobody wants its result.
    forward = 2 * LAYERS * (4 * DIM**2 + 2 * DIM * 160) + 2 * LAYERS * DIM * TOKENS
    assert again - once == forward * 2 * TOKENS


def timing_on(hardware: Any = H100, **sections: Any) -> Timing:
    config = parse_sections(**sections).config
    return Timing(hardware, config, resolve_layout(config.strategy, size=1, local_size=1))


def test_a_large_product_takes_as_long_as_its_arithmetic_and_a_sum_as_its_memory() -> None:
    timing, flops, moved = timing_on(), 10**14, 10**10
    product = timing.seconds("matmul", flops, 0, torch.bfloat16)
    assert product == pytest.approx(flops / (H100.rate("bf16") * 0.95), rel=1e-4)
    assert timing.seconds("memory", 0, moved, torch.bfloat16) == pytest.approx(
        moved / (H100.memory_gbps * 1e9 * H100.memory_efficiency)
    )


def test_fp32_goes_as_tf32_where_the_run_says_so() -> None:
    plain, tf32 = (timing_on(precision=word).seconds("matmul", 10**14, 0, torch.float32) for word in ("fp32", "tf32"))
    assert plain / tf32 == pytest.approx(H100.rate("fp32") ** -1 * H100.rate("tf32"), rel=1e-3)


def test_a_slow_host_sets_the_pace() -> None:
    timing = timing_on(replace(H100, launch_us=1e6))
    for _ in range(3):
        timing.add(Phase.FORWARD, "memory", 0, 1000, torch.float32)
    assert timing.numbers["host.forward"] == pytest.approx(3.0)


def test_of_recorded_passes_the_host_asks_for_the_update_alone() -> None:
    plain, recorded = (
        played(batch={"micro": 2}, precision="bf16", strategy={"graphs": graphs}).ledger for graphs in (False, True)
    )
    assert plain.total("host", "forward") > 0
    assert recorded.total("host", "forward") == recorded.total("host", "backward") == 0
    assert recorded.total("host", "step") == plain.total("host", "step") > 0
    assert recorded.total("compute") == plain.total("compute")
    assert recorded.seconds() < plain.seconds()


def test_after_it_was_stopped_nothing_is_counted() -> None:
    timing = timing_on()
    timing.add(Phase.STEP, "memory", 0, 1000, torch.float32)
    timing.restart()
    timing.stop()
    timing.add(Phase.STEP, "memory", 0, 1000, torch.float32)
    assert not timing.numbers
