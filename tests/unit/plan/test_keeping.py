"""A plan has every phase of a run, loading, the optimizer's first step and saving too, on the device and the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing

from plait.checkpoint.memory import WRITERS
from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.kernels.adam8bit import WORKSPACE_BYTES
from plait.launch import Phase
from plait.models import build_model
from plait.plan.gate import RunPlan, plan_run
from plait.plan.hardware import find_hardware
from plait.plan.ledger import Ledger, host_peaks
from plait.plan.plan import make_plan
from plait.plan.rankplan import plan_rank
from plait.plan.simulate import simulate

CPU, H100 = find_hardware("cpu"), find_hardware("h100")
SIZES = {"vocab_size": 512, "dim": 128, "layers": 2, "heads": 4, "ffn_dim": 320, "seq_len": 32}
EIGHT_BIT = {"type": "AdamW8bit"}


def config_of(strategy: Any = "single", *, layers: int = 2, **sections: Any) -> RunConfig:
    given = {"batch": {"micro": 1}, "precision": "bf16", **sections}
    return parse_sections(model={"type": "llama", **SIZES, "layers": layers}, strategy=strategy, **given).config


def on_host(config: RunConfig, ranks: int = 1) -> tuple[Ledger, dict[Phase, float]]:
    account = simulate(config, H100, ranks=ranks).ledger
    return account, host_peaks(account, H100)


def test_a_run_that_goes_on_holds_weights_and_states_when_it_has_loaded_and_when_it_saves() -> None:
    account = simulate(config_of(precision="fp32"), CPU, ranks=1).ledger
    peaks, state = account.peaks(), account.numbers["state"]
    assert peaks[Phase.LOAD] == pytest.approx(state, rel=1e-3)
    assert peaks[Phase.SAVE] == pytest.approx(state, rel=1e-3)


def test_the_first_update_makes_the_optimizers_state_beside_the_gradients() -> None:
    account = simulate(config_of(precision="fp32"), CPU, ranks=1, detailed=True).ledger
    gradients = 4 * account.numbers["parameters"]
    assert account.peaks()[Phase.INIT] == pytest.approx(account.numbers["state"] + gradients, rel=1e-3)
    parts = account.under(f"at.{Phase.INIT}")
    assert parts["optimizer"] > 1.5 * parts["gradients"]
    assert sum(parts.values()) == account.peaks()[Phase.INIT]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {Phase.LOAD, Phase.SAVE}),
        ({"last": False}, set()),
        ({"last": False, "resume": "auto"}, {Phase.LOAD}),
        ({"last": False, "every": 10}, {Phase.LOAD, Phase.SAVE}),
    ],
    ids=["as-usual", "nothing", "resumes", "now-and-then"],
)
def test_who_saves_is_taken_to_load_and_who_does_neither_has_no_such_phase(settings: Any, expected: set[Phase]) -> None:
    peaks = simulate(config_of(checkpoint=settings), H100, ranks=1).ledger.peaks()
    assert peaks.keys() & {Phase.LOAD, Phase.SAVE} == expected


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [({"zero": 3}, 8), ({"zero": 1, "offload": "cpu"}, 4)],
    ids=["zero3", "offload"],
)
def test_a_few_layers_stand_for_all_in_these_phases_too(strategy: Any, ranks: int) -> None:
    config = config_of(strategy, layers=9, checkpoint={"async_save": True})
    few, all_layers = (plan_rank(config, H100, ranks=ranks, exact=exact).ledger for exact in (False, True))
    for phase, size in all_layers.peaks().items():
        assert few.peaks()[phase] == pytest.approx(size, rel=0.01), phase
    for phase, size in host_peaks(all_layers, H100).items():
        assert host_peaks(few, H100)[phase] == pytest.approx(size, rel=1e-4), phase


# ---- the host


def test_a_copy_for_the_background_stays_and_ranks_that_hold_the_same_share_it() -> None:
    waited, _ = on_host(config_of("ddp"), ranks=4)
    account, host = on_host(config_of("ddp", checkpoint={"async_save": True}), ranks=4)
    copy = account.numbers["host_copy"]
    assert waited.numbers["host_copy"] == 0
    assert account.numbers["written"] == pytest.approx(account.numbers["state"] / 4)
    assert account.numbers["written"] <= copy <= 2 * account.numbers["written"]
    assert host[Phase.STEP] - host[Phase.INIT] == copy


def largest_of(config: RunConfig) -> int:
    assert config.model is not None
    with torch.device("meta"):
        return max(param.numel() for param in build_model(config.model).parameters())


def test_moments_in_8_bits_come_to_the_host_in_fp32_to_be_saved_a_few_at_a_time() -> None:
    config = config_of(optim=EIGHT_BIT)
    account, host = on_host(config)
    few = WRITERS * (4 * largest_of(config) + WORKSPACE_BYTES)
    assert host[Phase.SAVE] - host[Phase.STEP] == few + 64 * 2**20  # and blocks on their way from the device
    assert account.peaks()[Phase.LOAD] <= account.peaks()[Phase.IDLE] * 1.01  # they are packed as they are read


def test_moments_in_files_cost_the_host_nothing_to_save_unless_they_have_8_bits() -> None:
    strategy = {"zero": 1, "offload": {"optimizer": "nvme", "path": "/nowhere/at/all"}}
    config = config_of(strategy, optim=EIGHT_BIT)
    _, plain = on_host(config_of(strategy), ranks=2)
    _, packed = on_host(config, ranks=2)
    assert plain[Phase.SAVE] == plain[Phase.STEP]
    assert packed[Phase.SAVE] - packed[Phase.STEP] == WRITERS * (4 * largest_of(config) / 2 + WORKSPACE_BYTES)


def test_before_the_first_step_an_offloaded_run_has_no_gradients_and_states_on_the_host() -> None:
    account, host = on_host(config_of({"zero": 1, "offload": "cpu"}), ranks=2)
    numbers = account.numbers["parameters"] / 2
    assert host[Phase.LOAD] - host[Phase.BUILD] == pytest.approx(8 * numbers, rel=0.02)
    assert host[Phase.STEP] - host[Phase.BUILD] == pytest.approx((8 + 2) * numbers, rel=0.02)


# ---- the verdict


@pytest.fixture(scope="module")
def large() -> RunConfig:
    """Its save takes more of the host than its steps do."""
    config = config_of(optim=EIGHT_BIT, checkpoint={"async_save": True})
    sizes = {"vocab_size": 32000, "dim": 1024, "layers": 2, "ffn_dim": 4096}
    return config.model_copy(update={"model": config.model.model_copy(update=sizes)})  # type: ignore[union-attr]


def test_a_run_whose_save_the_host_has_no_room_for_is_refused_with_what_to_change(
    large: RunConfig, tmp_path: Path
) -> None:
    machine = replace(H100, host_cores=1)
    plan = make_plan(large, machine, ranks=1, detailed=False)
    assert plan.host_phase is Phase.SAVE
    tight = replace(machine, host_memory_gib=(plan.host_phases[Phase.STEP] + plan.host_gib) / 2)
    assert not replace(plan, hardware=tight).fits
    file = tmp_path / "machine.yaml"
    file.write_text(str(tight.to_dict()).replace("'", '"').replace("(", "[").replace(")", "]"))
    config = large.model_copy(update={"plan": large.plan.model_copy(update={"hardware": str(file)})})
    found = plan_run(config, ranks=1, local_ranks=1)
    assert isinstance(found, RunPlan)
    assert found.refusal is not None
    assert not missing(str(found.refusal), "save phase", "`checkpoint.async_save=false`", "GiB")


def test_a_figure_of_every_phase_and_host_is_among_those_of_a_plan() -> None:
    plan = make_plan(config_of({"zero": 3}), H100, ranks=8)
    figures = plan.to_dict()
    phases = [phase for phase in Phase if phase not in (Phase.EVALUATE, Phase.IDLE, Phase.LEFT)]
    assert {f"peak.{phase}" for phase in phases} <= figures["ranks"]["every rank"].keys()
    assert set(phases) <= figures["host_phases"].keys()
    assert figures["host_gib"] == round(max(figures["host_phases"].values()), 2)
