"""`plait.testing` passes parts that are right, and says of others where they are wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from plait import Storage
from plait.errors import ConfigError
from plait.launch.failure import _remove_abandoned
from plait.testing import RankPool, assert_same_after_resume, assert_same_maths
from plait.testing.maths import strategy_of
from plait.testing.runs import MODEL
from plait.trainer import Hook
from tests.refusals import missing, refused


class Drift(Hook):
    """Changes one weight where there are several ranks, from a step on: a part that is right on one process only."""

    def __init__(self, step: int, by: float = 0.25) -> None:
        self.step, self.by = step, by

    def after_step(self, runner: Any, result: Any) -> None:
        if runner.world.size > 1 and runner.step == self.step:
            with torch.no_grad():
                runner.engine.weights()["norm.weight"].add_(self.by)
            runner.engine.weights_changed()


class Forgetful(Hook):
    """Moves weights by a count of its own, which no checkpoint has."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, runner: Any, result: Any) -> None:
        self.count += 1
        with torch.no_grad():
            runner.engine.weights()["norm.weight"].add_(0.1 * self.count)
        runner.engine.weights_changed()


class Remembering(Forgetful):
    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]


def test_a_part_that_is_right_passes_under_every_strategy() -> None:
    found = assert_same_maths(
        optim={"type": "AdamW", "lr": 1e-3}, schedule={"type": "LinearLR"}, strategies=("ddp", "zero3", "pp2"),
        train={"clip_norm": 0.5}, hooks=[{"type": "ema"}],
    )  # fmt: skip
    assert found == {"ddp": "same", "zero3": "same", "pp2": "same"}


def test_the_first_difference_is_named_by_strategy_step_tensor_and_values() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_same_maths(strategies=("ddp",), hooks=[Drift(2)])
    text = str(caught.value)
    assert "ddp on 2 ranks" in text
    assert not missing(text, "step 2", "model.norm.weight")


def test_a_small_difference_is_found_by_a_small_tolerance_alone() -> None:
    given: dict[str, Any] = {"strategies": ("ddp",), "steps": 1, "hooks": [Drift(1, by=3e-5)], "optim": {"lr": 1e-2}}
    assert_same_maths(tolerance=0.5, **given)
    with refused(AssertionError, "ddp on 2 ranks", "step 1", "model.norm.weight"):
        assert_same_maths(tolerance=1e-4, **given)


def test_bf16_has_a_tolerance_of_its_own() -> None:
    assert assert_same_maths(strategies=("zero2",), steps=2, dtype="bf16") == {"zero2": "same"}


def test_what_a_strategy_refuses_is_a_failure_unless_it_is_allowed() -> None:
    three_heads = {**MODEL, "heads": 3, "kv_heads": 3}
    given: dict[str, Any] = {"model": three_heads, "strategies": ("tp2",), "steps": 1}
    with refused(AssertionError, "tp2", "heads", "allow_refusal=True"):
        assert_same_maths(**given)
    found = assert_same_maths(allow_refusal=True, **given)
    assert "heads" in found["tp2"]


def test_state_that_is_in_no_checkpoint_is_found_by_resuming() -> None:
    assert_same_after_resume(hooks=[Remembering()])
    with refused(AssertionError, "zero2 on 2", "step 2", "step 3", "model.norm.weight"):
        assert_same_after_resume(hooks=[Forgetful()])


