"""A package outside of the tree brings parts by entry points, and they are right under every strategy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from plait.config.trust import entry_points_of
from plait.testing import assert_same_after_resume, assert_same_maths
from tests.multi.toys import assert_close, fit

pytestmark = pytest.mark.timeout(900)  # whole commands, which start ranks
SOURCE = Path(__file__).parents[2] / "examples" / "plugin"
OWN = {
    "model": {"type": "tiny-lm", "vocab_size": 64, "seq_len": 16},
    "optim": {"type": "soft-sign", "lr": 1e-2},
    "schedule": {"type": "triangle", "peak": 0.5},
    "hooks": ["largest-weight"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, installed by pip as users install it, where this process and its children find it."""
    folder = tmp_path_factory.mktemp("plugin")
    tree, target = folder / "source", folder / "site"
    shutil.copytree(SOURCE, tree, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(tree)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH")))))
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        entry_points_of.cache_clear()
        yield target
    entry_points_of.cache_clear()


def plait(*words: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "plait", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor_lists_what_is_installed_and_from_where(site: Path, tmp_path: Path) -> None:
    found = [
        each
        for each in json.loads(plait("doctor", "--plugins", "--json", cwd=tmp_path))
        if "example" in each["package"]
    ]
    kinds = {"model", "optimizer", "schedule", "sink", "hook", "engine", "storage"}
    assert {each["kind"] for each in found} == kinds
    assert {each["folder"] for each in found} == {str(site)}
    assert {each["problem"] for each in found} == {""}


def test_its_model_optimizer_schedule_and_hook_are_those_of_one_process_everywhere(site: Path) -> None:
    strategies = ("ddp", "zero1", "zero2", "zero3", "tp2", "pp2")
    outcomes = assert_same_maths(**OWN, strategies=strategies, steps=3)
    assert set(outcomes.values()) == {"same"}


def test_a_run_of_it_that_two_ranks_saved_is_resumed_by_four(site: Path) -> None:
    assert_same_after_resume(**OWN, saved=("zero2", 2), resumed=("zero3", 4))


def test_its_engine_trains_as_one_process_does(site: Path) -> None:
    model, optim = OWN["model"], OWN["optim"]
    assert_same_maths(model=model, optim=optim, strategies=[{"engine": "plain-ddp"}], steps=3)


def test_its_storage_keeps_checkpoints_in_memory(site: Path, tmp_path: Path) -> None:
    """fsspec's memory file system, which is one process's own."""
    memory = fsspec.filesystem("memory")
    own: dict[str, Any] = {"optim": OWN["optim"], "schedule": OWN["schedule"]}
    storage = {"type": "fsspec", "url": "memory://run"}
    whole = fit(0, 1, {**own, "work_dir": tmp_path / "whole"})
    try:
        first = fit(0, 1, {**own, "work_dir": tmp_path / "first", "checkpoint": {"storage": storage}}, stop_at=5)
        assert first.steps == 5
        assert memory.find("/run")
        shutil.rmtree(tmp_path / "first")
        again = {"storage": storage, "resume": "auto"}
        second = fit(0, 1, {**own, "work_dir": tmp_path / "second", "checkpoint": again})
    finally:
        memory.rm("/run", recursive=True)
    assert second.losses == pytest.approx(whole.losses[5:], rel=1e-6)
    assert_close(second, whole, tolerance=1e-6)


def test_a_run_from_a_file_logs_to_mlflow_and_goes_on_from_the_storage(site: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    run = {
        **OWN,
        "model": {**OWN["model"], "vocab_size": 300},  # type: ignore[dict-item]
        "data": {"type": "text", "path": "text.txt", "seq_len": 16, "document_mask": False},
        "batch": {"total": 4, "micro": 1},
        "work_dir": "first",
        "strategy": "zero3",
        "train": {"max_steps": 6, "stop_after": 3},
        "log": {
            "every": 1,
            "console": "plain",
            "sinks": ["jsonl", {"type": "mlflow", "uri": f"file:{tmp_path}/mlflow"}],
        },
        "checkpoint": {"resume": "auto", "storage": {"type": "fsspec", "url": f"local://{tmp_path}/store"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    plait("train", "run.yaml", "--nproc", "2", cwd=tmp_path)
    shutil.rmtree(tmp_path / "first" / "checkpoints")
    told = plait("train", "run.yaml", "train.stop_after=null", "work_dir=second", "--nproc", "4", cwd=tmp_path)
    assert "step 6" in told or "6/6" in told
    client = MlflowClient(tracking_uri=f"file:{tmp_path}/mlflow")
    experiment = client.get_experiment_by_name("plait")
    assert experiment is not None
    logged = client.search_runs([experiment.experiment_id])
    steps = {point.step for each in logged for point in client.get_metric_history(each.info.run_id, "train/loss")}
    weights = {
        point.step for each in logged for point in client.get_metric_history(each.info.run_id, "train/largest_weight")
    }
    assert steps == weights == {1, 2, 3, 4, 5, 6}
