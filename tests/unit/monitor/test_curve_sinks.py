"""TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.errors import MissingExtraError
from plait.monitor.events import EventKind
from plait.monitor.trackers import TensorBoardSink, WandbSink


def test_tensorboard_reads_the_curves_back(tmp_path: Path, make_run: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(0, 6, grad_norm=1.5)
    sink = TensorBoardSink(tmp_path)
    for event in run:
        sink.write(event)
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = found.Tags()["tensors"]
    assert {"train/loss", "train/lr", "train/grad_norm", "val/loss", "val/accuracy/top1"} <= set(tags)
    assert "train/eta" not in tags
    curve = [(e.step, e.tensor_proto.float_val[0]) for e in found.Tensors("train/loss")]
    trained = [e for e in run if e.kind is EventKind.TRAIN]
    assert [step for step, _ in curve] == [e.step for e in trained]
    assert [value for _, value in curve] == pytest.approx([e.data["loss"] for e in trained])


@pytest.mark.parametrize(("package", "build"), [
    ("tensorboard", lambda path: TensorBoardSink(path)),
    ("wandb", lambda path: WandbSink(path, None)),
])  # fmt: skip
def test_an_absent_package_is_named_with_its_remedy(
    package: str, build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(MissingExtraError, f"'{package}'", f"plait[{package}]"):
        build(tmp_path)


def test_wandb_keeps_a_run_on_disk_without_an_account(
    tmp_path: Path, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    names = []
    for run in (make_run(0, 3), make_run(3, 6)):
        sink = WandbSink(tmp_path, "plait-tests")
        for event in run:
            sink.write(event)
        sink.close()
        names = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(set(names)) == 1, "a resumed run is the same run"
