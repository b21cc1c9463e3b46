"""One conversion, from an open source to a target under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from plait.checkpoint.convert.huggingface import Description
from plait.checkpoint.convert.source import Source, only
from plait.checkpoint.convert.target import replacing
from plait.checkpoint.save import write_alone
from plait.errors import CheckpointError, ConfigError, Problem
from plait.plugins import call, find

Kind = Literal["hf", "torch", "plait", "deepspeed"]
KINDS: tuple[Kind, ...] = ("hf", "torch", "plait", "deepspeed")
"""What can be written."""

WRITERS: Mapping[str, str] = MappingProxyType(
    {
        "hf": "plait.checkpoint.convert.huggingface:write_huggingface",
        "torch": "plait.checkpoint.convert.torchfile:write_torch",
        "plait": "plait.checkpoint.convert.sinks:write_plait",
        "deepspeed": "plait.checkpoint.convert.deepspeed:write_deepspeed",
    }
)
"""What writes each of them; it comes in as a writer of the user's own does, and returns the bytes that it wrote."""

_KEY = "--to"

SHARD_SIZE = 5 * 10**9
"""Bytes of one file of a Hugging Face folder, unless told otherwise."""


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion wrote."""

    tensors: int
    bytes: int


class Writer(Protocol):
    """What `plait convert --to` may name: a function that writes another kind of checkpoint."""

    def __call__(self, source: Source, target: Path, /) -> None:
        """Write all that it takes of a source to a file or folder, which gets its name once this has returned."""


def _write_with(writer: str, source: Source, staging: Path) -> int:
    call(find("converter", writer, _KEY), _KEY, source, staging, name=writer, arguments={})
    if staging.is_file():
        return staging.stat().st_size
    files = [path for path in staging.rglob("*") if path.is_file()]
    if not files:
        raise ConfigError(Problem(_KEY, f"{writer!r} wrote nothing", "Write to the path that it is given."))
    return sum(path.stat().st_size for path in files)


def write_plait(source: Source, target: Path) -> int:
    """Write a checkpoint of Plait's; returns its size."""
    return write_alone(target, source.entries, source.read, source.state, step=steps(source))


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
) -> ConversionResult:
    """Write all of a source (see `part_for`) in another form; one tensor after another, and all or nothing.

    `to` may name a `Writer` of the user's own. `description` is needed for `hf` alone.
    """
    assert to != "hf" or description is not None
    needed = sum(entry.bytes for entry in source.entries.values())
    with replacing(target, source=source.path, needed=needed, overwrite=overwrite) as staging:
        if to in WRITERS:
            told: dict[str, dict[str, Any]] = {
                "hf": {"description": description, "shard_size": shard_size},
                "torch": {"optimizer": optimizer},
            }
            size: int = find("converter", WRITERS[to], _KEY)(source, staging, **told.get(to, {}))
        else:
            size = _write_with(to, source, staging)
    return ConversionResult(len(source.entries), size)


def steps(source: Source) -> int:
    """How many optimizer steps a checkpoint is the result of; 0 where it does not say."""
    return int((source.state.get("engine") or {}).get("steps") or 0)
