"""Read a checkpoint into tensors of any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from plait.checkpoint.manifest import Checkpoint, Index, StoredPiece, leads_out, remedy
from plait.checkpoint.need import READERS, WRITERS, workers
from plait.checkpoint.pieces import Entry, Held, held_pieces
from plait.checkpoint.read import PieceReader, try_to_read
from plait.checkpoint.tensorfile import digest
from plait.distributed import World
from plait.errors import CheckpointError

# Where a checkpoint and a model do not agree: all of it, in one table.


_SHOWN = 16
"""Rows of the table: the whole message has to fit on a screen."""


class Misfit(NamedTuple):
    """A tensor's name, its shape in the checkpoint and its shape in the model; `-` where there is none."""

    name: str
    there: str
    here: str


def misfits(index: Index, shapes: Mapping[str, tuple[int, ...]], ignore: Iterable[str] = ()) -> list[Misfit]:
    """Every tensor that is on one side only or has two shapes; `shapes` are those of the model.

    Entries of the checkpoint whose names start with one of `ignore` may be left unread.
    """
    found = []
    starts = tuple(ignore)
    for name in sorted(shapes.keys() | index.tensors.keys()):
        here, there = shapes.get(name), index.tensors.get(name)
        if here is None and name.startswith(starts):
            continue
        ours = "-" if here is None else str(here)
        theirs = "-" if there is None else str(there.shape)
        if ours != theirs:
            found.append(Misfit(name, theirs, ours))
    return found


def table(rows: list[Misfit]) -> str:
    """The misfits, as lines of text."""
    # What the optimizer keeps follows the parameters: it is news only where they are right.
    rows = [row for row in rows if row.name.startswith("model.")] or rows
    shown = [Misfit("tensor", "in the checkpoint", "in the model"), *rows[:_SHOWN]]
    names, theirs = max(len(row.name) for row in shown), max(len(row.there) for row in shown)
    lines = [f"  {name:<{names}}  {there:<{theirs}}  {here}" for name, there, here in shown]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} more")
    return "\n".join(lines)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns (`model.head.*`) fits a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


class LoadRegion(NamedTuple):
    """A rectangle that is to be read: where it lies in a stored piece, and where it goes."""

    stored: StoredPiece
    dtype: torch.dtype
    low: tuple[int, ...]
    high: tuple[int, ...]
    target: Tensor


Fetch = Callable[[list[LoadRegion]], AbstractContextManager[Mapping[str, Path]]]
"""Gets hold of the files that are needed and not in the checkpoint's folder: their names, and where they are."""


def nothing_to_fetch(parts: list[LoadRegion]) -> AbstractContextManager[Mapping[str, Path]]:
    """All files are in the folder."""
    return nullcontext({})


def load_into(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Entry],
    *,
    world: World,
    ignore: Iterable[str] = (),
    partial: Iterable[str] = (),
    fetch: Fetch = nothing_to_fetch,
) -> list[Misfit]:
    """Fill the tensors from a checkpoint; each rank reads, and checks, only what its part needs.

    Strict: every name must be on both sides, with the same shape. Entries of the checkpoint whose names start
    with one of `ignore` may be left unread; a tensor that fits one of the patterns of `partial` may differ, and
    is then left as it is. Returns what was left out by those patterns. If one rank finds damage, all raise.
    """
    left_out = agree_on_fit(checkpoint, _shapes(tensors, world), ignore=ignore, partial=partial)
    skipped = {row.name for row in left_out}
    wanted = {name: tensor for name, tensor in tensors.items() if name not in skipped}
    held, index = held_pieces(wanted), checkpoint.index
    here = parts_of(index, (each for each in held if each.later is None))
    lates = [each for each in held if each.later is not None]
    with (
        fetch([*here, *parts_of(index, lates)]) as elsewhere,
        PieceReader(checkpoint.folder, elsewhere, checkpoint) as reader,
    ):
        found = [
            *_at_once(lambda part: _copy(reader, part), here, READERS, world),
            *_at_once(lambda each: _read_later(reader, index, each), lates, WRITERS, world),
        ]
        _raise_together(checkpoint.folder, [problem for problem in found if problem is not None], world)
    return left_out


def _shapes(tensors: Mapping[str, Entry], world: World) -> dict[str, tuple[int, ...]]:
    """The whole shapes of all tensors: ranks of a pipeline have others, and what an optimizer keeps may be on one."""
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if world.size == 1:
        return mine
    return {name: shape for part in world.gather(mine) for name, shape in part.items()}


