"""An `accelerate` YAML on the command line, and the example script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.refusals import refused

from plait.cli.train import train
from plait.errors import ConfigError

ROOT = Path(__file__).parents[3]
RUN = """
model: {type: gpt, vocab_size: 300, dim: 16, layers: 2, heads: 2, seq_len: 16}
data: {type: text, path: stdlib, limit_mb: 0.1, vocab_size: 300, seq_len: 16}
batch: {total: 4}
train: {max_steps: 2}
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
use_cpu: true
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}
parallelism_config: {parallelism_config_dp_shard_size: 2}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    run, accelerate = tmp_path / "run.yaml", tmp_path / "accelerate.yaml"
    run.write_text(RUN)
    accelerate.write_text(ACCELERATE)
    return str(run), str(accelerate)


def test_train_is_spread_as_the_file_says(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    # Two ranks that share one copy: refused, if `num_processes` were not heard.
    train(files[0], [], nproc=None, dry_run=True, accelerate_config=files[1])
    said = capsys.readouterr().out
    assert "fsdp_config.fsdp_reshard_after_forward" in said
    settings = {line.split()[0]: line.split()[1] for line in said.splitlines() if line.endswith("override")}
    assert settings["strategy.sharding"] == "SHARD_GRAD_OP"
    assert settings["precision.compute"] == "bf16"
    assert settings["device"] == "cpu"


def test_settings_that_disagree_with_the_file_are_an_error_that_names_both(files: tuple[str, str]) -> None:
    Path(files[0]).write_text(f"{RUN}\nstrategy: zero1\n")
    with refused(ConfigError, "SHARD_GRAD_OP", "strategy.zero: 2", key="strategy.sharding"):
        train(files[0], [], nproc=None, dry_run=True, accelerate_config=files[1])


def test_what_is_refused_starts_nothing(files: tuple[str, str]) -> None:
    Path(files[1]).write_text("distributed_type: MULTI_GPU\nmixed_precision: fp8\n")
    with refused(ConfigError, "'fp8'", key="mixed_precision"):
        train(files[0], [], nproc=None, dry_run=True, accelerate_config=files[1])


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"main_process_ip": None}, "main_process_ip"),
        ({"machine_rank": 2}, "machine_rank"),
        ({"main_process_port": 0}, "main_process_port"),
        ({"num_processes": 3}, "num_processes"),
        ({"deepspeed_config": {"deepspeed_hostfile": "hosts"}}, "deepspeed_config.deepspeed_hostfile"),
        ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpirun_config.mpirun_hostfile"),
    ],
)
def test_machines_that_could_not_meet_are_refused(files: tuple[str, str], given: dict[str, Any], key: str) -> None:
    several = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "num_processes": 2}
    Path(files[1]).write_text(yaml.safe_dump({"distributed_type": "MULTI_CPU", **several, **given}))
    with refused(ConfigError, key=key):
        train(files[0], [], nproc=None, dry_run=True, accelerate_config=files[1])


def test_two_machines_make_one_run(files: tuple[str, str], tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_machines": 2, "num_processes": 2}
    where = {"main_process_ip": "127.0.0.1", "main_process_port": port}
    processes = []
    for rank in range(2):
        path = tmp_path / f"machine{rank}.yaml"
        path.write_text(yaml.safe_dump({**settings, **where, "machine_rank": rank}))
        words = ["train", files[0], "--accelerate-config", str(path), "plan=off", "work_dir=run"]
        marks = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PET_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
        command = [sys.executable, "-m", "plait", *words]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True))
    said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert sorted(path.name for path in (tmp_path / "run").glob("events-rank*")) == [
        "events-rank0.jsonl",
        "events-rank1.jsonl",
    ]
    assert "finished" in said[0][0]
    assert "finished" not in said[1][0]


def test_the_example_runs_and_goes_on_alone(files: tuple[str, str], tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "accelerate_script.py")
    two_ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    short = ["--samples", "100", "--epochs"]
    first = [*two_ranks, script, *short, "1", "--config_file", files[1], "--save", "states"]
    said = "".join(_run(words, tmp_path) for words in (first, [script, *short, "2", "--load", "states"]))
    epochs = [line for line in said.splitlines() if line.startswith("epoch")]
    assert [line.split(":")[0] for line in epochs] == ["epoch 0", "epoch 1"]
    assert all("201" in line for line in epochs)


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
