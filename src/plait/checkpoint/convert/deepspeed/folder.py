"""Which files make up a DeepSpeed checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plait.config import read_name
from plait.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint, by rank."""

    folder: Path
    """The folder of the tag."""
    models: dict[int, Path]
    """Model states: of every rank at stage 3, else of rank 0."""
    shards: dict[int, Path]
    """Optimizer states of ZeRO."""

    @property
    def universal(self) -> Path | None:
        """The folder of whole parameters, in a universal checkpoint."""
        return self.folder / "zero" if (self.folder / "zero").is_dir() else None

    def of_ranks(self, found: dict[int, Path], count: int, what: str) -> list[Path]:
        """One file from each of `count` ranks; a missing one is named."""
        missing = [rank for rank in range(count) if rank not in found]
        if missing or len(found) != count:
            names = ", ".join(path.name for path in list(found.values())[:8]) or "none"
            told = f"those of ranks {missing[:16]} are missing" if missing else "there are more, of another save"
            raise CheckpointError(
                f"{self.folder}: {count} ranks wrote {what}, and {told}. Found: {names}. Copy the whole folder again"
            )
        return [found[rank] for rank in range(count)]


def is_deepspeed(path: Path) -> bool:
    """Whether a folder looks like a checkpoint of DeepSpeed, or like the folder of several."""
    if not path.is_dir():
        return False
    return any((path / name).is_file() for name in _POINTERS) or any(_MODEL.fullmatch(p.name) for p in path.iterdir())


def find_files(path: Path) -> Files:
    """The files of the checkpoint at `path`: the folder of a tag, or the one above it, which says which is newest."""
    folder = _tag_of(path) or path
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name the one with `latest` in it, or the folder of a tag")
    models: dict[int, Path] = {}
    shards: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        _refuse_parallel(file)
        for pattern, found in ((_MODEL, models), (_OPTIM, shards)):
            match = pattern.fullmatch(file.name)
            if match is None:
                continue
            rank = int(match[1] or 0)
            if rank in found and not (folder / "zero").is_dir():
                raise CheckpointError(
                    f"{folder} holds {found[rank].name} and {file.name}: two checkpoints were saved into one folder. "
                    "Remove the files of the older"
                )
            found.setdefault(rank, file)
    if not models:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"{folder} is no DeepSpeed checkpoint: there is no *_model_states.pt in it, but {names}. "
            "Name the folder with `latest` in it, or the folder of a tag"
        )
    return Files(folder, models, shards)


def _tag_of(path: Path) -> Path | None:
    pointers = [path / name for name in _POINTERS if (path / name).is_file()]
    folders = [path / read_name(pointer, CheckpointError) for pointer in pointers]
    there = [folder for folder in folders if folder.is_dir()]
    if folders and not there:
        found = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "none"
        raise CheckpointError(f"{pointers[0]} names {folders[0].name!r}, which is not there; folders found: {found}")
    return there[0] if there else None


def _refuse_parallel(file: Path) -> None:
    name = file.name
    kind = None
    if re.match(r"(layer_\d+_)?expert_\d+_|expp_rank_", name):
        kind = "mixture of experts, spread over ranks"
    elif re.match(r"layer_\d+-model", name):
        kind = "pipeline parallel (a file for every layer)"
    elif (match := _MODEL.fullmatch(name) or _OPTIM.fullmatch(name)) and int(match[2]) > 0:
        kind = "tensor or pipeline parallel (more than one mp_rank)"
    if kind is not None:
        raise CheckpointError(
            f"{file.parent} is a DeepSpeed checkpoint of another kind: {kind}; {name} says so. Only those of "
            "data-parallel ranks are read: make it universal with DeepSpeed's ds_to_universal, load that with "
            "`load_universal` on data-parallel ranks alone, and save it again"
        )
