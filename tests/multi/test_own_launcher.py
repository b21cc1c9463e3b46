"""`plait launch --launcher package.module:name`: ranks start by a command of one's own, and all else stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.launch.options import parse_options
from plait.launch.prepare import prepare_launch

SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""
HERE = "tests.multi.own_launcher"
ROOT = Path(__file__).parents[2]


def launch(folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    flags = ["--launcher", f"{HERE}:ShellLauncher", "--launcher_args", "two words", "--nproc_per_node", "2"]
    words = [sys.executable, "-m", "plait", "launch", *flags, str(script), str(folder), str(code)]
    marks = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
    return subprocess.run(words, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)


def test_ranks_are_started_by_a_command_of_ones_own(tmp_path: Path) -> None:
    done = launch(tmp_path, 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "started with two words" in done.stdout
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2", "2"]


def test_the_exit_code_of_a_rank_is_the_jobs(tmp_path: Path) -> None:
    done = launch(tmp_path, 7)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "rank 1" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["starts_nothing", "HERE", "NoSuch"])
def test_what_is_no_launcher_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words = ["--launcher", f"tests.multi.test_own_launcher:{name}" if name == "HERE" else f"{HERE}:{name}", "train.py"]
    setup = prepare_launch(parse_options(words), words)
    with pytest.raises(ConfigError) as caught:
        setup.commands()
    assert caught.value.problems[0].path == "--launcher"
