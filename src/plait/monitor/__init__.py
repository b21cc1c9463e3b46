"""Event sinks: where a run's story goes. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.monitor import page as page
    from plait.monitor.build import build_monitor as build_monitor
    from plait.monitor.build import report_progress as report_progress
    from plait.monitor.console import spelled as spelled
    from plait.monitor.fanout import Monitor as Monitor
    from plait.monitor.history import History as History
    from plait.monitor.history import history as history
    from plait.monitor.html import write_report as write_report
    from plait.monitor.jsonl import JsonlSink as JsonlSink
    from plait.monitor.jsonl import events_path as events_path
    from plait.monitor.jsonl import read_events as read_events
    from plait.monitor.page import card as card
    from plait.monitor.page import document as document
    from plait.monitor.page import footer as footer
    from plait.monitor.page import text as text
    from plait.monitor.scalars import scalars as scalars
    from plait.monitor.svg import Scale as Scale
    from plait.monitor.svg import axes as axes
    from plait.monitor.svg import image as image
    from plait.monitor.svg import ticks as ticks
    from plait.monitor.tensorboard import TensorBoardSink as TensorBoardSink
    from plait.monitor.units import clock as clock
    from plait.monitor.units import compact as compact
    from plait.monitor.units import duration as duration
    from plait.monitor.units import size as size
    from plait.monitor.wandb import WandbSink as WandbSink
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            ".": ["page"],
            "build": ["build_monitor", "report_progress"],
            "console": ["spelled"],
            "fanout": ["Monitor"],
            "history": ["History", "history"],
            "html": ["write_report"],
            "jsonl": ["JsonlSink", "events_path", "read_events"],
            "page": ["card", "document", "footer", "text"],
            "scalars": ["scalars"],
            "svg": ["Scale", "axes", "image", "ticks"],
            "tensorboard": ["TensorBoardSink"],
            "units": ["clock", "compact", "duration", "size"],
            "wandb": ["WandbSink"],
        },
    )
