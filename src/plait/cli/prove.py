"""`plait prove`: the parity certificate of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from plait.prove import prove as run


def prove(
    config: str, overrides: Sequence[str], *, steps: int, ranks: int | None, layers: int | None, out: str
) -> None:
    """Prove a run, write its certificate and say the verdict; exit code 1 where it fails."""
    certificate = run(config, overrides, steps=steps, ranks=ranks, layers=layers, out=out, log=typer.echo)
    typer.echo(certificate.verdict())
    for note in certificate.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{Path(out, 'certificate.html')} and {Path(out, 'certificate.json')} have all of it")
    if not certificate.passed:
        raise typer.Exit(1)
