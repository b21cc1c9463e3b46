"""A few lines of YAML whose aliases stand for billions of values are refused before they take time or memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused
from tests.unit.fuzz.mutate import bounded

from plait.config import parse
from plait.config.yaml_io import MAX_ALIASED
from plait.errors import ConfigError
from plait.frontends.accelerate.config import translate
from plait.frontends.mmengine import Config

NAMES = "abcdefghi"
REPEATS = 10


def lists() -> str:
    """Each list ten times in the next one: a billion values in all."""
    lines = ["a: &a [0]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{last}'] * REPEATS)}]" for last, name in pairwise(NAMES)]
    return "\n".join(lines)


def merges() -> str:
    """Each mapping merged ten times into the next one."""
    lines = ["a: &a {x: 0}"]
    lines += [f"{name}: &{name} {{<<: [{', '.join([f'*{last}'] * REPEATS)}]}}" for last, name in pairwise(NAMES)]
    return "\n".join(lines)


def keys() -> str:
    """Each mapping ten times among the values of the next one."""
    lines = ["a: &a {x: 0}"]
    lines += [f"{name}: &{name} {{{', '.join(f'{key}: *{last}' for key in NAMES)}}}" for last, name in pairwise(NAMES)]
    return "\n".join(lines)


def of_plait(text: str, folder: Path) -> Any:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return parse(path)


def of_accelerate(text: str, folder: Path) -> Any:
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return translate(path)


def of_mmengine(text: str, folder: Path) -> Any:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return Config.fromfile(path)


def of_an_override(text: str, folder: Path) -> Any:
    """All in one line, as a list of mappings."""
    return parse({}, [f"hooks=[{', '.join(f'{{{line}}}' for line in text.splitlines())}]"])


@pytest.mark.parametrize("read", [of_plait, of_accelerate, of_mmengine, of_an_override])
@pytest.mark.parametrize("bomb", [lists, merges, keys])
def test_nested_aliases_are_refused_quickly(
    tmp_path: Path, bomb: Callable[[], str], read: Callable[[str, Path], Any]
) -> None:
    text = bomb()
    assert len(text) < 1000
    with bounded(), refused(ConfigError, MAX_ALIASED):
        read(text, tmp_path)


def test_aliases_as_people_write_them_are_read(tmp_path: Path) -> None:
    found = of_mmengine("extra: &a {x: [1, 2]}\nmore: {<<: *a, y: *a}\n", tmp_path)
    assert found.to_dict()["more"] == {"x": [1, 2], "y": {"x": [1, 2]}}
