"""A small language model on a small text, and the command that trains it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

TEXT = {"type": "text", "path": "corpus.txt", "vocab_size": 300, "seq_len": 16, "cache": "cache"}
DESCRIPTION: dict[str, Any] = {
    "work_dir": "run",
    "device": "cpu",
    "model": {"type": "gpt", "vocab_size": 300, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16},
    "data": {**TEXT, "split": "train"},
    "val_data": {**TEXT, "split": "val"},
    "batch": {"total": 4},
    "train": {"max_steps": 6, "val_every": 3},
    "log": {"every": 2},
}


@dataclass
class Place:
    """A folder with a run description in it."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        """The installed command, as a user would type it."""
        installed = Path(sys.executable).with_name("plait")
        start = [str(installed)] if installed.exists() else [sys.executable, "-m", "plait"]
        return [*start, *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(self.command(*arguments), cwd=self.folder, capture_output=True, text=True, timeout=240)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start it, with its output in pipes."""
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(*arguments), cwd=self.folder, **{**settings, **options})

    def describe(self, name: str = "run.yaml", **changes: Any) -> str:
        """Write a run description, without the keys that are None; returns its name."""
        found = {key: value for key, value in {**DESCRIPTION, **changes}.items() if value is not None}
        (self.folder / name).write_text(yaml.safe_dump(found))
        return name


def _make(folder: Path) -> Place:
    lines = (f"line {i}: {random.random()} and {random.random()}\n" for i in range(80))
    (folder / "corpus.txt").write_text("".join(lines))
    place = Place(folder)
    place.describe()
    return place


@pytest.fixture(scope="session")
def make_place() -> Callable[[Path], Place]:
    return _make


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return _make(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, subprocess.CompletedProcess[str]]:
    """A run that has ended, in one process, with a hook from the current folder."""
    place = _make(tmp_path_factory.mktemp("trained"))
    (place.folder / "own_hook.py").write_text(
        "from pathlib import Path\n"
        "from plait.trainer import Hook\n"
        "class Note(Hook):\n"
        "    def after_run(self, runner):\n"
        "        Path('note.txt').write_text(f'{runner.step} steps')\n"
    )
    place.describe(hooks=[{"type": "import", "target": "own_hook:Note"}])
    return place, place.run("train", "run.yaml", "optim.lr=1e-2")
