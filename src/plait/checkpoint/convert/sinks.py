"""One conversion, from an open source to a target under its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from plait.checkpoint.convert.deepspeed import write_deepspeed
from plait.checkpoint.convert.huggingface import Description, write_huggingface
from plait.checkpoint.convert.source import Source
from plait.checkpoint.convert.target import replacing
from plait.checkpoint.convert.torchfile import write_torch
from plait.checkpoint.convert.view import only
from plait.checkpoint.save import write_alone
from plait.errors import CheckpointError, ConfigError, Problem
from plait.plugins import call, find

Kind = Literal["hf", "torch", "plait", "deepspeed"]
KINDS: tuple[Kind, ...] = ("hf", "torch", "plait", "deepspeed")
"""What can be written."""

SHARD_SIZE = 5 * 10**9
"""Bytes of one file of a Hugging Face folder, unless told otherwise."""


@dataclass(frozen=True)
class Written:
    """What a conversion wrote."""

    tensors: int
    bytes: int


class Writer(Protocol):
    """What `plait convert --to` may name: a function that writes another kind of checkpoint."""

    def __call__(self, source: Source, target: Path, /) -> None:
        """Write all that it takes of a source to a file or folder, which gets its name once this has returned."""


def _write_with(writer: str, source: Source, staging: Path) -> int:
    key = "--to"
    call(find("converter", writer, key), key, source, staging, name=writer, arguments={})
    if staging.is_file():
        return staging.stat().st_size
    files = [path for path in staging.rglob("*") if path.is_file()]
    if not files:
        raise ConfigError(Problem(key, f"{writer!r} wrote nothing", "Write to the path that it is given."))
    return sum(path.stat().st_size for path in files)


def part_for(source: Source, to: Kind | str, *, optimizer: bool) -> Source:
    """What of a source goes into such a target; `optimizer` is asked for by name for `torch` alone."""
    if not any(name.startswith("model.") for name in source.entries):
        raise CheckpointError(f"{source.path} holds no weights: there is nothing to convert")
    if to == "hf":
        return only(source, "model")
    if to == "torch":
        return only(source, "model", *(["optim"] if optimizer else []))
    return only(source, "model", "optim") if to == "deepspeed" else source


def convert(
    source: Source,
    target: Path,
    to: Kind | str,
    *,
    description: Description | None = None,
    shard_size: int = SHARD_SIZE,
    optimizer: bool = False,
    overwrite: bool = False,
) -> Written:
    """Write all of a source (see `part_for`) in another form; one tensor after another, and all or nothing.

    `to` may name a `Writer` of the user's own. `description` is needed for `hf` alone.
    """
    needed = sum(entry.bytes for entry in source.entries.values())
    with replacing(target, source=source.path, needed=needed, overwrite=overwrite) as staging:
        if to == "hf":
            assert description is not None
            size = write_huggingface(source, staging, description, shard_size=shard_size)
        elif to == "torch":
            size = write_torch(source, staging, optimizer=optimizer)
        elif to == "plait":
            size = write_alone(staging, source.entries, source.read, source.state, step=steps(source))
        elif to == "deepspeed":
            size = write_deepspeed(source, staging)
        else:
            size = _write_with(to, source, staging)
    return Written(len(source.entries), size)


def steps(source: Source) -> int:
    """How many optimizer steps a checkpoint is the result of; 0 where it does not say."""
    return int((source.state.get("engine") or {}).get("steps") or 0)
