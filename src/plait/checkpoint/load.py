"""Read a checkpoint into a run's tensors, whose sharding may differ from that of the run that saved it."""

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

from plait.checkpoint.manifest import Checkpoint, Index, StoredPiece, is_outside, remedy
from plait.checkpoint.memory import READERS, WRITERS, thread_count
from plait.checkpoint.pieces import Entry, HeldPiece, held_pieces
from plait.checkpoint.read import PieceReader, try_to_read
from plait.checkpoint.tensorfile import digest
from plait.distributed import World
from plait.errors import CheckpointError

# Every difference between the tensors of a checkpoint and those of a model, in one table.


_SHOWN = 16
"""Rows of the table, so that the message fits on a screen."""


class Mismatch(NamedTuple):
    """A tensor's name, its shape in the checkpoint and its shape in the model; `-` if it is absent there."""

    name: str
    saved: str
    expected: str


def mismatches(index: Index, shapes: Mapping[str, tuple[int, ...]], ignore: Iterable[str] = ()) -> list[Mismatch]:
    """Return every tensor that only the checkpoint or only the model has, or whose shapes there differ.

    `shapes` are those of the model. Entries of the checkpoint whose names start with one of `ignore` are not reported.
    """
    rows = []
    starts = tuple(ignore)
    for name in sorted(shapes.keys() | index.tensors.keys()):
        expected, saved = shapes.get(name), index.tensors.get(name)
        if expected is None and name.startswith(starts):
            continue
        expected_text = "-" if expected is None else str(expected)
        saved_text = "-" if saved is None else str(saved.shape)
        if expected_text != saved_text:
            rows.append(Mismatch(name, saved_text, expected_text))
    return rows


def table(rows: list[Mismatch]) -> str:
    """Return the mismatches as lines of text."""
    # Optimizer state follows the parameters, so it is shown only where all of them match.
    rows = [row for row in rows if row.name.startswith("model.")] or rows
    shown = [Mismatch("tensor", "in the checkpoint", "in the model"), *rows[:_SHOWN]]
    name_width, saved_width = max(len(row.name) for row in shown), max(len(row.saved) for row in shown)
    lines = [f"  {name:<{name_width}}  {saved:<{saved_width}}  {expected}" for name, saved, expected in shown]
    if len(rows) > _SHOWN:
        lines.append(f"  … and {len(rows) - _SHOWN} more")
    return "\n".join(lines)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns (`model.head.*`) matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class LoadRegion(NamedTuple):
    """A region of a stored piece, from index `low` to `high`, and the tensor that it is read into."""

    stored: StoredPiece
    dtype: torch.dtype
    low: tuple[int, ...]
    high: tuple[int, ...]
    target: Tensor


Fetch = Callable[[list[LoadRegion]], AbstractContextManager[Mapping[str, Path]]]
"""Copies the files that the regions need and that this node lacks; the context yields their paths by file name."""


def nothing_to_fetch(regions: list[LoadRegion]) -> AbstractContextManager[Mapping[str, Path]]:
    """Return a context that yields no files: all of them are in the checkpoint's folder."""
    return nullcontext({})


def load_into(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Entry],
    *,
    world: World,
    ignore: Iterable[str] = (),
    partial: Iterable[str] = (),
    fetch: Fetch = nothing_to_fetch,
) -> list[Mismatch]:
    """Fill the tensors from a checkpoint; each rank reads and verifies only what its shards need.

    Strict: every name must be on both sides, with the same shape. Entries of the checkpoint whose names start
    with one of `ignore` may be left unread; a tensor that matches one of the patterns of `partial` may differ, and
    is then left unchanged. Return the mismatches that those patterns allowed. If one rank finds damage, all raise.
    """
    left_out = check_shapes(checkpoint, _shapes(tensors, world), ignore=ignore, partial=partial)
    skipped = {row.name for row in left_out}
    wanted = {name: tensor for name, tensor in tensors.items() if name not in skipped}
    pieces, index = held_pieces(wanted), checkpoint.index
    regions = regions_to_read(index, (held for held in pieces if held.deferred is None))
    deferred = [held for held in pieces if held.deferred is not None]
    with (
        fetch([*regions, *regions_to_read(index, deferred)]) as elsewhere,
        PieceReader(checkpoint.folder, elsewhere, checkpoint) as reader,
    ):
        problems = [
            *_map_threads(lambda region: _copy(reader, region), regions, READERS, world),
            *_map_threads(lambda held: _read_deferred(reader, index, held), deferred, WRITERS, world),
        ]
        _raise_together(checkpoint.folder, [problem for problem in problems if problem is not None], world)
    return left_out


