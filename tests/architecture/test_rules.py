"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[2] / "src" / "plait").rglob("*.py"))
MAY_READ_ENVIRONMENT = {"launch", "world", "cli"}


def room(path: Path) -> str:
    return path.relative_to(SOURCES[0].parent).parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parent)))
def test_a_file_is_small_enough_to_hold_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_only_launch_world_and_cli_read_the_environment() -> None:
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        if room(path) not in MAY_READ_ENVIRONMENT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]
    assert offenders == []


def test_no_module_changes_a_global() -> None:
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert offenders == []
