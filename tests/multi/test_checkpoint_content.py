"""What goes into a checkpoint and comes back: in part, in the background, on several disks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from plait import Runner
from plait.checkpoint import CheckpointFolder, open_checkpoint
from plait.errors import CheckpointError
from tests.multi.ranks import RankPool
from tests.multi.toys import WIDTH, Classifier, Outcome, Points, assert_close, fit, fit_with, whole_tensors
from tests.refusals import missing, refused


def checkpoint_of(run: Path, step: int) -> Path:
    return CheckpointFolder(run / "checkpoints").path_of(step)


# ---- in the background


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(
    two_ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    sections: dict[str, Any] = {"strategy": strategy, "hooks": [{"type": "ema", "decay": 0.8}]}
    for name in ("waiting", "background"):
        checkpoint = {"every": 1, "keep": 9, "async_save": name == "background"}
        train = {"max_steps": 12, "stop_after": 6}
        two_ranks.run(fit_with, {**sections, "work_dir": tmp_path / name, "checkpoint": checkpoint, "train": train}, {})
    for step in range(1, 7):
        waiting, background = (checkpoint_of(tmp_path / name, step) for name in ("waiting", "background"))
        for file in sorted(path.name for path in waiting.glob("rank-*")):
            assert (waiting / file).read_bytes() == (background / file).read_bytes()
    sections["train"] = {"max_steps": 12}
    resume = {"work_dir": tmp_path / "background", "checkpoint": {"resume": "auto", "async_save": True}}
    resumed = two_ranks.run(fit_with, {**sections, **resume}, {})
    whole = two_ranks.run(fit_with, {**sections, "work_dir": tmp_path / "whole"}, {})
    assert resumed[0].losses == whole[0].losses[6:]
    assert_close(resumed[0], whole[0], tolerance=0)


def test_a_save_that_fails_is_told_and_training_goes_on_to_one_that_succeeds(tmp_path: Path) -> None:
    for background in (False, True):
        run = tmp_path / str(background)
        blocked = checkpoint_of(run, 2).with_name(".step-00000002.tmp")
        blocked.parent.mkdir(parents=True)
        blocked.write_text("a file where the folder should be")
        sections = {
            "work_dir": run,
            "train": {"max_steps": 3},
            "checkpoint": {"every": 1, "async_save": background},
            "log": {"console": "none", "sinks": ["jsonl"]},
        }
        outcome = fit(0, 1, sections)
        assert outcome.steps == 3
        names = [path.name for path in CheckpointFolder(run / "checkpoints").complete()]
        assert names == ["step-00000001", "step-00000003"]
        told = "".join(path.read_text() for path in run.rglob("*.jsonl"))
        assert "step-00000002" in told


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    for background in (False, True):
        run = tmp_path / str(background)
        (run / "checkpoints").mkdir(parents=True)
        (run / "checkpoints" / ".step-00000003.tmp").write_text("in the way")
        sections = {"work_dir": run, "train": {"max_steps": 3}, "checkpoint": {"async_save": background}}
        with refused(CheckpointError, run / "checkpoints" / "step-00000003"):
            fit(0, 1, sections)


# ---- only what is trained


class LoraPoints(nn.Module):
    """Takes the points of the classification task, trains a few adapters."""

    def __init__(self, seed: int = 5, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDTH, width).requires_grad_(False)
        self.deep = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(width, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, label: Tensor, number: Tensor) -> Tensor:
        self.count += 1
        return (self.adapter(self.deep(self.base(x)).tanh()).squeeze(-1) - label).square().mean()


def fit_lora(rank: int, size: int, sections: dict[str, Any], seed: int = 5) -> dict[str, Tensor] | str:
    settings: dict[str, Any] = {
        "seed": 3,
        "device": "cpu",
        "batch": {"total": 4},
        "log": {"console": "none", "sinks": []},
    }
    try:
        with Runner(model=LoraPoints(seed), data=Points(24), **settings, **sections) as runner:
            runner.train()
            return whole_tensors(runner)
    except CheckpointError as error:
        return str(error)


def test_a_checkpoint_of_what_is_trained_is_as_large_as_that_and_goes_on_under_any_layout(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    def sections(name: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
        return {"work_dir": tmp_path / name, "train": {"max_steps": steps}, "checkpoint": checkpoint}

    whole = fit_lora(0, 1, sections("whole", 6))
    assert isinstance(whole, dict)
    two_ranks.run(fit_lora, {**sections("part", 3, trainable_only=True), "strategy": "zero3"})
    checkpoint = open_checkpoint(checkpoint_of(tmp_path / "part", 3))
    model = {name for name in checkpoint.index.tensors if name.startswith("model.")}
    assert model == {"model.adapter.weight", "model.adapter.bias", "model.count"}
    assert (
        checkpoint.manifest.bytes
        < checkpoint_of(tmp_path / "whole", 6).joinpath("rank-00000.safetensors").stat().st_size
    )
    resumed = fit_lora(0, 1, sections("part", 6, trainable_only=True, resume="auto"))
    assert isinstance(resumed, dict)
    assert all(torch.allclose(resumed[name], tensor, atol=1e-6) for name, tensor in whole.items())


def test_on_another_base_it_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = {"trainable_only": True}
    fit_lora(0, 1, {"work_dir": tmp_path, "train": {"max_steps": 2}, "checkpoint": checkpoint})
    resume = {"work_dir": tmp_path, "train": {"max_steps": 4}, "checkpoint": {**checkpoint, "resume": "auto"}}
    for told in two_ranks.run(fit_lora, {**resume, "strategy": "zero3"}, 6):
        assert not missing(told, "step-00000002", "`model`", "`seed`")
    assert isinstance(two_ranks.run(fit_lora, {**resume, "strategy": "zero3"}, 5)[0], dict)


def test_each_rank_of_a_pipeline_leaves_out_its_own(two_ranks: RankPool, tmp_path: Path) -> None:
    run = {"work_dir": tmp_path, "strategy": {"layout": {"pp": 2}}, "checkpoint": {"trainable_only": True}}
    before = two_ranks.run(fit_pipeline, {**run, "train": {"max_steps": 2}}, 5)
    saved = open_checkpoint(checkpoint_of(tmp_path, 2))
    assert {name for name in saved.index.tensors if name.startswith("model.")} == {"model.1.weight", "model.2.weight"}
    assert saved.manifest.state["frozen"]["names"] == ["model.0.weight", "model.3.weight"]
    resume = {**run, "train": {"max_steps": 4}, "checkpoint": {"trainable_only": True, "resume": "auto"}}
    assert all(
        not missing(told, "step-00000002", "`model`", "`seed`") for told in two_ranks.run(fit_pipeline, resume, 6)
    )
    after = two_ranks.run(fit_pipeline, resume, 5)
    assert after[0].keys() == before[0].keys()


def fit_pipeline(rank: int, size: int, sections: dict[str, Any], seed: int) -> dict[str, Tensor] | str:
    """Four layers in a row, of which the outer two do not train."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    settings: dict[str, Any] = {"seed": 3, "device": "cpu", "batch": {"total": 4, "accumulation": 2}}
    settings["log"] = {"console": "none", "sinks": []}
    data = Points(24)
    try:
        with Runner(model=model, data=data, loss_fn=mean_square, **settings, **sections) as runner:
            runner.train()
            return whole_tensors(runner)
    except CheckpointError as error:
        return str(error)


