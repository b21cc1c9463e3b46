"""From the section `log` to the sinks of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait.config import LogConfig, SinkPart
from plait.monitor.console import ConsoleSink, choose_mode, spelled
from plait.monitor.fanout import Monitor
from plait.monitor.line import prefix
from plait.plugins import load, make
from plait.spec import Event, EventKind, Sink

_OWN = MappingProxyType(
    {
        "jsonl": "plait.monitor.jsonl:JsonlSink",
        "csv": "plait.monitor.csv_file:CsvSink",
        "tensorboard": "plait.monitor.tensorboard:TensorBoardSink",
        "wandb": "plait.monitor.wandb:WandbSink",
        "html": "plait.monitor.html:HtmlSink",
    }
)
"""Plait's own sinks by their words; they are made as those of users are."""


def build_monitor(config: LogConfig, work_dir: Path, rank: int, *, wandb: Mapping[str, Any] | None = None) -> Monitor:
    """The sinks that `config` asks for: all of them on rank 0, elsewhere those that want every rank.

    `wandb` is what the script has to say to `wandb.init`.

    `html` brings the record of events with it, because the report is drawn from the record of every run in
    `work_dir`. Raises `MissingExtraError` where a sink's package is absent.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if rank == 0 and config.console != "none":
        sinks.append(ConsoleSink(choose_mode(config.console, sys.stdout), sys.stdout))
    words = dict.fromkeys(sink for sink in config.sinks if isinstance(sink, str))
    # The record comes before the report, which reads it.
    for word in dict.fromkeys([*(each for each in ("jsonl",) if {"jsonl", "html"} & words.keys()), *words]):
        settings = {"project": config.wandb_project, "options": wandb} if word == "wandb" else {}
        sinks += _made(SinkPart(type=_OWN[word], **settings), "log.sinks", work_dir, rank)
    for index, sink in enumerate(config.sinks):
        if isinstance(sink, SinkPart):
            sinks += _made(sink, f"log.sinks.{index}", work_dir, rank)
    return Monitor(sinks)


def report_progress(config: LogConfig, rank: int, text: str) -> None:
    """Say what a run does before it has sinks: loading, planning and building take a while, each without a line."""
    if rank == 0 and config.console != "none":
        event = Event(EventKind.MESSAGE, 0, 0, {"text": text})
        with suppress(OSError):  # nobody reads it: the run goes on all the same, as it does without its console sink
            print(spelled(f"{prefix(event)}{text}", sys.stdout), flush=True)


def _made(part: SinkPart, key: str, work_dir: Path, rank: int) -> list[Sink]:
    """The sink, on a rank that has one. Every rank loads it, so that a wrong name ends all of them."""
    every_rank = getattr(load(part, key), "every_rank", False)
    if rank != 0 and not every_rank:
        return []
    return [make(part, key, work_dir, kind=Sink, **({"rank": rank} if every_rank else {}))]
