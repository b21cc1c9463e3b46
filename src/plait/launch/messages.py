"""How ranks do, told by whoever started them to the launcher, and what the launcher orders: plain values both."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from plait.launch.local import LocalRanks
from plait.launch.records import FailureRecord, RankRecord, record_end
from plait.launch.watch import Watch


class Reporter:
    """Tells of the ranks of one host."""

    def __init__(self, ranks: LocalRanks, say: Callable[..., object]) -> None:
        self._ranks, self._say = ranks, say
        self._watch = Watch(ranks.records)
        self._told: set[int] = set()

    def begin(self) -> None:
        """The ranks have started."""
        for record in self._ranks.records:
            self._say(rank=record.place.rank, pid=record.pid, log=record.log)

    def tell(self, *, ended_by_us: bool = False) -> None:
        """How ranks do, once a second, and their ends. `ended_by_us`: they were told to go, by somebody."""
        if self._watch.due():
            self._ranks.witness.look_at_all()
            for record in self._ranks.records:
                if record.running:
                    self._say(rank=record.place.rank, evidence=record.evidence.to_json())
        for record in self._ranks.records:
            if record.exit_code is not None and record.place.rank not in self._told:
                self._told.add(record.place.rank)
                by_us = record.ended_by_us or (ended_by_us and record.exit_code != 0)
                about: dict[str, Any] = {"evidence": record.evidence.to_json(), "message": record.message}
                about["tail"] = list(record.tail)
                self._say(rank=record.place.rank, code=record.exit_code, by_us=by_us, **about)


def take(record: RankRecord, news: dict[str, Any]) -> None:
    """Write into a rank's record what was told of it."""
    if "pid" in news:
        record.pid, record.log, record.started = news["pid"], news["log"], time.time()
    elif "evidence" in news:
        record.evidence = FailureRecord.from_json(news["evidence"])
        record.message = news.get("message", "")
        if "tail" in news and (record.log is not None or not record.tail):
            record.tail.clear()
            record.tail.extend(news["tail"])
        if "code" in news:
            record_end(record, news["code"], by_us=news["by_us"])


def obey(ranks: LocalRanks, order: dict[str, Any]) -> None:
    """Do what the launcher says."""
    if "signal" in order:
        ranks.send(order["signal"])
    elif "stacks" in order:
        ranks.witness.ask_for_stacks()
    elif "end" in order:
        ranks.end(say=0.0, grace=order["end"])
