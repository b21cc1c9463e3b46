"""One page for an abnormal end: who failed first, at what, why; what became of the others; what to change."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from plait.launch.failure import merged
from plait.launch.hang import missing
from plait.launch.records import Record, causes
from plait.launch.verdict import Verdict, judge

TOLD = 2
"""The exit code of a rank that knew what was wrong with the run."""
_GIB = 1 << 30
_LAST_LINES = 15
_STACK_LINES = 25
_STACKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """Who is to blame, and for what. No record: nobody can tell."""

    records: tuple[Record, ...]
    verdict: Verdict


def conclude(records: Sequence[Record], *, hung: bool, log_dir: str | None, several_hosts: bool) -> None:
    """Say how a run ended that ended badly: on the console, and as `report.txt` where the run keeps its things.

    Where every rank that failed said itself what is wrong with the run, that is all there is to say.
    """
    failed = causes(records)
    if not failed and not hung:
        return
    messages = {record.place.rank: record.message for record in failed if record.message}
    if not hung and messages and all(record.message or record.exit_code == TOLD for record in failed):
        _print(merged(messages))
        return
    page = report(records, hung=hung, several_hosts=several_hosts)
    folders = [record.evidence.beat.folder for record in records if record.evidence.beat is not None]
    folder = next(filter(None, folders), log_dir)
    print(f"\n{page}", file=sys.stderr, flush=True)
    if folder is not None:
        with suppress(OSError):  # on another host, or full: the console has it
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "report.txt").write_text(page, encoding="utf-8")
            _print([f"this page is in {Path(folder, 'report.txt')}"])


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"plait: {line}", file=sys.stderr, flush=True)


def find(records: Sequence[Record], *, hung: bool) -> Finding:
    """The root cause: of the ranks that failed the first that is nobody's victim, or the one the others waited for."""
    verdicts = [(record, judge(record)) for record in causes(records)]
    culprits = [(record, verdict) for record, verdict in verdicts if not verdict.victim]
    if culprits and not hung:
        return Finding((culprits[0][0],), culprits[0][1])
    absent, why = missing(records)
    if absent:
        return Finding(tuple(absent), Verdict(why, _remedy_for_absence(absent[0])))
    if hung:
        what = "all ranks wait, for each other, and no rank stands out"
        return Finding((), Verdict(what, "compare the stacks below: the ranks took different ways through the code"))
    left = [record for record in records if record.exit_code == 0]
    if left:
        what = "has left, and its exit code is 0, while the others still needed it"
        return Finding((min(left, key=lambda record: record.ended or 0.0),), Verdict(what, _SAME_STEPS))
    return Finding((verdicts[0][0],), verdicts[0][1])


def wants_stacks(records: Sequence[Record]) -> bool:
    """Whether those that failed are victims only, so that the stacks of the others may show whose.

    Where a rank is to blame nobody reads them; and a rank that loses its peers is not disturbed without need.
    """
    return all(judge(record).victim for record in causes(records))


_SAME_STEPS = "every rank must take equally many steps, and call collectives in the same order"


def _remedy_for_absence(record: Record) -> str:
    beat = record.evidence.beat
    if record.evidence.state == "T":
        return (
            "find what sent SIGSTOP: Ctrl-Z, a debugger, a batch system that suspends jobs; SIGCONT lets a rank go on"
        )
    if record.evidence.state == "D":
        return "it waits inside of the kernel: look whether the disks and network file systems of its host answer"
    if beat is None and record.exit_code != 0:
        return "it had not come to its part of the run: its imports, its data or its own code before that take too long"
    if record.exit_code == 0 or (beat is not None and beat.pending):
        return _SAME_STEPS
    return "its stack below shows what keeps it; if that may take so long, raise timeout_s"


