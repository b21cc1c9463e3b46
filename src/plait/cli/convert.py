"""`plait convert`: convert a checkpoint or a configuration, or show a checkpoint's contents."""

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

from plait.cli.files import write_file
from plait.config import RunConfig, choose, choose_type, entry_points_of, yaml_io
from plait.errors import CheckpointError, ConfigError, Problem
from plait.frontends import KeyOutcome, KeyReport, Translation

if TYPE_CHECKING:
    from plait.checkpoint import Source

_DTYPES = {"keep": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TARGETS = ("hf", "torch", "plait", "deepspeed", "yaml")
_WEIGHTS = ("model", "ema")


@dataclass(frozen=True)
class ConvertOptions:
    """The options of the command."""

    to: str | None
    dtype: str
    model: str | None
    weights: str
    shard_size: str
    optimizer: bool
    overwrite: bool
    trust_code: bool
    from_: str | None = None


PLAIN = ConvertOptions(None, "keep", None, "model", "5GB", optimizer=False, overwrite=False, trust_code=False)
"""The options of a command line that sets none of them."""


def check_use(src: str | None, options: ConvertOptions, *, inspect: str | None, every: bool, verify: bool) -> None:
    """Raise an error for options without effect: those of a conversion with `--inspect`, its own without it."""
    if inspect is None:
        remedy = "write `plait convert --inspect PATH` with it, or leave it out"
        alone = {"--all": every, "--verify": verify}
        problems = [Problem(key, "goes with --inspect alone", remedy) for key, given in alone.items() if given]
    else:
        message = "has no effect: --inspect converts nothing"
        options_set: dict[str, Any] = {} if src is None else {"SRC": src}
        for key, value in asdict(options).items():
            if value != getattr(PLAIN, key) and key != "from_":
                options_set[f"--{key.replace('_', '-')}"] = value
        remedy = "leave out --inspect to convert, or this to inspect"
        problems = [
            Problem(key, message if value is True else f"{value!r} {message}", remedy)
            for key, value in options_set.items()
        ]
    if problems:
        raise ConfigError(problems)


def convert(src: str | None, dst: str | None, options: ConvertOptions) -> None:
    """Write a checkpoint, or a configuration, in another format. All problems with the options are raised at once."""
    shard_size, problems = _check(src, dst, options)
    if problems:
        raise ConfigError(problems)
    assert src is not None
    if options.to == "yaml":
        convert_config(src, dst, overwrite=options.overwrite)
        return
    assert dst is not None

    import torch

    from plait.checkpoint import convert as conversion
    from plait.cli.converted_model import prepare_source
    from plait.distributed import peak_host_memory
    from plait.monitor import format_bytes, format_duration

    start = time.perf_counter()
    to: Any = options.to
    with conversion.open_source(Path(src), options.from_) as opened:
        source = conversion.averaged(opened) if options.weights == "ema" else opened
        source, description = prepare_source(
            conversion.select_for(source, to, optimizer=options.optimizer),
            to,
            options.model,
            trust_code=options.trust_code,
        )
        dtype = _DTYPES[options.dtype]
        if dtype is not None:
            source = conversion.cast(source, getattr(torch, dtype))
        with _progress(source) as advance:
            result = conversion.convert(
                conversion.ProgressSource(source, advance),
                Path(dst),
                to,
                description=description,
                shard_size=shard_size,
                optimizer=options.optimizer,
                overwrite=options.overwrite,
            )
    seconds = time.perf_counter() - start
    tensors = f"{result.tensors} tensor{'' if result.tensors == 1 else 's'}"
    memory = format_bytes(peak_host_memory())
    took = f"{format_bytes(result.bytes)} in {format_duration(seconds)}, {memory} of memory at most"
    typer.echo(f"{dst}: {tensors}, {took}")


def inspect(path: str, *, every: bool, verify: bool, from_: str | None = None) -> None:
    """Show the contents of a checkpoint; with `verify`, read all of it first, and exit with 1 if it is damaged."""
    if not verify:
        _show(path, every=every, verify=False, from_=from_)
        return
    try:
        _show(path, every=every, verify=True, from_=from_)
    except CheckpointError as error:
        from plait.launch import report_failure

        report_failure(error)
        raise typer.Exit(1) from error


def _show(path: str, *, every: bool, verify: bool, from_: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from plait.checkpoint import group_totals, open_source, summary_rows
    from plait.monitor import format_bytes, format_count

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
        for row in summary_rows(source.entries, every=every):
            count = "" if row.tensors == 1 else f"× {row.tensors}"
            table.add_row(
                row.name, count, " × ".join(map(str, row.shape)) or "scalar", row.dtype, format_bytes(row.bytes)
            )
        totals = Table(box=None, pad_edge=False, header_style="bold")
        totals.add_column("part")
        for heading in ("tensors", "elements", "size"):
            totals.add_column(heading, justify="right")
        for group in group_totals(source.entries):
            totals.add_row(group.name, str(group.tensors), format_count(group.elements), format_bytes(group.bytes))
    # Do not break rows if the output is a pipe.
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 400, highlight=False, markup=False)
    for block in (facts, "", table, "", totals):
        console.print(block)


def _check(src: str | None, dst: str | None, options: ConvertOptions) -> tuple[int, list[Problem]]:
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
        message = f"{options.from_!r} is not a custom reader; the formats that Plait knows are detected"
        problems.append(Problem("--from", message, choose_type("converter", options.from_, ())))
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?", options.shard_size.upper())
    shard_size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if shard_size <= 0:
        problems.append(Problem("--shard-size", f"{options.shard_size!r} is not a size", "Write 5GB or 500MiB."))
    if options.optimizer and options.to not in ("torch", "yaml"):
        instead = "the hf format has none" if options.to == "hf" else "the other formats always include it"
        problems.append(Problem("--optimizer", f"goes with `--to torch` alone; {instead}", "Leave it out."))
    return shard_size, problems


def _is_own(name: str) -> bool:
    return ":" in name or name in entry_points_of("converter")


def _check_alone(options: ConvertOptions) -> list[Problem]:
    """Return a problem for each option about weights: a configuration has none."""
    changed = {key: value for key, value in asdict(options).items() if key not in ("to", "overwrite")}
    return [
        Problem(
            f"--{key.strip('_').replace('_', '-')}",
            "applies to checkpoints, and `--to yaml` converts a configuration",
            "Leave it out.",
        )
        for key, value in changed.items()
        if value != getattr(PLAIN, key)
    ]


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds bytes to a progress bar; the bar is shown only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(entry.bytes for entry in source.entries.values()))
        yield lambda count: progress.advance(task, count)


