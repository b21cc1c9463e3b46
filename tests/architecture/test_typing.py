"""What users write is checked as they write it: editors and type checkers know every name, keyword and value."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOOD, BAD = (ROOT / "tests" / "typing" / name for name in ("good.py", "bad.py"))
FILES = [GOOD, BAD, *sorted(path for path in (ROOT / "examples").rglob("*.py") if path.name != "before.py")]
"""`before.py` is a script for another framework, as its users write it."""

Errors = dict[Path, set[int]]


def by_mypy() -> tuple[Errors, str]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--explicit-package-bases",
        *map(str, FILES),
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found: Errors = {}
    for name, line in re.findall(r"(?m)^(\S+\.py):(\d+): error:", output):
        found.setdefault(ROOT / name, set()).add(int(line))
    return found, output


def by_pyright() -> tuple[Errors, str]:
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *map(str, FILES)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found: Errors = {}
    for entry in json.loads(output)["generalDiagnostics"]:
        if entry["severity"] == "error":
            found.setdefault(Path(entry["file"]), set()).add(entry["range"]["start"]["line"] + 1)
    return found, output


@pytest.mark.parametrize("check", [by_mypy, by_pyright], ids=["mypy", "pyright"])
def test_good_uses_pass_and_bad_ones_are_errors_where_they_are(check: Callable[[], tuple[Errors, str]]) -> None:
    found, output = check()
    marked = {number for number, line in enumerate(BAD.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert len(marked) > 20
    assert found == {BAD: marked}, output