def mean_square(outputs: Tensor, _batch: Any) -> Tensor:
    return outputs.square().mean()


# ---- another model, by explicit rule


def test_what_may_differ_is_named_and_told(tmp_path: Path) -> None:
    fit(0, 1, {"work_dir": tmp_path})

    def resume(*patterns: str) -> Runner:
        model = Classifier()
        model.out = nn.Linear(16, 7)
        model.extra = nn.Linear(3, 3)
        return Runner(
            model=model,
            data=Points(22),
            optim={"type": "AdamW", "lr": 1e-2},
            batch={"total": 4},
            train={"max_steps": 20},
            checkpoint={"resume": "auto", "partial": patterns},
            work_dir=tmp_path,
            device="cpu",
            log={"console": "none", "sinks": []},
        )

    with resume("model.extra.*") as runner, pytest.raises(CheckpointError) as caught:
        runner.setup()
    assert "model.out.weight" in str(caught.value)
    assert "model.extra" not in str(caught.value)
    with resume("model.ghost.*") as runner, refused(CheckpointError, "checkpoint.partial", "'model.ghost.*'"):
        runner.setup()
    with resume("model.extra.*", "model.out.*", "optim.out.*") as runner:
        runner.setup()
        tensors, saved = runner.engine.state_tensors(), open_checkpoint(checkpoint_of(tmp_path, 12))
        assert runner.step == 12
        assert "optim.hidden.weight.exp_avg" in tensors
        assert "optim.out.weight.exp_avg" not in tensors
        assert tensors["model.out.weight"].shape == (7, 16)
        assert saved.index.tensors["model.out.weight"].shape == (4, 16)
        runner.train()
        assert runner.step == 20


