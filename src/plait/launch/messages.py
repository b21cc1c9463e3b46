"""Messages between the launcher and the agents on hosts: agents report the state of ranks, the launcher sends orders.

Messages are dicts that JSON can hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plait.launch.heartbeat_monitor import HeartbeatMonitor
from plait.launch.local import LocalRanks
from plait.launch.records import RankObservation, RankRecord, record_end


class Reporter:
    """Reports the state of the ranks of one host."""

    def __init__(self, ranks: LocalRanks, send: Callable[..., object]) -> None:
        self._ranks, self._send = ranks, send
        self._watch = HeartbeatMonitor(ranks.records)
        self._reported: set[int] = set()

    def begin(self) -> None:
        """Report that the ranks have started."""
        for record in self._ranks.records:
            self._send(rank=record.placement.rank, pid=record.pid, log=record.log)

    def report(self, *, ended_by_us: bool = False) -> None:
        """Report observations once a second, and the ends of ranks. `ended_by_us`: they were stopped on purpose."""
        if self._watch.due():
            self._ranks.observer.look_at_all()
            for record in self._ranks.records:
                if record.running:
                    self._send(rank=record.placement.rank, evidence=record.observation.to_json())
        for record in self._ranks.records:
            if record.exit_code is not None and record.placement.rank not in self._reported:
                self._reported.add(record.placement.rank)
                by_us = record.ended_by_us or (ended_by_us and record.exit_code != 0)
                details: dict[str, Any] = {"evidence": record.observation.to_json(), "message": record.message}
                details["tail"] = list(record.tail)
                self._send(rank=record.placement.rank, code=record.exit_code, by_us=by_us, **details)


def apply_message(record: RankRecord, message: dict[str, Any]) -> None:
    """Update a rank's record from a message about it."""
    if "pid" in message:
        record.pid, record.log, record.started = message["pid"], message["log"], time.time()
    elif "evidence" in message:
        record.observation = RankObservation.from_json(message["evidence"])
        record.message = message.get("message", "")
        if "tail" in message and (record.log is not None or not record.tail):
            record.tail.clear()
            record.tail.extend(message["tail"])
        if "code" in message:
            record_end(record, message["code"], by_us=message["by_us"])


def apply_order(ranks: LocalRanks, order: dict[str, Any]) -> None:
    """Carry out an order of the launcher."""
    if "signal" in order:
        ranks.send(order["signal"])
    elif "stacks" in order:
        ranks.observer.request_stacks()
    elif "end" in order:
        ranks.end(wait=0.0, grace=order["end"])
