"""The porting guides: what is ported does what the script before it did."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config import parse_sections
from plait.models import build_model

pytestmark = pytest.mark.timeout(900)  # whole scripts, one after the other
PORTING = Path(__file__).parents[2] / "examples" / "porting"
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, script: str, *words: str, ranks: int = 2) -> dict[str, float]:
    """What a script prints: each number under the words before it."""
    command = [sys.executable, *(TWO_RANKS if ranks == 2 else ()), str(PORTING / script), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    # Threads of gloo may end a script of plain torch with an abort when all is done: its lines are counted instead.
    assert done.returncode == 0 or script.endswith("before.py"), done.stderr
    found = {}
    for line in re.findall(r"^(?:step|epoch|eval|val_loss) .*$", done.stdout, flags=re.MULTILINE):
        where = " ".join(line.split()[:2])
        for name, value in re.findall(r"(\w*loss|val_accuracy) (\S+)", line):
            found[f"{where} {name}" if not line.startswith("val_loss") else f"{len(found)} {name}"] = float(value)
    return found


def compare(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 4
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-5), name


@pytest.mark.parametrize(
    ("guide", "count", "strategies"),
    [("ddp", 10, ("ddp", "zero3")), ("fsdp2", 6, ("fsdp",)), ("nanogpt", 14, ("zero2",))],
)
def test_a_ported_script_has_the_losses_of_the_one_before(
    tmp_path: Path, guide: str, count: int, strategies: tuple[str, ...]
) -> None:
    expected = run(tmp_path, f"{guide}/before.py")
    assert len(expected) == count
    for strategy in strategies:
        compare(run(tmp_path, f"{guide}/after.py", "--strategy", strategy), expected)


def test_the_ported_checkpoint_is_resumed_under_another_strategy(tmp_path: Path) -> None:
    whole = run(tmp_path, "ddp/after.py", "--save", "saved")
    resumed = run(tmp_path, "ddp/after.py", "--resume", "saved/epoch-0", "--strategy", "zero2")
    assert resumed.keys() == {name for name in whole if re.match(r"step [5678]|epoch 1", name)}
    compare(resumed, {name: whole[name] for name in resumed})


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"porting_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def train_plainly(model: nn.Module, steps: list[list[Any]], optimizer: Any, schedule: Any, loss: Any) -> list[float]:
    losses = []
    for micro_batches in steps:
        terms: list[Tensor] = [loss(model, batch) / len(micro_batches) for batch in micro_batches]
        torch.stack(terms).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(terms).sum().detach()))
    return losses


def test_the_ported_lightning_module_does_what_a_plain_loop_does(tmp_path: Path) -> None:
    after = module(PORTING / "lightning" / "after.py")
    torch.manual_seed(0)
    model = after.Classifier()
    batches = list(torch.utils.data.DataLoader(after.points(128, 1), after.BATCH))
    steps = [batches[i : i + 2] for i in range(0, len(batches), 2)] * after.EPOCHS
    optimizer = torch.optim.AdamW(model.parameters(), lr=after.LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=after.STEPS)
    losses = train_plainly(model, steps, optimizer, schedule, lambda net, batch: after.loss(net(batch[0]), batch))
    for ranks, strategy in ((1, "single"), (2, "zero2")):
        words = ("--strategy", strategy, "--work-dir", f"run-{strategy}")
        found = run(tmp_path, "lightning/after.py", *words, ranks=ranks)
        assert [value for name, value in found.items() if name.startswith("step")] == pytest.approx(losses, abs=2e-5)


def test_the_lightning_script_itself_has_the_same_losses(tmp_path: Path) -> None:
    before = run(tmp_path, "lightning/before.py", ranks=1)
    assert list(run(tmp_path, "lightning/after.py", ranks=1).values()) == pytest.approx(list(before.values()), abs=2e-5)


def test_the_ported_torchtitan_job_does_what_a_plain_loop_does(tmp_path: Path) -> None:
    after = module(PORTING / "torchtitan" / "after.py")
    sections = {key: value for key, value in after.SECTIONS.items() if key in ("optim", "schedule", "batch", "train")}
    config = parse_sections(model=after.MODEL, **sections).config
    start = plait.prepare(after.MODEL, device="cpu").state_tensors()
    assert config.model is not None
    model = build_model(config.model)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in start.items()})
    runs = {}
    for ranks, words in ((1, ()), (2, ()), (2, ("strategy.layout.tp=2",))):
        folder = tmp_path / f"{ranks}-{len(words)}"
        folder.mkdir()
        runs[ranks, words] = list(run(folder, "torchtitan/after.py", *words, ranks=ranks).values())
        assert (folder / "runs" / "titan" / "checkpoints" / "step-00000004").is_dir()
    rows, order = after.Rows(), orders(after, tmp_path)
    steps = [
        [{key: torch.stack([rows[i][key] for i in step[m : m + 2]]) for key in rows[0]} for m in range(0, 8, 2)]
        for step in order
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, after.STEPS))
    losses = train_plainly(model, steps, optimizer, rates, lambda net, batch: net(**batch).mean())
    for found in runs.values():
        assert found == pytest.approx(losses, abs=2e-5)


def rate(step: int, total: int) -> float:
    if step < 2:
        return 0.5 + 0.25 * step
    return 0.1 + 0.9 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - 2) / (total - 2))))) / 2


def orders(after: Any, folder: Path) -> list[list[int]]:
    """The rows of each step, in the run's own order."""
    numbered = [{"index": torch.tensor(i)} for i in range(len(after.Rows()))]
    seen: list[list[int]] = []

    class Count(nn.Linear):
        def forward(self, index: Tensor) -> Tensor:
            seen.append(index.tolist())
            loss: Tensor = self.weight.sum() * 0
            return loss

    with plait.Runner(
        Count(1, 1), numbered, batch=after.SECTIONS["batch"], train={"max_steps": after.STEPS}, device="cpu",
        work_dir=str(folder / "order"), checkpoint={"last": False}, log={"console": "none", "sinks": []},
    ) as runner:  # fmt: skip
        runner.train()
    return [[i for micro in seen[s : s + 4] for i in micro] for s in range(0, len(seen), 4)]