def agree_on_fit(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], *, ignore: Iterable[str], partial: Iterable[str]
) -> list[Misfit]:
    """The misfits that the patterns of `partial` allow; any other is an error, as is a pattern that fits nothing."""
    patterns = tuple(partial)
    names = shapes.keys() | checkpoint.index.tensors.keys()
    idle = [pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in names)]
    if idle:
        raise CheckpointError(
            f"checkpoint.partial: {', '.join(map(repr, idle))} fits no tensor of {checkpoint.folder} or of the model; "
            "names look like `model.<parameter>` and `optim.<parameter>.<key>`"
        )
    rows = misfits(checkpoint.index, shapes, ignore)
    wrong = [row for row in rows if not matches(row.name, patterns)]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit this model:\n{table(wrong)}\n"
            "what may differ can be named: `checkpoint.partial: [pattern, …]`"
        )
    return rows


def parts_of(index: Index, held: Iterable[Held]) -> list[LoadRegion]:
    """What has to be read, and from where, to fill what this rank holds."""
    parts = []
    for each in held:
        piece, record = each.piece, index.tensors[each.piece.name]
        end = tuple(a + n for a, n in zip(piece.start, piece.shape, strict=True))
        covered = 0
        for stored in record.pieces:
            low = tuple(map(max, piece.start, stored.start))
            high = tuple(min(b, a + n) for b, a, n in zip(end, stored.start, stored.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.start, strict=True))
            target = each.tensor[inside] if inside else each.tensor
            covered += target.numel()
            offset = stored.start
            parts.append(
                LoadRegion(
                    stored,
                    record.dtype,
                    tuple(a - o for a, o in zip(low, offset, strict=True)),
                    tuple(b - o for b, o in zip(high, offset, strict=True)),
                    target,
                )
            )
        if covered != each.tensor.numel():
            raise CheckpointError(f"the pieces of {piece.name} in the checkpoint do not make up the whole tensor")
    return parts


def verify(checkpoint: Checkpoint, *, world: World | None = None) -> None:
    """Compare every byte with what was written; ranks share the work, and all raise if one finds damage.

    Without a world this process does all of it.
    """
    problems: list[str] = []
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    folder = checkpoint.folder
    files = sorted(checkpoint.manifest.files.items())
    for name, record in files[rank::size]:
        path = folder / name
        if not path.exists():
            problems.append(f"{path} is missing")
        elif leads_out(folder, name):
            problems.append(f"{path} is a link that leads out of the checkpoint; copy the file itself")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size} bytes, {record.bytes} were written")
        elif digest(_head(path)) != record.digest:
            problems.append(f"{path} was changed after it was written (the checksum of its head differs)")
    every = [(stored, record.dtype) for record in checkpoint.index.tensors.values() for stored in record.pieces]
    with PieceReader(folder, checkpoint=checkpoint) as reader:
        for stored, dtype in every[rank::size] if not problems else ():
            problem = try_to_read(reader.check, stored, dtype)
            if problem is not None:
                problems.append(problem)
    _raise_together(folder, problems, world)


def _head(path: Path) -> bytes:
    """What a file's own digest is of: the head of a file of tensors, all of any other."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def _copy(reader: PieceReader, part: LoadRegion) -> str | None:
    return try_to_read(reader.copy, *part)


def _read_later(reader: PieceReader, index: Index, each: Held) -> str | None:
    """Read one that training holds in another form, and let it have it; what is wrong with it."""
    assert each.later is not None
    for rows in each.rows_at_once():
        strip = each.piece.rows(rows.start, rows.stop)
        room = torch.empty(strip.shape, dtype=strip.dtype)
        for part in parts_of(index, [Held(strip, room)]):
            if (problem := _copy(reader, part)) is not None:
                return problem
        each.later.take(rows.start, room)
    return None


def _at_once(work: Callable[[_Given], _Found], items: list[_Given], most: int, world: World) -> list[_Found]:
    threads = workers(most, cores=os.cpu_count() or 1, ranks=world.ranks.local_size)
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _raise_together(folder: Path, problems: list[str], world: World | None) -> None:
    everyones = [problems] if world is None else world.gather(problems)
    found = dict.fromkeys(problem for part in everyones for problem in part)
    if found:
        raise CheckpointError("the checkpoint is damaged:\n  " + "\n  ".join(found) + f"\n{remedy(folder)}")


def entries(index: Index, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the entries under a prefix, which is taken off their names."""
    return {
        name.removeprefix(prefix): (torch.Size(record.shape), record.dtype)
        for name, record in index.tensors.items()
        if name.startswith(prefix)
    }
