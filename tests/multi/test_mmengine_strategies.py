"""MMEngine's example on two ranks: every strategy trains alike, and logs as MMEngine does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multi.mmengine_toys import IN_FP32, MICRO_BATCHES_SPLIT, run
from tests.multi.ranks import RankPool

TRAIN = re.compile(
    r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d - mmengine - INFO - Epoch\(train\) \[(\d)\]\[(\d)/4\]  lr: (\d\.\d{4}e[+-]\d\d)  "
    r"eta: 0:\d\d:\d\d  time: \d+\.\d{4}  data_time: \d+\.\d{4}  memory: \d+  loss: (\d+\.\d{4})"
)
VALIDATE = re.compile(
    r"Epoch\(val\) \[(\d)\]\[2/2\]    accuracy: (\d+\.\d{4})  data_time: \d+\.\d{4}  time: \d+\.\d{4}$"
)


def train_all(rank: int, size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, options in {**IN_FP32, **MICRO_BATCHES_SPLIT}.items():
        runner, noted = run(Path(folder) / name, options, batch_size=8)
        found[name] = {
            "losses": noted.losses,
            "rates": noted.rates,
            "accuracy": runner.message_hub.get_scalar("val/accuracy").data[0],
            "log": (runner.log_dir / f"{runner.timestamp}.log").read_text() if rank == 0 else "",
        }
        runner.close()
    return found


def test_all_strategies_train_alike_and_log_as_mmengine_does(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(train_all, str(tmp_path / "two"))
    alone, noted = run(tmp_path / "one", {"optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-2}}}, batch_size=16)
    _, noted_too = run(tmp_path / "one shard", IN_FP32["ZeRO-3"], batch_size=16)
    assert noted_too.losses == pytest.approx(noted.losses, rel=1e-5)
    for name, found in first.items():
        losses, tolerance = found["losses"], 1e-4 if name in IN_FP32 else 0.05
        if name != "docs: DeepSpeed":  # which clips gradients, as DeepSpeed does where it is told nothing
            assert losses == pytest.approx(noted.losses, rel=tolerance), name
        assert sum(losses[-2:]) < sum(losses[:2]), name
        assert found["accuracy"] == second[name]["accuracy"], name
        lines = [match for line in found["log"].splitlines() if (match := TRAIN.match(line))]
        assert [(match[1], match[2]) for match in lines] == [("1", "2"), ("1", "4"), ("2", "2"), ("2", "4")], name
        assert [float(match[3]) for match in lines] == pytest.approx(
            [found["rates"][i] for i in (1, 3, 5, 7)], rel=1e-4
        )
        validations = [match for line in found["log"].splitlines() if (match := VALIDATE.search(line))]
        assert [float(match[2]) for match in validations] == pytest.approx(found["accuracy"], abs=1e-4), name
    assert alone.message_hub.get_scalar("val/accuracy").data[0] == pytest.approx(first["DDP"]["accuracy"], abs=5.01)


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "mmengine_flexible.py"
    small = ("--depth", "18", "--samples", "40", "--batch", "2", "--epochs", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--use-fsdp", *small], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"mmengine - INFO - Epoch\(train\) \[1\]\[10/10\]  lr: 3\.3333e-04  eta: ", done.stdout)) == 1
    assert len(re.findall(r"mmengine - INFO - Epoch\(val\) \[1\]\[3/3\]    accuracy: ", done.stdout)) == 1
    assert (tmp_path / "work_dirs" / "last_checkpoint").read_text().endswith("epoch_1")
