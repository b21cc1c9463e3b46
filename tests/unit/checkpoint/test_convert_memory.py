"""A conversion holds a few tensors, however large the checkpoint is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.samples import write_hf, write_plait

TENSORS, SHAPE = 50, (1024, 2048)
MIB = 8
"""Of one tensor."""

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode():  # one of the writers uses it, and what torch loads for it is no memory of tensors
    torch.empty(1)
import plait.checkpoint.save
from plait.checkpoint.convert import Description, convert, open_source, select_for
def peak():  # not `getrusage`, which starts from the parent's
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
before = peak()
path, target, to = sys.argv[1:]
with open_source(Path(path)) as source:
    convert(select_for(source, to, optimizer=False), Path(target), to, description=Description({}))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("large")
    state = {f"model.layers.{number}.weight": torch.randn(SHAPE) for number in range(TENSORS)}
    torch.save({name.removeprefix("model."): tensor for name, tensor in state.items()}, folder / "weights.pt")
    return {
        "torch": folder / "weights.pt",
        "plait": write_plait(folder / "plait", state),
        "hf": write_hf(folder / "hf", state),
    }


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak of memory")
@pytest.mark.parametrize(("kind", "to"), [("torch", "hf"), ("plait", "torch"), ("hf", "plait")])
def test_memory_is_bounded(places: dict[str, Path], tmp_path: Path, kind: str, to: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(places[kind]), str(tmp_path / "to"), to]
    grown = int(subprocess.check_output(command, text=True, timeout=240))
    print(f"{grown} MiB for a checkpoint of {TENSORS * MIB} MiB")
    assert grown < TENSORS * MIB / 4
