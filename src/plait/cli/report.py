"""`plait report`."""

from __future__ import annotations

from pathlib import Path

import typer

from plait.cli.files import read_file
from plait.errors import DataError
from plait.monitor import read_events, write_report


def report(run_dir: str, out: str | None, samples: list[str]) -> None:
    """Draw the page from the record of rank 0."""
    record = Path(run_dir) / "events-rank0.jsonl"
    if not record.exists():
        raise DataError(f"{record} does not exist: {run_dir!r} is not the work_dir of a run with the jsonl sink")
    target = Path(out) if out else Path(run_dir) / "report.html"
    texts = [(Path(name).stem, read_file(name, "--sample")) for name in samples]
    events = read_events([record])
    try:
        write_report(events, target, title=Path(run_dir).resolve().name, samples=texts, folder=Path(run_dir))
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}; name another place with --out") from error
    typer.echo(f"report: {target}")
