"""A storage of one's own for checkpoints: any file system that fsspec knows."""

from __future__ import annotations

from pathlib import Path

import fsspec  # type: ignore[import-untyped]


class FsspecStorage:
    """Keeps a run's checkpoints under `url`: `memory://run`, `s3://bucket/run`, …"""

    def __init__(self, *, url: str) -> None:
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/") + "/"

    def write(self, name: str, source: Path) -> None:
        """Copy a local file there."""
        target = self._root + name
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), target)

    def read(self, name: str, target: Path) -> None:
        """Copy a file from there."""
        self._files.get_file(self._root + name, str(target))

    def names(self, prefix: str) -> list[str]:
        """Return the names of all files that begin with `prefix`."""
        found = (str(path).removeprefix(self._root) for path in self._files.find(self._root))
        return [name for name in found if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._files.rm_file(self._root + name)
