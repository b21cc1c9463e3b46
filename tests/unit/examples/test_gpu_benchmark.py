"""The comparison on a GPU, made small enough for a CPU: every part of it runs, and a row that cannot says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.refusals import missing

ROOT = Path(__file__).resolve().parents[3]
PATHS = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))


def run(folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--json", "found.json", *options]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATHS}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "found.json").read_text())


def test_rows_stand_side_by_side_and_one_that_fails_says_why(tmp_path: Path) -> None:
    text, found = run(tmp_path, "--rows", "raw-eager,fsdp2,fabric,plait-compile", "--sizes", "8b,resnet50")
    for size, unit in (("8b", "tokens"), ("resnet50", "images")):
        rows = found["sizes"][size]
        for name in ("raw-eager", "plait-compile"):
            assert rows[name]["per_s"] > 0, rows[name]
            assert rows[name]["unit"] == unit
        assert f"{unit}/s" in text
    assert found["sizes"]["8b"]["fsdp2"]["peak_gib"] > 0
    fabric = found["sizes"]["8b"]["fabric"]
    assert "error" not in fabric or fabric["error"] in text


def test_losses_stand_beside_those_of_plain_torch(tmp_path: Path) -> None:
    text, found = run(tmp_path, "--losses", "--rows", "plain-bf16,plait-bf16", "--text", str(ROOT / "README.md"))
    plain, ours = (found["losses"][name]["loss"] for name in ("plain-bf16", "plait-bf16"))
    assert abs(plain - ours) < 0.02
    assert not missing(text, "plain-bf16", "plait-bf16")
