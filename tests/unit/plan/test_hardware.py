"""Machines: presets, files, and the one at hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.refusals import refused

from plait.cli import doctor
from plait.config import yaml_io
from plait.errors import ConfigError, WorldError
from plait.plan.hardware import PRESETS, find_hardware, hardware_here
from plait.plan.measure import measure_disk


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100-80g"),
        ("H100-80G", "h100-80g"),
        ("h100_80gb", "h100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("B200", "b200-192g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("a100-40g", "a100-40g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("4090", "rtx4090-24g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g"),
        ("CPU", "cpu"),
    ],
)
def test_a_name_is_read_leniently(text: str, name: str) -> None:
    assert find_hardware(text).name == name


def test_a_name_that_may_be_two_machines_is_not_guessed() -> None:
    with refused(ConfigError, "'a100'", "a100-40g", "a100-80g", key="--gpu"):
        find_hardware("a100")


@pytest.mark.parametrize("text", ["h20", "NVIDIA H20", "NVIDIA GH200 480GB", "a10", "NVIDIA RTX A1000", "h1000"])
def test_another_machine_is_not_taken_for_one_that_is_called_alike(text: str) -> None:
    with refused(ConfigError, f"'{text}'", "h200-141g", "--measure", key="--gpu"):
        find_hardware(text)


def test_an_unknown_name_gets_a_suggestion() -> None:
    with refused(ConfigError, "'h10O'", "`h100`", key="--gpu"):
        find_hardware("h10O")  # the letter, not the digit


@pytest.mark.parametrize("machine", PRESETS.values(), ids=PRESETS)
def test_every_preset_is_a_machine_that_a_plan_can_divide_by(machine: object) -> None:
    preset = PRESETS[machine.name]  # type: ignore[attr-defined]
    assert 0 < preset.context_gib < preset.memory_gib <= preset.host_memory_gib or preset.kind == "cpu"
    assert preset.flops["fp32"] <= preset.flops.get("bf16", preset.flops.get("fp16", 0.0))
    assert preset.link.gbps >= preset.pcie_gbps * 0.8 or preset.kind == "cpu"
    assert preset.link.gbps > preset.network.gbps or preset.kind == "cpu"


def test_a_machine_written_to_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    machine = replace(
        random.choice(list(PRESETS.values())),
        name="ours",
        measured={"fp32": random.random() + 0.1},
        dollars_per_hour=random.random(),
    )
    path = tmp_path / "machine.yaml"
    path.write_text(yaml_io.dump(machine.to_dict()))
    assert find_hardware(path) == machine


@pytest.mark.parametrize(
    ("key", "value", "path", "named"),
    [
        ("memory_gb", 80.0, "memory_gb", "`memory_gib`"),
        ("memory_gib", "much", "memory_gib", "'much'"),
        ("memory_gbps", 0.0, "memory_gbps", "0"),
        ("flops", {"fp32": 1.0, "bf61": 2.0}, "flops.bf61", "`bf16`"),
        ("flops", {"bf16": 2.0}, "flops", "`fp32`"),
        ("link", {"kind": "nvlink", "gbs": 1.0}, "link.gbs", "`gbps`"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(tmp_path: Path, key: str, value: object, path: str, named: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(yaml_io.dump(PRESETS["h100-80g"].to_dict() | {key: value}))
    with refused(ConfigError, file, named, key=path):
        find_hardware(file)


def test_a_measured_rate_stands_above_the_peak_times_its_share() -> None:
    machine = replace(PRESETS["h100-80g"], matmul_efficiency=0.5, measured={"bf16": 700.0})
    assert machine.rate("bf16") == 700e12
    assert machine.rate("fp16") == pytest.approx(989.4e12 / 2)
    assert PRESETS["v100-16g"].rate("bf16") == PRESETS["v100-16g"].rate("fp32")  # it has no units for it


def test_ranks_of_one_host_use_its_link_and_others_the_network() -> None:
    machine = PRESETS["h100-80g"]
    assert machine.link_between(8) == machine.link
    assert machine.link_between(4, stride=2) == machine.link
    assert machine.link_between(9) == machine.network
    assert machine.link_between(2, stride=8) == machine.network


def test_the_machine_at_hand_has_the_sizes_that_it_has() -> None:
    here = hardware_here()
    assert here.memory_gib > 0
    assert here.per_host >= 1


def test_measuring_writes_a_machine_that_a_plan_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.yaml"
    doctor.measure(str(path), str(tmp_path))
    machine = find_hardware(path)
    assert machine.measured["fp32"] > 0
    assert machine.rate("fp32") == machine.measured["fp32"] * 1e12
    assert min(machine.memory_gbps, machine.disk_gbps, machine.launch_us, machine.host_gbps) > 0
    assert list(tmp_path.iterdir()) == [path]  # nothing else is left behind
    shown = capsys.readouterr().out
    assert f"{machine.memory_gbps:.1f} GB/s" in shown
    if machine.kind == "cpu":
        assert f"{machine.link.gbps:.2f} GB/s" in shown
        assert "2 ranks" in shown


def test_a_file_for_figures_that_were_not_asked_for_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, "machine.yaml", "--measure", key="--out"):
        doctor.doctor(str(tmp_path / "machine.yaml"))
    with refused(ConfigError, "machine.txt", ".yaml", key="--out"):
        doctor.measure(str(tmp_path / "machine.txt"), str(tmp_path))


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with refused(WorldError, tmp_path / "nowhere"):
        measure_disk(tmp_path / "nowhere")
