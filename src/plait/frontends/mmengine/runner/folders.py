"""Names of checkpoints in a work_dir: `epoch_3`, `iter_500`, `best_accuracy_epoch_3`, and which of them is the last."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from plait.checkpoint import NAME
from plait.config import read_lines
from plait.errors import CheckpointError


def last_checkpoint(work_dir: Path) -> Path | None:
    """What the file `last_checkpoint` names; None where there is none."""
    note = work_dir / "last_checkpoint"
    if not note.is_file():
        return None
    path = Path("\n".join(read_lines(note, CheckpointError)).strip())
    if not path.is_absolute() and not path.exists():
        path = work_dir / path.name
    return path if (path / NAME).exists() else None


def resolve(text: str | Path) -> Path:
    """A checkpoint's folder or file, by its name; a `.pth` that was written here is the folder without the ending."""
    path = Path(text)
    if (path / NAME).exists() or path.is_file():
        return path
    bare = path.with_suffix("") if path.suffix == ".pth" else path
    if (bare / NAME).exists():
        return bare
    if path.is_dir() and (last := last_checkpoint(path)) is not None:
        return last
    raise CheckpointError(
        f"there is no checkpoint at {str(path)!r}: name a folder that a run wrote (work_dir/epoch_3), its work_dir, or "
        "a file of torch.save"
    )


def keep_newest(folder: Path, template: str, count: int) -> None:
    """Remove all but the newest checkpoints of a template (`epoch_{}`)."""
    pattern = re.compile(re.escape(template).replace(r"\{\}", r"(\d+)") + "$")
    numbered = [(int(found[1]), path) for path in folder.iterdir() if (found := pattern.match(path.name))]
    for _, path in sorted(numbered)[:-count]:
        forget(path)


def forget(path: Path) -> None:
    """Remove a checkpoint. Without its manifest it is none any more, so a kill in between leaves nothing half."""
    if (path / NAME).exists():
        (path / NAME).unlink()
        shutil.rmtree(path)
