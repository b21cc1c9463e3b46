"""The table of versions: a row that runs changes its own line and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import matrix


def result(torch: str, *, failed: int = 0) -> dict[str, Any]:
    counts = {"passed": 3, "failed": failed, "refused": 0, "skipped": 0}
    return {
        "versions": {"Python": "3.11.7", "torch": torch, "transformers": "5.23.0"},
        "columns": dict.fromkeys(matrix.COLUMNS, counts),
    }


def lines(page: Path) -> list[str]:
    return [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| torch")]


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    both = tmp_path / "versions.md", tmp_path / "zh.md"
    for page in both:
        page.write_text("before\n<!-- matrix -->\n<!-- end of matrix -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(matrix, "PAGES", both)
    return both


def test_one_row_changes_its_own_line_only(pages: tuple[Path, Path]) -> None:
    matrix.write_tables({"torch 2.15": result("2.15.0"), "torch 2.11": result("2.11.0", failed=2)})
    before = [lines(page) for page in pages]
    matrix.write_tables({"torch 2.12": result("2.12.1")})
    matrix.write_tables({"torch 2.11": {"not run": "no such Python"}})
    for (first, last), page in zip(before, pages, strict=True):
        new = lines(page)
        assert [new[0], new[2]] == [first, last]
        assert "2.12.1" in new[1]
        assert page.read_text(encoding="utf-8").startswith("before\n")
        assert page.read_text(encoding="utf-8").endswith("-->\nafter\n")
    assert "**2 失败**" in before[1][0]


def test_lines_of_another_set_of_columns_do_not_stay(pages: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix.write_tables({"torch 2.15": result("2.15.0")})
    monkeypatch.setattr(matrix, "COLUMNS", {"plan": ()})
    matrix.write_tables({"torch 2.12": {**result("2.12.1"), "columns": {"plan": result("")["columns"]["plan"]}}})
    assert [line.split(" | ")[0] for line in lines(pages[0])] == ["| torch 2.12"]


def test_every_test_of_the_columns_is_there() -> None:
    named = [each for tests in matrix.COLUMNS.values() for each in tests]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    ended = subprocess.run(command, cwd=matrix.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    collected = ended.stdout.splitlines()
    assert [each for each in named if not any(line.startswith(each) for line in collected)] == []


TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): pass
class UnsupportedVersionError(Exception): pass
def test_refused(): raise UnsupportedVersionError
"""


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(TESTS, encoding="utf-8")
    found = matrix.judge(Path(sys.executable), [str(tmp_path / "test_few.py")], tmp_path / "report.xml")
    assert found == {"passed": 1, "failed": 1, "refused": 1, "skipped": 1}


@pytest.mark.parametrize("gone", ["test_few.py::test_gone", "test_gone.py", "test_empty.py"])
def test_a_test_that_is_not_there_is_no_success(tmp_path: Path, gone: str) -> None:
    (tmp_path / "test_few.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "test_empty.py").write_text("", encoding="utf-8")
    tests = [f"{tmp_path}/test_few.py::test_good", f"{tmp_path}/{gone}"]
    if "empty" in gone:
        tests = tests[1:]
    with pytest.raises(SystemExit):
        matrix.judge(Path(sys.executable), tests, tmp_path / "report.xml")