# `plait convert CONFIG --to yaml`: converts another framework's configuration to a run description.


_YOURS = "# Add `model` and `data`: the other framework leaves them to the script."

_SEARCH = "# A search is a file of its own, for `plait tune run.yaml --search search.yaml`:"


def convert_config(src: str, dst: str | None, *, overwrite: bool) -> None:
    """Print the run description that means the same as a configuration, or write it to `dst`.

    Comments in it say for every key how it was translated. These are also printed to stderr, unless the description
    is printed on a terminal. If a key is refused, exit with code 1, as the description is then not complete.
    """
    if dst is not None and Path(dst).exists() and not overwrite:
        raise ConfigError(Problem("DST", f"{dst!r} is there already", "Give another name, or --overwrite."))
    name, translation = translation_of(Path(src))
    text = description_text(Path(src).name, name, translation, _search(Path(src)) if name == "DeepSpeed" else {})
    if dst is None:
        typer.echo(text, nl=False)
    else:
        write_file(dst, text, "DST")
    if dst is not None or not sys.stdout.isatty():
        _show_key_report(Path(src).name, name, translation.report)
    if any(translation.report.of(KeyOutcome.REFUSED)):
        raise typer.Exit(1)


def translation_of(path: Path) -> tuple[str, Translation]:
    """Return the framework of a configuration, and its translation to a run description."""
    from plait.frontends import accelerate, deepspeed

    config = deepspeed.read_config(path)
    if accelerate.is_accelerate(config):
        return "Accelerate", accelerate.translate(path)
    if deepspeed.is_deepspeed(config):
        return "DeepSpeed", deepspeed.translate(path)
    if config and all(key in RunConfig.model_fields for key in config):
        raise ConfigError(Problem("SRC", f"{str(path)!r} is a run description already", "Use it as it is."))
    message = f"{str(path)!r} is neither a configuration of DeepSpeed nor one of Accelerate"
    raise ConfigError(Problem("SRC", message, "Give a ds_config.json, or the YAML of `accelerate config`."))


def description_text(file: str, name: str, translation: Translation, search: dict[str, Any]) -> str:
    """Return the run description as YAML, with comments about the translation of every key and about `search`."""
    report = translation.report
    comments = [f"# {file}, a configuration of {name}. {report.summary()}.", "#"]
    comments += [f"#   {line}" for line in report.lines()]
    text = yaml_io.dump(translation.sections) if translation.sections else ""
    after = [_YOURS, *([_SEARCH, *(f"#   {line}" for line in yaml_io.dump(search).splitlines())] if search else [])]
    return "\n".join([*comments, "", *text.splitlines(), "", *after, ""])


def _search(path: Path) -> dict[str, Any]:
    """Return the settings of `plait tune` in the `autotuning` section of a DeepSpeed config; {} if it is off."""
    from plait.frontends.deepspeed import search

    tuning = search(path)
    return {} if tuning is None or not tuning.enabled else tuning.config.model_dump(mode="json", exclude_defaults=True)


def _show_key_report(file: str, name: str, report: KeyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("outcome", f"key of {name}", "value", "explanation"):
        table.add_column(heading)
    for entry in report.entries:
        table.add_row(entry.outcome.value, entry.key, entry.shown, entry.text)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False, markup=False)
    console.print(f"{file}: {report.summary()}")
    console.print(table)
