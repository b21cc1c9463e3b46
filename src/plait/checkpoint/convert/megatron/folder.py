"""Where a checkpoint of Megatron lies: a folder of iterations, one of them, and the files in it."""

from __future__ import annotations

import re
from pathlib import Path

from plait.config import read_json_object, read_name
from plait.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest iteration of a folder."""
BACKEND = "metadata.json"
"""Says in which format an iteration of distributed files is."""
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)((?:_\d+)*)")

Coordinates = tuple[int, ...]
"""Of a rank, as its folder's name has them: tensor, then pipeline and experts where there is more than one."""


def is_megatron(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of Megatron, or like one that holds several."""
    return (path / TRACKER).is_file() or _is_distributed(path) or bool(rank_files(path))


def iteration(path: Path) -> Path:
    """The folder of one iteration: the path itself, or the newest that lies in it."""
    if not (path / TRACKER).is_file():
        return path
    named = read_name(path / TRACKER, CheckpointError)
    found = path / (f"iter_{int(named):07d}" if named.isdigit() else named)
    if not found.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {named}, and there is no {found.name} beside it; copy it too")
    return found


def rank_files(path: Path) -> dict[Coordinates, Path]:
    """The files of all ranks, where each rank wrote its own."""
    found = {}
    for folder in path.glob("mp_rank_*"):
        named = _RANK.fullmatch(folder.name)
        if named is not None and (folder / RANK_FILE).is_file():
            found[(int(named[1]), *(int(number) for number in named[2].split("_")[1:]))] = folder / RANK_FILE
    return found


def check_backend(path: Path) -> None:
    """Refuse distributed files of a format other than torch's."""
    backend = _backend(path)
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} is in Megatron's format {backend!r}, and torch_dist and torch can be read; "
            "load it with Megatron-LM, and save it with --ckpt-format torch_dist"
        )


def _is_distributed(path: Path) -> bool:
    return (path / BACKEND).is_file() and _backend(path) is not None


def _backend(path: Path) -> str | None:
    try:
        named = read_json_object(path / BACKEND, CheckpointError).get("sharded_backend")
    except CheckpointError:
        return None
    return named if isinstance(named, str) else None
