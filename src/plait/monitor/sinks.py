"""Build the sinks of a `log` section, and pass events to them."""

from __future__ import annotations

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

# The monitor: every event goes to every sink, and a failing sink does not stop the run.


class Monitor:
    """Passes events to its sinks, in the given order.

    A sink that fails (a full disk, a lost connection) is closed and removed, with one warning in the other
    sinks; training continues.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that have not failed."""
        return tuple(self._sinks)

    def emit(self, event: Event) -> None:
        """Pass the event to every sink."""
        for sink in self.sinks:
            self._call(sink, sink.write, event, at=event)

    def tick(self, step: int) -> None:
        """Call `tick` of the sinks that have it (a progress bar), after every step."""
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
        if sink not in self._sinks:  # it failed while a warning about another sink was passed on
            return
        try:
            action(*arguments)
        except Exception as error:
            self._sinks.remove(sink)
            with suppress(Exception):
                sink.close()
            self._warn(f"{type(sink).__name__} failed and is off for the rest of the run: {_reason(error)}", at)

    def _warn(self, text: str, at: Event | None) -> None:
        step, epoch = (at.step, at.epoch) if at else (0, 0)
        if not any(isinstance(sink, ConsoleSink) for sink in self._sinks):
            with suppress(OSError, ValueError):  # stderr may be closed as well
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
"""Plait's own sinks by name, built in the same way as user-provided ones."""


def build_monitor(config: LogConfig, work_dir: Path, rank: int, *, wandb: Mapping[str, Any] | None = None) -> Monitor:
    """Return a monitor with the sinks of a `log` section: all on rank 0, on other ranks those with `every_rank`.

    `wandb` are further arguments of `wandb.init`. `html` implies `jsonl`, because the report is made from the event
    files of all runs in `work_dir`. Raises `MissingExtraError` where a sink's package is absent.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = []
    if rank == 0 and config.console != "none":
        sinks.append(ConsoleSink(choose_mode(config.console, sys.stdout), sys.stdout))
    names = dict.fromkeys(sink for sink in config.sinks if isinstance(sink, str))
    if {"jsonl", "html"} & names.keys():
        names = {"jsonl": None, **names}  # `jsonl` first, because `html` reads its file
    for name in names:
        settings = {"project": config.wandb_project, "options": wandb} if name == "wandb" else {}
        sinks += _made(CustomSink(type=_SINKS[name], **settings), "log.sinks", work_dir, rank)
    for index, sink in enumerate(config.sinks):
        if isinstance(sink, CustomSink):
            sinks += _made(sink, f"log.sinks.{index}", work_dir, rank)
    return Monitor(sinks)


def report_progress(config: LogConfig, rank: int, text: str) -> None:
    """Print a progress line before the run has sinks: loading, planning and building take a while."""
    if rank == 0 and config.console != "none":
        event = Event(EventKind.MESSAGE, 0, 0, {"text": text})
        with suppress(OSError):  # a closed pipe does not stop the run, as with the console sink
            print(encodable(f"{prefix(event)}{text}", sys.stdout), flush=True)


def _made(config: CustomSink, key: str, work_dir: Path, rank: int) -> list[Sink]:
    """Return the sink in a list, empty on ranks without one. All ranks import it, so that all fail for a bad name."""
    every_rank = getattr(load(config, key), "every_rank", False)
    if rank != 0 and not every_rank:
        return []
    return [build_instance(config, key, work_dir, cls=Sink, **({"rank": rank} if every_rank else {}))]
