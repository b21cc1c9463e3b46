"""The `checkpoints` folder of a run: names of checkpoints, links to them, and which are kept."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.manifest import MANIFEST_NAME, is_complete, saved_at
from plait.errors import CheckpointError

_STEP = re.compile(r"step-(\d+)$")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """All checkpoints of one run, with a link `latest`, and a link `best` where a metric is watched."""

    root: Path

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.root / f"step-{step:08d}"

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, in the order in which they were saved.

        That is not the order of their steps where a run was resumed from an earlier checkpoint.
        """
        if not self.root.is_dir():
            return []
        checkpoints = [p for p in self.root.iterdir() if _STEP.match(p.name) and not p.is_symlink() and is_complete(p)]
        return sorted(checkpoints, key=lambda path: (saved_at(path), path.name))

    def newest(self, before: int | None = None) -> Path | None:
        """Return the newest complete checkpoint, of step `before` or earlier if that is given; None if there is none.

        Links are not followed: the process may have been killed before it moved them.
        """
        complete = [path for path in self.complete() if before is None or _step_of(path) <= before]
        return complete[-1] if complete else None

    def find(self, wanted: str) -> Path | None:
        """Return the newest checkpoint of this run (or None) for `auto`; else `wanted`, or the newest one inside it."""
        if wanted == "auto":
            return self.newest()
        path = Path(wanted)
        if is_complete(path):
            return path.resolve()
        newest = newest_in(path)
        if newest is None:
            raise no_checkpoint_at(wanted)
        return newest

    def candidates(self, wanted: str) -> list[Path]:
        """Return every checkpoint that `find` would choose from."""
        if wanted == "auto":
            return self.complete()
        path = Path(wanted)
        if is_complete(path):
            return [path.resolve()]
        return CheckpointFolder(path).complete() or CheckpointFolder(path / "checkpoints").complete()

    def link(self, name: str, target: Path) -> None:
        """Point a link at a checkpoint, atomically."""
        temporary = self.root / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, self.root / name)

    def prune(self, keep: int, keep_every: int | None = None) -> None:
        """Remove all but the newest `keep`, the target of `best`, and every `keep_every`-th step."""
        best = self.root / "best"
        kept = {best.resolve().name} if best.exists() else set()
        for path in self.complete()[:-keep]:
            milestone = keep_every is not None and _step_of(path) % keep_every == 0
            if path.name not in kept and not milestone:
                remove_checkpoint(path)

    def sweep(self) -> None:
        """Remove the leftovers of an interrupted save, and restore the checkpoint that it was replacing."""
        if not self.root.is_dir():
            return
        for path in self.root.glob(".step-*.old.tmp"):
            home = self.root / path.name.removeprefix(".").removesuffix(".old.tmp")
            if is_complete(path) and not is_complete(home):
                os.replace(path, home)
        for path in self.root.glob(".*"):
            # A new link before it is renamed to `latest` or `best`, or a file of `ranks.find_disks`.
            if path.is_symlink() or path.name.startswith(".seen-"):
                path.unlink(missing_ok=True)
        for path in list(self.root.iterdir()):
            unfinished = path.name.startswith((".step-", ".fetched-")) or (
                _STEP.match(path.name) and not is_complete(path)
            )
            if unfinished and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a complete checkpoint; a folder without a manifest is left alone.

    The manifest is deleted first: without it the folder does not count as a checkpoint, so a kill in between cannot
    leave a partly deleted checkpoint that looks complete.
    """
    if (path / MANIFEST_NAME).exists():
        (path / MANIFEST_NAME).unlink()
        shutil.rmtree(path)


def newest_in(path: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder of checkpoints, or of the work_dir of a run."""
    return CheckpointFolder(path).newest() or CheckpointFolder(path / "checkpoints").newest()


def _step_of(path: Path) -> int:
    match = _STEP.match(path.name)
    assert match is not None
    return int(match[1])


def no_checkpoint_at(wanted: str) -> CheckpointError:
    """Return the error for a path without a checkpoint."""
    from plait.checkpoint.convert.detect import kind_of  # that module imports this one

    format = kind_of(Path(wanted))
    if format not in (None, "plait"):
        return CheckpointError(
            f"{wanted!r} is a checkpoint in the format {format!r}, which cannot be resumed; convert it first: "
            f"`plait convert {wanted} NEW --to plait`"
        )
    return CheckpointError(
        f"no complete checkpoint at {wanted!r}; name a folder with a {MANIFEST_NAME}, or the work_dir of a run"
    )
