"""`plait convert`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from plait.config import choose, choose_type, entry_points_of
from plait.errors import CheckpointError, ConfigError, Problem

if TYPE_CHECKING:
    from plait.checkpoint import Source

_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TARGETS = ("hf", "torch", "plait", "deepspeed", "yaml")
_WEIGHTS = ("model", "ema")


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    to: str | None
    dtype: str
    model: str | None
    weights: str
    shard_size: str
    optimizer: bool
    overwrite: bool
    trust_code: bool
    from_: str | None = None


PLAIN = Options(None, "keep", None, "model", "5GB", optimizer=False, overwrite=False, trust_code=False)
"""What is asked for by saying nothing."""


def check_use(src: str | None, options: Options, *, inspect: str | None, every: bool, verify: bool) -> None:
    """Refuse words that would have no effect: those of a conversion while looking, and the other way round."""
    if inspect is None:
        remedy = "write `plait convert --inspect PATH` with it, or leave it out"
        alone = {"--all": every, "--verify": verify}
        problems = [Problem(key, "goes with --inspect alone", remedy) for key, given in alone.items() if given]
    else:
        message = "would convert, and --inspect only looks: nothing is written"
        words: dict[str, Any] = {} if src is None else {"SRC": src}
        for key, value in asdict(options).items():
            if value != getattr(PLAIN, key) and key != "from_":
                words[f"--{key.replace('_', '-')}"] = value
        remedy = "leave out --inspect to convert, or this to look"
        problems = [
            Problem(key, message if value is True else f"{value!r} {message}", remedy) for key, value in words.items()
        ]
    if problems:
        raise ConfigError(problems)


def convert(src: str | None, dst: str | None, options: Options) -> None:
    """Write a checkpoint, or a configuration, in another form; all that is wrong with the options is said at once."""
    shard_size, problems = _check(src, dst, options)
    if problems:
        raise ConfigError(problems)
    assert src is not None
    if options.to == "yaml":
        from plait.cli.translating import convert_config

        convert_config(src, dst, overwrite=options.overwrite)
        return
    assert dst is not None

    import torch

    from plait.checkpoint import convert as room
    from plait.cli.conversion import prepared
    from plait.monitor import duration, size

    start = time.perf_counter()
    to: Any = options.to
    with room.open_source(Path(src), options.from_) as opened:
        source = room.averaged(opened) if options.weights == "ema" else opened
        source, description = prepared(
            room.part_for(source, to, optimizer=options.optimizer), to, options.model, trust_code=options.trust_code
        )
        dtype = _DTYPES[options.dtype]
        if dtype is not None:
            source = room.cast(source, getattr(torch, dtype))
        with _progress(source) as told:
            written = room.convert(
                room.Watched(source, told),
                Path(dst),
                to,
                description=description,
                shard_size=shard_size,
                optimizer=options.optimizer,
                overwrite=options.overwrite,
            )
    seconds = time.perf_counter() - start
    tensors = f"{written.tensors} tensor{'' if written.tensors == 1 else 's'}"
    took = f"{size(written.bytes)} in {duration(seconds)}, {size(_peak_memory())} of memory at most"
    typer.echo(f"{dst}: {tensors}, {took}")


def inspect(path: str, *, every: bool, verify: bool, from_: str | None = None) -> None:
    """Show what is inside a checkpoint of any kind; with `verify`, read all of it first, and exit with 1 if damaged."""
    if not verify:
        _show(path, every=every, verify=False, from_=from_)
        return
    try:
        _show(path, every=every, verify=True, from_=from_)
    except CheckpointError as error:
        from plait.launch import tell

        tell(error)
        raise typer.Exit(1) from error


def _show(path: str, *, every: bool, verify: bool, from_: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from plait.checkpoint import open_source, parts, rows
    from plait.monitor import compact, size

    with open_source(Path(path), from_) as source:
        verified = source.verify() if verify else None
        facts = Table(box=None, show_header=False, pad_edge=False)
        facts.add_row("path", str(source.path))
        facts.add_row("kind", source.kind)
        for label, fact in source.facts.items():
            facts.add_row(label, fact)
        if verified is not None:
            facts.add_row("verified", verified)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading, side in (("tensor", "left"), ("count", "right"), ("shape", "left"), ("dtype", "left")):
            table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]  # both are justifications
        table.add_column("size", justify="right", no_wrap=True)
        for row in rows(source.entries, every=every):
            count = "" if row.tensors == 1 else f"× {row.tensors}"
            table.add_row(row.name, count, " × ".join(map(str, row.shape)) or "scalar", row.dtype, size(row.bytes))
        totals = Table(box=None, pad_edge=False, header_style="bold")
        totals.add_column("part")
        for heading in ("tensors", "elements", "size"):
            totals.add_column(heading, justify="right")
        for part in parts(source.entries):
            totals.add_row(part.name, str(part.tensors), compact(part.elements), size(part.bytes))
    # A pipe has no width: rows stay whole there.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 400, highlight=False, markup=False)
    for each in (facts, "", table, "", totals):
        console.print(each)


def _check(src: str | None, dst: str | None, options: Options) -> tuple[int, list[Problem]]:
    problems = _check_alone(options) if options.to == "yaml" else []
    if src is None or (dst is None and options.to != "yaml"):
        missing = "SRC DST" if src is None else "DST"
        problems.append(Problem(missing, "not given", "Write `plait convert SRC DST --to …`, or --inspect PATH."))
    for key, value, choices in (
        ("--to", options.to, _TARGETS),
        ("--dtype", options.dtype, tuple(_DTYPES)),
        ("--weights", options.weights, _WEIGHTS),
    ):
        if value is None:
            problems.append(Problem(key, "not given", f"Say what to write: {', '.join(choices)}."))
        elif value not in choices and not (key == "--to" and _is_own(value)):
            remedy = choose_type("converter", value, choices) if key == "--to" else choose(value, choices, "choice")
            problems.append(Problem(key, f"{value!r} is not known", remedy))
    if options.from_ is not None and not _is_own(options.from_):
        message = f"{options.from_!r} is no reader of one's own; kinds that Plait knows are seen by themselves"
        problems.append(Problem("--from", message, choose_type("converter", options.from_, ())))
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?", options.shard_size.upper())
    shard_size = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if shard_size <= 0:
        problems.append(Problem("--shard-size", f"{options.shard_size!r} is no size", "Write 5GB or 500MiB."))
    if options.optimizer and options.to not in ("torch", "yaml"):
        instead = "hf has no place for it" if options.to == "hf" else "the others take it anyway"
        problems.append(Problem("--optimizer", f"goes with `--to torch` alone; {instead}", "Leave it out."))
    return shard_size, problems


def _is_own(name: str) -> bool:
    return ":" in name or name in entry_points_of("converter")


def _check_alone(options: Options) -> list[Problem]:
    """A configuration has no weights, so what is said about weights would have no effect."""
    words = {key: value for key, value in asdict(options).items() if key not in ("to", "overwrite")}
    return [
        Problem(
            f"--{key.strip('_').replace('_', '-')}",
            "goes with a checkpoint, and `--to yaml` with a configuration",
            "Leave it out.",
        )
        for key, value in words.items()
        if value != getattr(PLAIN, key)
    ]


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(entry.bytes for entry in source.entries.values()))
        yield lambda count: progress.advance(task, count)


def _peak_memory() -> int:
    """The most memory that this process had; Linux's usual answer would be that of its parent, if that had more."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(found[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
