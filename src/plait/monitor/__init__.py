"""Event sinks: console, files, reports and experiment trackers. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.monitor import report as report
    from plait.monitor.console import encodable as encodable
    from plait.monitor.events import Event as Event
    from plait.monitor.events import EventKind as EventKind
    from plait.monitor.events import MessageEvent as MessageEvent
    from plait.monitor.events import Sink as Sink
    from plait.monitor.files import JsonlSink as JsonlSink
    from plait.monitor.files import events_path as events_path
    from plait.monitor.files import plain_json as plain_json
    from plait.monitor.files import read_events as read_events
    from plait.monitor.format import format_bytes as format_bytes
    from plait.monitor.format import format_clock as format_clock
    from plait.monitor.format import format_count as format_count
    from plait.monitor.format import format_duration as format_duration
    from plait.monitor.format import scalars as scalars
    from plait.monitor.history import History as History
    from plait.monitor.history import history as history
    from plait.monitor.report import card as card
    from plait.monitor.report import document as document
    from plait.monitor.report import escaped as escaped
    from plait.monitor.report import fact_list as fact_list
    from plait.monitor.report import footer as footer
    from plait.monitor.report import page_header as page_header
    from plait.monitor.report import write_report as write_report
    from plait.monitor.sinks import Monitor as Monitor
    from plait.monitor.sinks import build_monitor as build_monitor
    from plait.monitor.sinks import report_progress as report_progress
    from plait.monitor.svg import Scale as Scale
    from plait.monitor.svg import axes as axes
    from plait.monitor.svg import image as image
    from plait.monitor.svg import ticks as ticks
    from plait.monitor.trackers import TensorBoardSink as TensorBoardSink
    from plait.monitor.trackers import WandbSink as WandbSink
else:
    from plait.lazy import attach_names

    attach_names(__name__)
