"""A plan knows what lives beyond the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.config import parse_sections
from plait.launch import Phase
from plait.plan.hardware import find_hardware
from plait.plan.plan import Plan, make_plan

MODEL = {"type": "llama", "vocab_size": 1024, "dim": 512, "layers": 2, "heads": 8, "seq_len": 64}
NUMBERS = 2 * 1024 * 512 + 2 * (4 * 512 * 512 + 3 * 512 * 1536)
"""About how many the model has."""
GIB = 2**30


def plan_of(strategy: dict[str, Any], **sections: Any) -> Plan:
    config = parse_sections(model=MODEL, precision="bf16", strategy=strategy, batch={"micro": 1}, **sections).config
    return make_plan(config, find_hardware("h100", key="plan.hardware"), ranks=1, detailed=False)


def test_what_is_offloaded_counts_on_the_host_and_not_on_the_device() -> None:
    resident = plan_of({"graphs": False})  # a recording has a workspace of its own, and offload excludes it
    away = plan_of({"offload": "cpu"})
    part = plan_of({"offload": {"optimizer": "cpu", "ratio": 0.5}})
    # fp32 weights, two moments and bf16 gradients, on the device or on the host.
    saved = (resident.fullest.ledger.peak[1] - away.fullest.ledger.peak[1]) / NUMBERS
    assert saved == pytest.approx(14, rel=0.2)  # some gradients are under way
    hosts = [plan.host_phases[Phase.STEP] for plan in (resident, part, away)]
    assert (hosts[2] - hosts[0]) * GIB / NUMBERS == pytest.approx(14, rel=0.1)
    assert hosts == sorted(hosts)
    assert away.needed_gib < part.needed_gib < resident.needed_gib


def test_a_host_without_room_for_it_is_seen_before_the_start() -> None:
    away = plan_of({"offload": "cpu"})
    assert away.fits
    assert not replace(away, hardware=replace(away.hardware, host_memory_gib=away.host_gib - 0.01)).fits


def test_every_tier_can_be_planned_without_touching_a_disk() -> None:
    tiers: dict[str, Any] = {"optimizer": "nvme", "params": "nvme", "persistent_params": 0, "bucket_mb": 4.0}
    tiers["path"] = "/nowhere/at/all"
    files = plan_of({"zero": 3, "offload": tiers})
    memory = plan_of({"zero": 3, "offload": {"optimizer": "cpu", "params": "cpu", "persistent_params": 0}})
    assert files.host_gib < memory.host_gib
    assert files.seconds > memory.seconds
    numbers = files.fullest.ledger.numbers
    assert numbers["link.files.each"] > numbers["link.in.each"] > 0  # every unit comes from a file, forward and back


def test_a_step_takes_as_long_as_what_its_tier_has_to_do() -> None:
    resident, half, away, late = (
        plan_of({"offload": offload} if offload else {})
        for offload in (
            None,
            {"optimizer": "cpu", "ratio": 0.5},
            "cpu",
            {"optimizer": "cpu", "delayed": True},
        )
    )
    assert resident.seconds < half.seconds < away.seconds
    assert late.seconds <= away.seconds
    # The gradients and the new weights of every number pass over the link, in bf16.
    link = 2 * NUMBERS / (away.hardware.pcie_gbps * 1e9)
    assert away.fullest.ledger.numbers["link.out.once"] == pytest.approx(link, rel=0.1)
    assert away.fullest.ledger.total("update", "beside", "back") == pytest.approx(link, rel=0.1)