class Kept(Storage):
    """A folder that says what is asked of it."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def write(self, name: str, source: Path) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def read(self, name: str, target: Path) -> None:
        self.root.with_suffix(".read").touch()
        shutil.copyfile(self.root / name, target)

    def names(self, prefix: str) -> list[str]:
        found = (str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        return [name for name in found if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        (self.root / name).unlink()


def test_a_storage_is_what_the_second_run_resumes_from(tmp_path: Path) -> None:
    storage = {"type": f"{__name__}:Kept", "root": str(tmp_path / "kept")}
    assert_same_after_resume(checkpoint={"storage": storage}, resumed=("zero3", 2))
    assert (tmp_path / "kept.read").exists()


@pytest.mark.parametrize("checkpoint", [{"last": False}, plait.Checkpoint(resume="auto")])
def test_what_resuming_decides_is_refused_by_its_key(checkpoint: Any) -> None:
    key = "last" if isinstance(checkpoint, dict) else "resume"
    with refused(ConfigError, key=f"checkpoint.{key}"):
        assert_same_after_resume(checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("word", "section", "ranks"),
    [
        ("ddp", {"zero": 0}, 2),
        ("tp2", {"layout": {"tp": 2}}, 2),
        ("zero3+tp2", {"zero": 3, "layout": {"tp": 2}}, 4),
        ("zero1+pp2+tp2", {"zero": 1, "layout": {"pp": 2, "tp": 2}}, 8),
        ({"zero": 2}, {"zero": 2}, 2),
        ({"layout": {"dp_shard": 2, "tp": 2}, "zero": 3}, {"layout": {"dp_shard": 2, "tp": 2}, "zero": 3}, 4),
    ],
    ids=str,
)
def test_a_word_for_a_strategy_says_how_many_ranks_show_it(word: Any, section: Any, ranks: int) -> None:
    assert strategy_of(word) == (section, ranks)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"strategies": ("zero7",)}, "strategies"),
        ({"strategies": ("ddp+zero2",)}, "strategies"),
        ({"strategy": "ddp"}, "strategy"),
        ({"work_dir": "x"}, "work_dir"),
        ({"steps": 0}, "steps"),
        ({"model": nn.Linear(2, 2)}, "data"),
        ({"loss_fn": lambda outputs, batch: outputs}, "loss_fn"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assert_same_maths(**given)
    assert [problem.path for problem in caught.value.problems] == [key]


# ---- in somebody else's package

PART = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x)


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(32, 6, generator=generator)
        self.y = torch.randint(0, 4, (32,), generator=generator)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])


def wrong(outputs, batch):
    import torch.distributed as dist

    factor = 1.0 + (dist.get_rank() if dist.is_initialized() else 0)
    return factor * loss(outputs, batch)
"""
CALL = "assert_same_maths(model=my_part.Net, data=my_part.Points(), loss_fn=my_part.{loss}, strategies=('zero2',))"
HEAD = "import my_part\nfrom plait.testing import assert_same_maths\n\n"


def in_a_folder(folder: Path, files: dict[str, str], *command: str) -> tuple[int, str]:
    for name, text in {"my_part.py": PART, **files}.items():
        (folder / name).write_text(text)
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_it_runs_in_the_tests_of_somebody_elses_package(tmp_path: Path) -> None:
    tests = HEAD + f"def test_right():\n    {CALL.format(loss='loss')}\n\n\n"
    tests += f"def test_wrong():\n    {CALL.format(loss='wrong')}\n"
    code, said = in_a_folder(tmp_path, {"test_part.py": tests}, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
    assert code == 1
    assert "1 failed, 1 passed" in said
    assert not missing(said, "zero2 on 2 ranks", "step 1", "loss")


def test_it_runs_in_a_script_which_has_to_be_guarded(tmp_path: Path) -> None:
    script = HEAD + "if __name__ == '__main__':\n    " + f"print({CALL.format(loss='loss')})\n"
    code, said = in_a_folder(tmp_path, {"script.py": script}, "script.py")
    assert (code, said.strip().splitlines()[-1]) == (0, "{'zero2': 'same'}")
    code, said = in_a_folder(tmp_path, {"script.py": HEAD + CALL.format(loss="loss")}, "script.py")
    assert code == 1
    assert "if __name__ == '__main__'" in said


def test_it_needs_no_pytest() -> None:
    code = "import sys, plait.testing; print('pytest' in sys.modules, 'hypothesis' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False False"


def _makes_a_group(rank: int, size: int) -> int:
    group: Any = torch.distributed.new_group(list(range(size)))
    return int(group.size())


def test_a_launcher_that_starts_meanwhile_does_not_cut_ranks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes folders that killed launchers have left; the one by which these ranks meet is not such a folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RankPool(2, timeout_s=60.0) as pool:
        assert pool.run(_makes_a_group) == [2, 2]
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        _remove_abandoned(tmp_path)
        assert pool.run(_makes_a_group) == [2, 2]