def report(records: Sequence[Record], *, hung: bool, several_hosts: bool) -> str:
    """The page that explains how a run ended."""
    found = find(records, hung=hung)
    blamed = found.records
    lines = ["The run hangs, and was ended." if hung else "The run failed.", ""]
    subject = ", ".join(_name(record, several_hosts) for record in blamed[:_STACKS_SHOWN])
    lines.append(f"{subject} {found.verdict.what}" if subject else found.verdict.what)
    for record in blamed[:_STACKS_SHOWN]:
        lines += _details(record, several_hosts=several_hosts and len(blamed) > 1)
    if found.verdict.remedy:
        lines += ["", f"What to do: {found.verdict.remedy}."]
    lines += _others([record for record in records if record not in blamed])
    for record in blamed[:_STACKS_SHOWN]:
        if record.tail:
            said = [f"  {line}" for line in list(record.tail)[-_LAST_LINES:]]
            lines += ["", f"Last lines of rank {record.place.rank}:", *said]
    return "\n".join([*lines, *_stacks(records, blamed, hung)]) + "\n"


def _name(record: Record, several_hosts: bool) -> str:
    return f"rank {record.place.rank}" + (f" on {record.place.host}" if several_hosts else "")


def _details(record: Record, *, several_hosts: bool) -> list[str]:
    found, rows = record.evidence, []
    if several_hosts:
        rows.append(("rank", _name(record, several_hosts)))
    if found.beat is not None:
        rows.append(("doing", f"{_doing(record)}, for {max(found.at - found.beat.since, 0.0):.1f} s"))
        if found.beat.collective:
            state = f"waiting for {found.waiting_s:.1f} s" if found.beat.pending else "done"
            rows.append(("collective", f"{found.beat.collective}, no. {found.beat.count} ({state})"))
    if found.memory:
        seconds, growth = found.growth
        limit = "" if found.limit is None else f", limit {found.limit / _GIB:.2f} GiB"
        moved = f"; {growth / _GIB:+.2f} GiB in the last {seconds:.0f} s" if abs(growth) > _GIB // 10 else ""
        peak = found.memory_peak / _GIB
        rows.append(("host memory", f"{found.memory / _GIB:.2f} GiB, peak {peak:.2f} GiB{limit}{moved}"))
    if found.beat is not None and found.beat.gpu_peak:
        rows.append(("GPU memory", f"{found.beat.gpu / _GIB:.2f} GiB, peak {found.beat.gpu_peak / _GIB:.2f} GiB"))
    return [f"  {name:<12} {value}" for name, value in rows]


def _doing(record: Record) -> str:
    beat = record.evidence.beat
    return "unknown" if beat is None else f"{beat.phase}, after step {beat.step}"


def _others(records: Sequence[Record]) -> list[str]:
    """The rest, those together of whom the same is to be said."""
    same: dict[str, list[str]] = {}
    for record in records:
        beat = record.evidence.beat
        end = "was ended by the launcher" if record.exit_code else "ended well"
        what = textwrap.shorten(judge(record).what, 160, placeholder=" …") if record.failed else end
        wait = f", waiting in {beat.collective}" if beat is not None and beat.pending else ""
        text = f"{what} ({_doing(record)}{wait})" if beat is not None else what
        same.setdefault(text, []).append(str(record.place.rank))
    if not same:
        return []
    return ["", "The others:", *(f"  rank {', '.join(who)}: {text}" for text, who in same.items())]


def _stacks(records: Sequence[Record], blamed: Sequence[Record], hung: bool) -> list[str]:
    """Of all ranks where the run hung, else of those to blame; the same stack once."""
    same: dict[str, list[int]] = {}
    order = [*blamed, *(record for record in records if record not in blamed)] if hung else blamed
    for record in order:
        if text := "\n".join(_main_thread(record.evidence.stacks)[:_STACK_LINES]):
            same.setdefault(text, []).append(record.place.rank)
    lines: list[str] = []
    for text, ranks in list(same.items())[:_STACKS_SHOWN]:
        lines += ["", f"Stack of rank {', '.join(map(str, ranks))}, the innermost call first:", text]
    return lines


def _main_thread(stacks: str) -> list[str]:
    """Of the thread that got the signal: the main one where a rank was asked, or the one that crashed.

    Where that one has no Python of its own, a library's, the main one all the same: it is written last.
    """
    head = "Current thread" if "Current thread" in stacks else "\nThread "
    current = stacks.rpartition(head)[2].splitlines()[1:]
    return list(takewhile(lambda line: line.startswith("  "), current))
