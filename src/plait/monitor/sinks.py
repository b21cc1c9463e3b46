"""From the section `log` to the sinks of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from plait.config import CustomSink, LogConfig
from plait.monitor.console import ConsoleSink, choose_mode, encodable, prefix
from plait.monitor.events import Event, EventKind, Sink
from plait.plugins import build_instance, load

# One voice for a run: every event goes to every sink, and no sink can stop the run.


class Monitor:
    """Hands events to its sinks, in the given order.

    A sink that fails (a full disk, a lost connection) is closed and left out from then on, with one
    warning in the sinks that remain; training goes on.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        """Give the event to every sink."""
        for sink in self.sinks:
            self._call(sink, sink.write, event, at=event)

    def tick(self, step: int) -> None:
        """Tell the sinks that move with every step (a progress bar) that one is done."""
        for sink in self.sinks:
            if (tick := getattr(sink, "tick", None)) is not None:
                self._call(sink, tick, step)

    def close(self) -> None:
        """Close every sink, the last one first. A second call does nothing."""
        while self._sinks:
            sink = self._sinks[-1]
            self._call(sink, sink.close)
            if sink in self._sinks:
                self._sinks.remove(sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, sink: Sink, action: Callable[..., None], *arguments: object, at: Event | None = None) -> None:
        if sink not in self._sinks:  # it failed while an earlier sink's warning was passed on
            return
        try:
            action(*arguments)
        except Exception as error:
            self._sinks.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            self._warn(f"{type(sink).__name__} failed and is off for the rest of the run: {_reason(error)}", at)

    def _warn(self, text: str, at: Event | None) -> None:
        step, epoch = (at.step, at.epoch) if at else (0, 0)
        if not any(isinstance(sink, ConsoleSink) for sink in self._sinks):
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed as well
                print(f"plait: {text}", file=sys.stderr, flush=True)
        self.emit(Event(EventKind.MESSAGE, step, epoch, {"level": "warning", "text": text}))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_SINKS = MappingProxyType(
    {
        "jsonl": "plait.monitor.files:JsonlSink",
        "csv": "plait.monitor.files:CsvSink",
        "tensorboard": "plait.monitor.trackers:TensorBoardSink",
        "wandb": "plait.monitor.trackers:WandbSink",
        "html": "plait.monitor.report:HtmlSink",
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
    named = dict.fromkeys(sink for sink in config.sinks if isinstance(sink, str))
    # The record comes before the report, which reads it.
    for name in dict.fromkeys([*(name for name in ("jsonl",) if {"jsonl", "html"} & named.keys()), *named]):
        settings = {"project": config.wandb_project, "options": wandb} if name == "wandb" else {}
        sinks += _made(CustomSink(type=_SINKS[name], **settings), "log.sinks", work_dir, rank)
    for index, sink in enumerate(config.sinks):
        if isinstance(sink, CustomSink):
            sinks += _made(sink, f"log.sinks.{index}", work_dir, rank)
    return Monitor(sinks)


def report_progress(config: LogConfig, rank: int, text: str) -> None:
    """Say what a run does before it has sinks: loading, planning and building take a while, each without a line."""
    if rank == 0 and config.console != "none":
        event = Event(EventKind.MESSAGE, 0, 0, {"text": text})
        with suppress(OSError):  # nobody reads it: the run goes on all the same, as it does without its console sink
            print(encodable(f"{prefix(event)}{text}", sys.stdout), flush=True)


def _made(config: CustomSink, key: str, work_dir: Path, rank: int) -> list[Sink]:
    """The sink, on a rank that has one. Every rank loads it, so that a wrong name ends all of them."""
    every_rank = getattr(load(config, key), "every_rank", False)
    if rank != 0 and not every_rank:
        return []
    return [build_instance(config, key, work_dir, cls=Sink, **({"rank": rank} if every_rank else {}))]
