"""A simulated step of any rank: what it holds, whose it is, and what it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.communication_volume import data_traffic

from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.models import build_model
from plait.plan.hardware import find_hardware
from plait.plan.ledger import PROCESS_BYTES, host_bytes
from plait.plan.simulate import simulate

CPU, H100 = find_hardware("cpu"), find_hardware("h100")
SIZES = {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "ffn_dim": 160, "seq_len": 32}


def config_of(strategy: Any = "single", **sections: Any) -> RunConfig:
    given = {"batch": {"micro": 2}, "optim": {"type": "AdamW"}, "train": {"clip_norm": 1.0}, **sections}
    return parse_sections(model={"type": "llama", **SIZES}, strategy=strategy, **given).config


def test_between_steps_a_rank_holds_parameters_and_two_moments_and_no_more_than_a_few_numbers_beside() -> None:
    account = simulate(config_of(), CPU, ranks=1).ledger
    states = 3 * 4 * account.numbers["parameters"]
    assert states <= account.numbers["state"] <= 1.01 * states
    assert account.peak[1] > states


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_share_states_hold_their_share(stage: int) -> None:
    whole = simulate(config_of({"zero": 0}), CPU, ranks=4).ledger
    part = simulate(config_of({"zero": stage}), CPU, ranks=4, rank=2).ledger
    assert part.numbers["state"] == pytest.approx(whole.numbers["state"] / 4, rel=0.01)


def test_the_parts_at_the_peak_add_up_to_it() -> None:
    account = simulate(config_of(precision="bf16"), H100, ranks=1, detailed=True).ledger
    parts = account.under("part")
    assert sum(parts.values()) == account.peak[1]
    assert parts["optimizer"] >= 8 * account.numbers["parameters"]
    assert account.numbers["reserved"] >= account.peak[1]


def test_recomputing_and_smaller_micro_batches_take_less_and_longer() -> None:
    plain, recomputed = (
        simulate(config_of({"recompute": mode}, batch={"micro": 16}), CPU, ranks=1).ledger for mode in ("none", "full")
    )
    assert recomputed.peak[1] < plain.peak[1]
    assert recomputed.seconds() > plain.seconds()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bytes_that_an_account_has_are_those_of_the_theory(stage: int) -> None:
    config = config_of({"zero": stage}, batch={"micro": 1, "accumulation": 3})
    account = simulate(config, CPU, ranks=8, rank=5).ledger
    with torch.device("meta"):
        shapes = [param.shape for param in build_model(config.model).parameters()]  # type: ignore[arg-type]
    small = 3 * 8 + (8 if stage else 0)  # loss, count and stop flag; the norm where ranks have parts
    theory = data_traffic(stage=stage, shapes=shapes, shards=8, micro_batches=3)
    assert account.total("sent") == theory + 2 * small * 7 / 8


def test_a_stage_hands_on_what_the_next_one_receives() -> None:
    config = config_of({"layout": {"pp": 2}}, batch={"micro": 2, "accumulation": 4})
    first = simulate(config, CPU, ranks=2, rank=0)
    last = simulate(config, CPU, ranks=2, rank=1, received=first.sent_spec)
    whole = simulate(config_of(), CPU, ranks=1).ledger.numbers["parameters"]
    assert first.sent_spec is not None
    assert first.ledger.numbers["parameters"] + last.ledger.numbers["parameters"] == whole
    assert first.ledger.total("sent", "pp") > 0


def test_a_host_needs_room_for_the_tensors_and_the_process_of_each_rank() -> None:
    account = simulate(config_of(), CPU, ranks=1).ledger
    assert host_bytes(account) == PROCESS_BYTES + account.peak[1]
    assert host_bytes(account, ranks=3) == 3 * host_bytes(account)


def test_of_a_gated_feed_forward_with_kernels_two_tensors_are_kept() -> None:
    def account(layers: int, width: int, kernels: str = "auto") -> Any:
        sizes = {**SIZES, "layers": layers, "ffn_dim": width}
        given = {"model": {"type": "llama", **sizes}, "batch": {"micro": 64}, "precision": "bf16"}
        return simulate(parse_sections(**given, strategy={"kernels": kernels}).config, H100, ranks=1).ledger

    small, plain = account(2, 256), account(2, 256, "plain")
    a_layer = account(3, 512).peak[1] - account(2, 512).peak[1] - account(3, 256).peak[1] + small.peak[1]
    states = 3 * 64 * 256 * (4 + 4 + 4 + 2)  # weight, two moments, the weight in bf16
    assert (a_layer - states) / (64 * 32 * 256 * 2) == pytest.approx(2.0, abs=0.2)
    assert small.total("flops") == plain.total("flops")