def _shapes(tensors: Mapping[str, Entry], world: World) -> dict[str, tuple[int, ...]]:
    """Return the global shapes of the tensors of all ranks: pipeline stages and optimizer states differ by rank."""
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if world.size == 1:
        return mine
    return {name: shape for shapes in world.gather(mine) for name, shape in shapes.items()}


def check_shapes(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], *, ignore: Iterable[str], partial: Iterable[str]
) -> list[Mismatch]:
    """Return the mismatches that `partial` allows; any other is an error, as is a pattern that matches no tensor."""
    patterns = tuple(partial)
    names = shapes.keys() | checkpoint.index.tensors.keys()
    idle = [pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in names)]
    if idle:
        raise CheckpointError(
            f"checkpoint.partial: {', '.join(map(repr, idle))} matches no tensor of {checkpoint.folder} or the model; "
            "names look like `model.<parameter>` and `optim.<parameter>.<key>`"
        )
    rows = mismatches(checkpoint.index, shapes, ignore)
    wrong = [row for row in rows if not matches(row.name, patterns)]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} does not fit this model:\n{table(wrong)}\n"
            "to allow differences, name the tensors: `checkpoint.partial: [pattern, …]`"
        )
    return rows


def regions_to_read(index: Index, pieces: Iterable[HeldPiece]) -> list[LoadRegion]:
    """Return the regions of stored pieces that fill the pieces of this rank."""
    regions = []
    for held in pieces:
        piece, record = held.piece, index.tensors[held.piece.name]
        end = tuple(a + n for a, n in zip(piece.start, piece.shape, strict=True))
        covered = 0
        for stored in record.pieces:
            low = tuple(map(max, piece.start, stored.start))
            high = tuple(min(b, a + n) for b, a, n in zip(end, stored.start, stored.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.start, strict=True))
            target = held.tensor[inside] if inside else held.tensor
            covered += target.numel()
            offset = stored.start
            regions.append(
                LoadRegion(
                    stored,
                    record.dtype,
                    tuple(a - o for a, o in zip(low, offset, strict=True)),
                    tuple(b - o for b, o in zip(high, offset, strict=True)),
                    target,
                )
            )
        if covered != held.tensor.numel():
            raise CheckpointError(f"the pieces of {piece.name} in the checkpoint do not cover the whole tensor")
    return regions


def verify(checkpoint: Checkpoint, *, world: World | None = None) -> None:
    """Compare every byte with its checksum; ranks share the work, and all raise if one finds damage.

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
        elif is_outside(folder, name):
            problems.append(f"{path} is a link that leads out of the checkpoint; copy the file itself")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size} bytes, {record.bytes} were written")
        elif digest(_digested_bytes(path)) != record.digest:
            problems.append(f"{path} was changed after it was written (the checksum of its header differs)")
    every = [(stored, record.dtype) for record in checkpoint.index.tensors.values() for stored in record.pieces]
    with PieceReader(folder, checkpoint=checkpoint) as reader:
        for stored, dtype in every[rank::size] if not problems else ():
            problem = try_to_read(reader.check, stored, dtype)
            if problem is not None:
                problems.append(problem)
    _raise_together(folder, problems, world)


def _digested_bytes(path: Path) -> bytes:
    """Return the bytes that a file's own digest covers: the header of a safetensors file, all of any other."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def _copy(reader: PieceReader, region: LoadRegion) -> str | None:
    return try_to_read(reader.copy, *region)


def _read_deferred(reader: PieceReader, index: Index, held: HeldPiece) -> str | None:
    """Read the rows of a deferred tensor and store them; return what is wrong with the file, None if nothing is."""
    assert held.deferred is not None
    for rows in held.rows_at_once():
        strip = held.piece.rows(rows.start, rows.stop)
        buffer = torch.empty(strip.shape, dtype=strip.dtype)
        for region in regions_to_read(index, [HeldPiece(strip, buffer)]):
            if (problem := _copy(reader, region)) is not None:
                return problem
        held.deferred.store_rows(rows.start, buffer)
    return None


def _map_threads(work: Callable[[_Item], _Result], items: list[_Item], most: int, world: World) -> list[_Result]:
    threads = thread_count(most, cores=os.cpu_count() or 1, ranks=world.ranks.local_size)
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _raise_together(folder: Path, problems: list[str], world: World | None) -> None:
    gathered = [problems] if world is None else world.gather(problems)
    distinct = dict.fromkeys(problem for messages in gathered for problem in messages)
    if distinct:
        raise CheckpointError("the checkpoint is damaged:\n  " + "\n  ".join(distinct) + f"\n{remedy(folder)}")


def entries(index: Index, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of the entries under a prefix, which is removed from their names."""
    return {
        name.removeprefix(prefix): (torch.Size(record.shape), record.dtype)
        for name, record in index.tensors.items()
        if name.startswith(prefix)
    }
