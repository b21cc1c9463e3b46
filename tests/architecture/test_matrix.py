"""The table of versions: a row that runs changes its own line and no other."""

from __future__ import annotations

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