# ---- several disks


def on_its_own_node(
    rank: int, size: int, root: str, sections: dict[str, Any], options: dict[str, Any]
) -> Outcome | str:
    """Train as if every rank were alone on a machine with a disk of its own."""
    with mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        try:
            return fit(rank, size, {"work_dir": Path(root) / f"node-{rank}", **sections}, **options)
        except CheckpointError as error:
            return str(error)


NODE_LOCAL = {"node_local": True, "every": 2}


def test_each_node_keeps_its_own_shards_and_a_resume_fetches_what_it_needs(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    whole = fit(0, 1, {"work_dir": tmp_path / "whole"})
    sections = {"strategy": "zero3", "checkpoint": NODE_LOCAL}
    two_ranks.run(on_its_own_node, str(tmp_path), sections, {"stop_at": 5})
    names = {path.name for path in checkpoint_of(tmp_path / "node-1", 5).iterdir()}
    assert names == {"rank-00001.safetensors", "index.json", "manifest.json"}
    # The same ranks, other shards: what is whole on every rank is read from both nodes.
    resume = {"strategy": "ddp", "checkpoint": {**NODE_LOCAL, "resume": "auto"}}
    for found in two_ranks.run(on_its_own_node, str(tmp_path), resume, {"stop_at": 9}):
        assert found.losses == pytest.approx(whole.losses[5:9], rel=1e-5)
    # Nodes that were not there before have nothing, and get everything.
    resume["strategy"] = "zero2"
    for found in four_ranks.run(on_its_own_node, str(tmp_path), resume, {}):
        assert found.losses == pytest.approx(whole.losses[9:], rel=1e-5)
        assert_close(found, whole, tolerance=1e-5)
    left = [path.name for path in tmp_path.glob("node-*/checkpoints/.*")]
    assert not left


def test_a_step_that_one_node_lost_is_passed_over_and_a_folder_that_is_not_shared_is_told(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    sections = {"strategy": "zero3", "checkpoint": NODE_LOCAL, "train": {"max_steps": 12}}
    first = two_ranks.run(on_its_own_node, str(tmp_path), sections, {"stop_at": 5})
    checkpoint_of(tmp_path / "node-1", 5).joinpath("rank-00001.safetensors").unlink()
    resume = {**sections, "checkpoint": {**NODE_LOCAL, "resume": "auto"}}
    second = two_ranks.run(on_its_own_node, str(tmp_path), resume, {"stop_at": 5})
    assert second[0].losses == first[0].losses[4:]  # from step 4
    shutil.rmtree(tmp_path / "node-0")
    for told in two_ranks.run(on_its_own_node, str(tmp_path), resume, {}):
        assert "rank-00000.safetensors" in told
    for told in two_ranks.run(on_its_own_node, str(tmp_path / "b"), {"strategy": "zero3"}, {}):
        assert "checkpoint.node_local: true" in told


def test_a_run_that_any_node_holds_is_not_written_over(two_ranks: RankPool, tmp_path: Path) -> None:
    sections = {"strategy": "zero3", "checkpoint": NODE_LOCAL}
    two_ranks.run(on_its_own_node, str(tmp_path), sections, {"stop_at": 2})
    shutil.rmtree(tmp_path / "node-0")
    for told in two_ranks.run(on_its_own_node, str(tmp_path), sections, {}):
        assert not missing(told, "step-00000002", "rank 1", "checkpoint.resume=auto")
