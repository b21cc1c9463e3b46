"""Storages as somebody outside would write them."""

from __future__ import annotations

from pathlib import Path

import fsspec


class MemoryStorage:
    """fsspec's memory file system, which is one process's own."""

    def __init__(self, *, root: str) -> None:
        self.files = fsspec.filesystem("memory")
        self.root = f"/{root}/"

    def write(self, name: str, source: Path) -> None:
        self.files.put_file(str(source), self.root + name)

    def read(self, name: str, target: Path) -> None:
        self.files.get_file(self.root + name, str(target))

    def names(self, prefix: str) -> list[str]:
        return [
            name for path in self.files.find(self.root) if (name := path.removeprefix(self.root)).startswith(prefix)
        ]

    def delete(self, name: str) -> None:
        self.files.rm_file(self.root + name)


class BrokenStorage(MemoryStorage):
    """Loses its connection at the second file of each checkpoint."""

    def write(self, name: str, source: Path) -> None:
        if not name.endswith("index.json"):
            raise ConnectionError(f"no route to {name}")
        super().write(name, source)


class NoStorage:
    """Can neither list nor delete."""

    def write(self, name: str, source: Path) -> None:
        """Do nothing."""

    def read(self, name: str, target: Path) -> None:
        """Do nothing."""
