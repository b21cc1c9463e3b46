"""Rooms import each other through their front doors: `from plait.config import RunConfig`, whatever file it lies in.

A room is a package of `src/plait`, and each of the front ends. Its front door is its `__init__.py`, which says what the
room offers and loads none of it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from plait.frontends.deepspeed.module_layout import DEEPSPEED
from plait.kernels.triton import HAS_TRITON

TREE = Path(__file__).parents[2]
SRC = TREE / "src"
FILES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "plait").rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}
EAGER = {"plait.frontends.mmengine"}  # its registries are full once it is imported
BY_HAND = {"plait.frontends.transformers"}  # it explains which of its packages are missing
IMITATED = {"plait", "plait.frontends.accelerate", "plait.frontends.deepspeed"}  # names for users: used by nobody here


def room(module: str) -> str:
    """The room of a module; a file right below `plait` is a room of its own."""
    parts = module.split(".")
    nested = ".".join(parts[:3])
    return nested if nested in NESTED or nested in FRONTENDS else ".".join(parts[:2])


NESTED = {"plait.kernels.decode"}
"""Packages inside a room that are rooms of their own."""
FRONTENDS = {
    module
    for module, path in FILES.items()
    if re.fullmatch(r"plait\.frontends\.\w+", module) and path.name == "__init__.py"
}
DOORS = {room(module) for module, path in FILES.items() if path.name == "__init__.py"} | {"plait"}
LAZY = sorted(DOORS - EAGER - BY_HAND)


def imports(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """Line, module and names of what is imported from Plait."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "plait":
            yield node.lineno, node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names if alias.name.split(".")[0] == "plait")


def past_the_door(here: str, tree: ast.AST) -> Iterator[str]:
    """Imports of other rooms' files, and what to write instead."""
    for line, module, names in imports(tree):
        door = room(module)
        if door in DOORS - {room(here)} and (module != door or not names):
            yield f"{line}: write `from {door} import {', '.join(names) or '…'}`"


def offers(door: str) -> dict[str, tuple[str, str]]:
    """What type checkers see at a door: names, the module that has each, and its name there."""
    blocks = [n for n in TREES[door].body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found = {}
    for node in (node for block in blocks for node in block.body):
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.asname is not None, f"{door}: write `import {alias.name} as {alias.name}`"
            assert alias.asname not in found, f"{door}: two names {alias.asname}"
            found[alias.asname] = node.module, alias.name
    return found


def test_rooms_import_each_other_through_their_front_doors() -> None:
    offenders = [
        f"{FILES[here].relative_to(TREE)}:{offence}"
        for here, tree in TREES.items()
        for offence in past_the_door(here, tree)
    ]
    assert offenders == [], "a name that its room does not offer yet goes into the room's __init__.py, in both places"


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("plait.cli.train", "from plait.config.run import RunConfig"),
        ("plait.cli.train", "import plait.config"),
        ("plait.cli.train", "def f():\n    from plait.config.run import RunConfig"),
        ("plait.cli.train", "if TYPE_CHECKING:\n    from plait.distributed.tensor_parallel import STYLES"),
        ("plait.frontends.accelerate.config", "from plait.frontends.deepspeed.config import read_config"),
        ("plait.frontends.accelerate.config", "from plait.frontends.key_report import Account"),
        ("plait.__main__", "from plait.cli.main import main"),
        ("plait.generate.batch", "from plait.kernels.decode.sampling import CounterRNG"),
        ("plait.kernels.swiglu", "from plait.kernels.decode.sampling import CounterRNG"),
        ("plait.kernels.decode.step", "from plait.kernels.swiglu import swiglu"),
    ],
)
def test_the_rule_finds(here: str, source: str) -> None:
    assert list(past_the_door(here, ast.parse(source)))


@pytest.mark.parametrize(
    ("here", "source"),
    [
        ("plait.cli.train", "from plait.config import RunConfig"),
        ("plait.cli.train", "from plait.errors import ConfigError"),
        ("plait.cli.train", "from plait import errors"),
        ("plait.config.run", "from plait.config.base import Section"),
        ("plait.frontends.accelerate.config", "from plait.frontends.accelerate.utils.memory import find"),
        ("plait.frontends.accelerate.config", "from plait.frontends import Account"),
        ("plait.generate.batch", "from plait.kernels.decode import CounterRNG"),
        ("plait.kernels.decode.step", "from plait.kernels.decode.sampling import CounterRNG"),
    ],
)
def test_the_rule_leaves_alone(here: str, source: str) -> None:
    assert not list(past_the_door(here, ast.parse(source)))


@pytest.mark.parametrize("door", LAZY)
def test_a_front_door_offers_the_same_to_programs_and_to_type_checkers(door: str) -> None:
    """Each name is the one of its file, also where a file of the room has the same name."""
    package = import_module(door)
    assert set(getattr(package, "__homes__", {})) == set(offers(door))
    for name, (home, inside) in offers(door).items():
        found: dict[str, Any] = {}
        try:
            exec(f"from {home} import {inside} as {name}", found)  # the line for type checkers
        except ImportError:
            assert not HAS_TRITON  # which kernels need
            assert home.startswith("plait.kernels.")
            continue
        assert getattr(package, name) is found[name], f"{door}.{name}"


def test_front_doors_load_none_of_their_files() -> None:
    code = f"import sys; [__import__(door) for door in {LAZY}]; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert loaded & {"torch", "numpy", "pydantic", "rich"} == set()
    ours = {module for module in loaded if module.split(".")[0] == "plait"}
    absent = {
        "plait.frontends.mirrored",
        "plait.frontends.accelerate.missing_names",
        "plait.frontends.deepspeed.module_layout",
    }
    assert ours == {*LAZY, "plait.errors", "plait.lazy", *absent}


def test_no_front_door_offers_what_nobody_uses() -> None:
    used = defaultdict(set)
    for here, tree in TREES.items():
        for _, module, names in imports(tree):
            if room(module) != room(here):
                used[module].update(names)
    for names_by_module in DEEPSPEED.modules.values():
        for module, names in names_by_module.items():
            used[module].update(names)
    folders = ("tests", "examples", "benchmarks", "docs")
    texts = [path for folder in folders for path in (TREE / folder).rglob("*") if path.suffix in (".py", ".md")]
    for text in (path.read_text(encoding="utf-8") for path in (*texts, *TREE.glob("*.md"))):
        for module, names in re.findall(r"from (plait[\w.]*) import (\([^)]*\)|[^\n]*)", text):
            used[module].update(re.findall(r"\w+", names))
        for module, name in re.findall(r"\b(plait(?:\.[a-z_]+)+)\.(\w+)", text):
            used[module].add(name)
    unused = [f"{door}.{name}" for door in LAZY if door not in IMITATED for name in offers(door).keys() - used[door]]
    assert sorted(unused) == []
