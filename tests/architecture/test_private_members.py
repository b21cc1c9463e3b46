"""What begins with an underscore is its own room's: no other reads, sets, calls or overrides it.

`nn.Module` keeps its parameters, buffers and submodules under such names; those are torch's, and many need them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "plait"
OF_MODULES = {"_parameters", "_buffers", "_modules"}
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
OF_OTHERS = {"_pytree", "_backward", "_ops"}
"""Modules of torch, which the adapter names."""


@dataclass
class Class:
    room: str
    bases: list[str]
    """Dotted names of those that are Plait's."""
    members: set[str]
    """Private ones that it defines."""
    used: dict[str, int]
    """Private ones that it names on `self`, `cls` or `super()`, and where."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def module_of(path: Path, root: Path) -> str:
    return ".".join(("plait", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def parse(root: Path) -> dict[str, ast.Module]:
    return {module_of(path, root): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}


def imported(tree: ast.Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def on_itself(node: ast.Attribute) -> bool:
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def members_of(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Assign):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and on_itself(part):
            yield part.attr


def classes_in(trees: dict[str, ast.Module]) -> dict[str, Class]:
    found = {}
    for module, tree in trees.items():
        names = imported(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            used = {
                part.attr: part.lineno
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and private(part.attr) and on_itself(part)
            }
            members = {name for name in members_of(node) if private(name)}
            found[f"{module}.{node.name}"] = Class(
                room_of(module), [names.get(base, f"{module}.{base}") for base in bases], members, used
            )
    # A class that is imported through a front door is known by where it is defined.
    homes = {name: imported(tree) for name, tree in trees.items()}

    def home(name: str) -> str:
        module, _, last = name.rpartition(".")
        while name not in found and last in homes.get(module, {}):
            name = homes[module][last]
            module, _, last = name.rpartition(".")
        return name

    for one in found.values():
        one.bases = [home(base) for base in one.bases]
    return found


def ancestors(name: str, classes: dict[str, Class]) -> Iterator[Class]:
    for base in classes[name].bases:
        if base in classes:
            yield classes[base]
            yield from ancestors(base, classes)


def offences(root: Path) -> list[str]:
    """Every use of a private member of another room: through an object, or by inheriting from its class."""
    trees = parse(root)
    classes = classes_in(trees)
    owners: dict[str, set[str]] = {}
    for one in classes.values():
        for member in one.members - OF_MODULES:
            owners.setdefault(member, set()).add(one.room)
    found = []
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or on_itself(node) or node.attr in OF_NAMED_TUPLES | OF_OTHERS:
                continue
            if room_of(module) not in owners.get(node.attr, {room_of(module)}):
                found.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    for name, one in classes.items():
        for above in ancestors(name, classes):
            if above.room != one.room:
                taken = (set(one.used) | one.members) & above.members
                found += [f"{name}: {member} of room {above.room}" for member in sorted(taken)]
    return sorted(set(found))


def test_no_room_touches_what_is_private_in_another() -> None:
    assert offences(ROOT) == []


def test_both_ways_to_do_so_are_seen(tmp_path: Path) -> None:
    for room, text in {
        "below": "class Base:\n    def __init__(self):\n        self._kept = 1\n    def _build(self): ...\n",
        "above": (
            "from plait.below import Base\n"
            "class Derived(Base):\n    def _build(self):\n        return self._kept\n"
            "def poke(base):\n    return base._kept\n"
        ),
    }.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(text)
    assert offences(tmp_path) == [
        "plait.above.Derived: _build of room below",
        "plait.above.Derived: _kept of room below",
        "plait.above:6: base._kept",
    ]
