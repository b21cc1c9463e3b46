"""A run plans itself first, and keeps what it expected beside what came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.refusals import refused

from plait import Runner
from plait.errors import ConfigError

MODEL = {"type": "gpt", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 2, "seq_len": 16}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def run(work_dir: Path, **sections: object) -> None:
    options = {"batch": {"micro": 2}, "train": {"max_steps": 3}, "log": {"every": 1}, **sections}
    with Runner(MODEL, Tokens(), work_dir=str(work_dir), device="cpu", **options) as runner:
        runner.train()


@pytest.mark.planned
def test_the_report_has_predicted_and_measured_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["plan"]["peak_gib"]["predicted"] > 0
    assert report["plan"]["peak_gib"]["measured"] > 0
    assert report["plan"]["step_s"]["measured"] > 0
    assert "plan:" in capsys.readouterr().out


@pytest.mark.planned
def test_a_run_that_cannot_fit_does_not_start_unless_told_to(tmp_path: Path) -> None:
    machine = tmp_path / "machine.yaml"
    from dataclasses import replace

    from plait.plan.hardware import hardware_here

    machine.write_text(json.dumps(replace(hardware_here("cpu"), memory_gib=0.001).to_dict()))
    with refused(ConfigError, "GiB", "`plan=warn`", key="strategy"):
        run(tmp_path / "refused", plan={"hardware": str(machine)})
    assert not (tmp_path / "refused").exists()
    run(tmp_path / "warned", plan={"hardware": str(machine), "gate": "warn"})
    assert (tmp_path / "warned" / "report.json").exists()


@pytest.mark.planned
def test_a_run_does_without_a_plan_where_asked(tmp_path: Path) -> None:
    run(tmp_path / "run", plan="off")
    assert "plan" not in json.loads((tmp_path / "run" / "report.json").read_text())
