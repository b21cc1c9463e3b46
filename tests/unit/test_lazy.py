"""Packages whose names are loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

INIT = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toy_package import tools as tools
    from toy_package.broken import (
        whole as whole,
    )
    from toy_package.deep import lower as lower
    from toy_package.deep.inner import depth as inside
    from toy_package.shape import Square as Square
    from toy_package.shape import shape as shape
else:
    from plait.lazy import attach_names

    attach_names(__name__)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that offers names of its files."""
    files = {
        "__init__": INIT,
        "shape": "class Square: ...\ndef shape(): return Square()",
        "deep/__init__": "",
        "deep/inner": "depth = 3",
        "deep/lower": "",
        "broken": "import sys\nsys.no_such_attribute",
        "tools": "",
        "unoffered": "",
    }
    for name, text in files.items():
        path = tmp_path / "toy_package" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("toy_package")
    for name in [each for each in sys.modules if each.split(".")[0] == "toy_package"]:
        del sys.modules[name]


def loaded() -> set[str]:
    return {name.removeprefix("toy_package.") for name in sys.modules if name.startswith("toy_package.")}


def test_a_name_loads_its_file_when_it_is_asked_for_and_no_other(toy: ModuleType) -> None:
    assert loaded() == set()
    assert toy.inside == 3
    assert loaded() == {"deep", "deep.inner"}


def test_a_name_is_looked_up_once(toy: ModuleType) -> None:
    assert "Square" not in vars(toy)
    square = toy.Square
    assert vars(toy)["Square"] is square


def test_names_are_listed_before_they_are_loaded(toy: ModuleType) -> None:
    assert toy.__all__ == ["Square", "inside", "lower", "shape", "tools", "whole"]
    assert set(toy.__all__) <= set(dir(toy))
    assert loaded() == set()


@pytest.mark.parametrize("first", ["name", "file"])
def test_a_file_does_not_hide_a_name_of_the_same_spelling(toy: ModuleType, first: str) -> None:
    if first == "name":
        assert callable(toy.shape)
    from toy_package.shape import Square  # type: ignore[import-not-found]

    assert isinstance(toy.shape(), Square)
    from toy_package import shape  # type: ignore[import-not-found]

    assert isinstance(shape(), Square)


def test_a_file_may_be_offered_itself(toy: ModuleType) -> None:
    assert toy.tools is import_module("toy_package.tools")
    assert toy.lower is import_module("toy_package.deep.lower")


def test_a_file_that_is_not_offered_is_imported_as_ever(toy: ModuleType) -> None:
    from toy_package import unoffered

    assert isinstance(unoffered, ModuleType)


def test_an_unknown_name_is_an_attribute_error(toy: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"toy_package.*Sqare"):
        _ = toy.Sqare
    assert not hasattr(toy, "__wrapped__")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    done = subprocess.run([sys.executable, "-c", "import plait; plait.Runer"], capture_output=True, text=True)
    assert "'Runner'" in done.stderr


def test_an_error_within_a_file_is_not_taken_for_a_missing_name(toy: ModuleType) -> None:
    with pytest.raises(ImportError, match="no_such_attribute"):
        from toy_package import whole  # noqa: F401
