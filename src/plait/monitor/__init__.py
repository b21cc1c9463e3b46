"""Event sinks: where a run's story goes. Imports no torch."""

from plait.monitor.build import build_monitor, report_progress
from plait.monitor.fanout import Monitor
from plait.monitor.html import write_report
from plait.monitor.jsonl import read_events

__all__ = ["Monitor", "build_monitor", "read_events", "report_progress", "write_report"]
