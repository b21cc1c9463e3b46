"""Report how the source is cut: its size, and the files that only one other file imports.

    make structure

A file with one importer in the same folder may be part of that importer. It is a question and not a rule: a file that
is an idea of its own stays.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "plait"


def module_of(path: Path) -> str:
    """Dotted name of a file."""
    return ".".join(("plait", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def offered(trees: dict[str, ast.Module]) -> dict[tuple[str, str], str]:
    """The file behind each name of a front door, by package and name."""
    homes = {}
    for module, tree in trees.items():
        for block in (node for node in tree.body if isinstance(node, ast.If)):
            for node in (node for node in block.body if isinstance(node, ast.ImportFrom) and node.module):
                homes.update(
                    {(module, alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
                )
    return homes


def imports(tree: ast.Module, modules: set[str], homes: dict[tuple[str, str], str]) -> set[str]:
    """The files of Plait that a file imports, through front doors too."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("plait"):
            continue
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            while name not in modules and (home := homes.get((name.rpartition(".")[0], name.rpartition(".")[2]))):
                name = home
            found.add(name if name in modules else name.rpartition(".")[0])
    return found & modules


def main() -> None:
    """Print the report."""
    paths = sorted(ROOT.rglob("*.py"))
    lines = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    packages = {module_of(path) for path in paths if path.name == "__init__.py"}
    homes = offered(trees)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        if module not in packages:
            for other in imports(tree, set(trees), homes) - {module}:
                importers[other].add(module)
    print(f"{len(paths)} files, {sum(lines.values()):,} lines, {sum(lines.values()) / len(paths):.0f} on average\n")
    print("Files that one file of the same folder imports, and nobody else:")
    for module, users in sorted(importers.items()):
        user = next(iter(users))
        if len(users) == 1 and module not in packages and module.rpartition(".")[0] == user.rpartition(".")[0]:
            print(f"  {module} ({lines[module]} lines) by {user.rpartition('.')[2]}")


if __name__ == "__main__":
    main()
