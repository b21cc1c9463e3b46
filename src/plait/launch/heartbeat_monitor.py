"""Finds hangs and stragglers from the heartbeats of running ranks."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from plait.launch.heartbeat import Phase
from plait.launch.records import RankRecord

EVERY_S = 1.0
_OFFSET_S = 0.125
"""Ranks sample their collectives at multiples of 0.25 s of the clock; heartbeats are read halfway between two."""
_LONGEST_SAMPLE_S = 3.0
"""The longest time between two samples that counts as waiting: if the machine slept in between, ranks did not wait."""
_MARGIN, _MOST_MARGIN_S = 0.2, 10.0
"""A hang is reported before the timeout, by this fraction of it (at most 10 s): ranks can then still write stacks."""

_HINTS = {
    Phase.IDLE: "its data, logs or hooks are slow: give data.workers more, or look at its disk",
    Phase.FORWARD: "it computes more slowly: another program on its device, or a device that is throttled",
    Phase.BACKWARD: "it computes more slowly: another program on its device, or a device that is throttled",
}


class HeartbeatMonitor:
    """Finds hangs and stragglers in the records of all ranks. The caller must update the records' observations.

    A rank is a straggler if all others waited for it in at least the fraction `share` of the last `window` samples.
    """

    def __init__(self, records: Sequence[RankRecord], *, window: int = 40, share: float = 0.75) -> None:
        self._records = records
        self._window, self._share = window, share
        self._stragglers: deque[tuple[int, Phase] | None] = deque(maxlen=window)
        self._reported: set[int] = set()
        self._next = 0.0
        self._sampled_at: float | None = None
        self._waits: dict[int, tuple[tuple[float, int], float]] = {}
        """By rank that waits: start and number of its collective, and how many seconds it was seen to wait."""

    def due(self) -> bool:
        """Return whether it is time for another sample; true once a second."""
        now = time.time()
        if self._next - 2 * EVERY_S < now < self._next:  # `now` is earlier than that only if the clock was set back
            return False
        self._next = (now - _OFFSET_S) // EVERY_S * EVERY_S + EVERY_S + _OFFSET_S
        return True

    def hangs(self) -> bool:
        """Return whether a rank has waited in a collective for nearly its timeout. Call it once per sample.

        The time that a rank waits is added up from the times between samples. The difference of two clock times would
        be wrong if the clock was set forward or the machine slept, and would end runs in which no rank waits.
        """
        now = time.monotonic()
        passed = float("inf") if self._sampled_at is None else min(now - self._sampled_at, _LONGEST_SAMPLE_S)
        self._sampled_at, before, self._waits = now, self._waits, {}
        hung = False
        for record in self._records:
            beat = record.observation.beat
            if not record.running or beat is None or not beat.pending:
                continue
            since = (beat.called, beat.count)
            earlier, seconds = before.get(record.placement.rank, (None, 0.0))
            seen = seconds + passed if earlier == since else min(record.observation.waiting_s, passed)
            self._waits[record.placement.rank] = since, seen
            hung |= seen > _hang_after(beat.timeout_s)
        return hung

    def straggler(self) -> str | None:
        """Return a warning about a rank that the others often wait for, once per rank; else None.

        Call it once per sample.
        """
        beats = {
            r.placement.rank: r.observation.beat for r in self._records if r.running and r.observation.beat is not None
        }
        busy = [(rank, beat.phase) for rank, beat in beats.items() if not beat.pending]
        same_moment = len({beat.tick for beat in beats.values()}) == 1
        if len(beats) < 2 or len(beats) < len(self._records) or not same_moment:
            return None
        self._stragglers.append(busy[0] if len(busy) == 1 else None)
        counts = Counter(entry[0] for entry in self._stragglers if entry is not None)
        rank, samples = counts.most_common(1)[0] if counts else (-1, 0)
        if rank in self._reported or samples < self._share * self._window:
            return None
        self._reported.add(rank)
        phase, _ = Counter(
            entry[1] for entry in self._stragglers if entry is not None and entry[0] == rank
        ).most_common(1)[0]
        host = next(record.placement.host for record in self._records if record.placement.rank == rank)
        hint = _HINTS.get(phase, "")
        return (
            f"rank {rank} on {host} is slower than the others: in {samples} of the last {len(self._stragglers)} "
            f"samples all of them waited for it, mostly in {phase}{f'; {hint}' if hint else ''}"
        )


def _hang_after(timeout_s: float) -> float:
    return timeout_s - min(_MARGIN * timeout_s, _MOST_MARGIN_S)
