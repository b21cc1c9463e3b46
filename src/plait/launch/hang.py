"""Which rank the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plait.launch.records import Record


def missing(records: Sequence[Record]) -> tuple[list[Record], str]:
    """The ranks that did not come to where the others wait, and what is odd about them; none where nobody knows."""
    if stopped := [record for record in records if record.evidence.state == "T"]:
        return stopped, "is stopped by a signal, while the others wait for it"
    known = [record for record in records if record.evidence.beat is not None]
    silent = [record for record in records if record not in known and not record.failed and record.exit_code != 0]
    if known and silent:
        return silent, "did not join the others"
    away = [record for record in known if not _waits(record)]
    if away and len(away) < len(known):
        left = [record for record in away if record.exit_code == 0]
        if left:
            return left, "has left, and its exit code is 0, while the others wait for it"
        return away, f"did not come to {_where(known)}"
    # All of them wait, so they wait for different things: whoever is not where most are has taken another turn.
    groups = Counter(_what(record) for record in known)
    common = groups.most_common()
    if len(common) < 2 or common[0][1] == common[1][1]:
        return [], ""
    odd = [record for record in known if _what(record) != common[0][0]]
    rest = [record for record in known if record not in odd]
    return odd, f"waits for another collective than the others, who wait in {_where(rest)}"


def _waits(record: Record) -> bool:
    beat = record.evidence.beat
    return beat is not None and beat.pending and record.exit_code != 0


def _what(record: Record) -> tuple[str, str, int]:
    beat = record.evidence.beat
    assert beat is not None
    return beat.collective, beat.phase, beat.step


def _where(known: Sequence[Record]) -> str:
    """The collective that most wait in."""
    found = Counter(r.evidence.beat.collective for r in known if r.evidence.beat is not None and _waits(r))
    return found.most_common(1)[0][0] if found else "the collective"
