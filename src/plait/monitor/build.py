"""The sinks of a run, and what it says before it has any."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plait.config import LogConfig
from plait.monitor.console import ConsoleSink, choose_mode, spelled
from plait.monitor.fanout import Monitor
from plait.monitor.html import HtmlSink
from plait.monitor.jsonl import JsonlSink
from plait.monitor.line import prefix
from plait.spec import Event, EventKind, Sink


def build_monitor(config: LogConfig, work_dir: Path, rank: int, *, wandb: Mapping[str, Any] | None = None) -> Monitor:
    """The sinks that `config` asks for: all of them on rank 0, the record of events alone elsewhere.

    `wandb` is what the script has to say to `wandb.init`.

    `html` brings the record with it, because the report is drawn from the record of every run in
    `work_dir`. Raises `MissingExtraError` where a sink's package is absent.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if rank == 0 and config.console != "none":
        sinks.append(ConsoleSink(choose_mode(config.console, sys.stdout), sys.stdout))
    # The record comes before the report, which reads it.
    if "jsonl" in config.sinks or "html" in config.sinks:
        sinks.append(JsonlSink(work_dir, rank))
    if rank == 0:
        sinks += [
            _build(name, config, work_dir, wandb or {}) for name in dict.fromkeys(config.sinks) if name != "jsonl"
        ]
    return Monitor(sinks)


def report_progress(config: LogConfig, rank: int, text: str) -> None:
    """Say what a run does before it has sinks: loading, planning and building take a while, each without a line."""
    if rank == 0 and config.console != "none":
        event = Event(EventKind.MESSAGE, 0, 0, {"text": text})
        with suppress(OSError):  # nobody reads it: the run goes on all the same, as it does without its console sink
            print(spelled(f"{prefix(event)}{text}", sys.stdout), flush=True)


def _build(name: str, config: LogConfig, work_dir: Path, wandb: Mapping[str, Any]) -> Sink:
    # Imported where asked for, so that a run pays for no sink that it does not use.
    match name:
        case "csv":
            from plait.monitor.csv_file import CsvSink

            return CsvSink(work_dir)
        case "tensorboard":
            from plait.monitor.tensorboard import TensorBoardSink

            return TensorBoardSink(work_dir)
        case "wandb":
            from plait.monitor.wandb import WandbSink

            return WandbSink(work_dir, config.wandb_project, wandb)
        case _:
            return HtmlSink(work_dir)
