"""`plait doctor`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.cli.files import write_file
from plait.config import yaml_io
from plait.errors import ConfigError, Problem
from plait.launch import report
from plait.plugins import installed


def doctor(out: str | None = None, *, as_json: bool = False) -> None:
    """What is here, a verdict on each line. `out` is refused: there is nothing to write without measuring."""
    if out is not None:
        raise ConfigError(Problem("--out", f"{out!r}: nothing was measured", "Add --measure."))
    lines = report()
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for line in lines:
        value = f"{line.value}; {line.remedy}" if line.remedy else line.value
        table.add_row(_MARKS[line.verdict], line.name, Text(value))
    Console(soft_wrap=True).print(table)


def show_plugins(*, as_json: bool = False) -> None:
    """The parts that installed packages bring, and from where. None of them is imported."""
    found = installed()
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return
    console = Console(soft_wrap=True)
    if not found:
        console.print("no installed package brings parts; see docs/write-your-own.md", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("", "kind", "name", "part", "package", "folder"):
        table.add_column(heading)
    for each in found:
        mark = _MARKS["bad" if each.problem else "ok"]
        table.add_row(mark, each.kind, *map(Text, (each.name, each.target, each.package, each.folder)))
        if each.problem:
            table.add_row("", "", "", Text(each.problem))
    console.print(table)


_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}


def measure(out: str | None, folder: str) -> None:
    """Measure this machine, print the figures, and write them where `plait plan --gpu FILE` can read them."""
    if out is not None and Path(out).suffix not in (".yaml", ".yml"):
        raise ConfigError(Problem("--out", f"{out!r} is no YAML file", "Write a name that ends in .yaml."))
    from plait.plan import measure_hardware

    found = measure_hardware(folder=folder)
    _print(found.rows)
    if out is not None:
        write_file(out, yaml_io.dump(found.hardware.to_dict()), "--out")
        Console(soft_wrap=True).print(f"{out}: give it to `plait plan --gpu {out}`", markup=False)


def _print(rows: Sequence[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, value in rows:
        table.add_row(label, value)
    Console(soft_wrap=True).print(table)
