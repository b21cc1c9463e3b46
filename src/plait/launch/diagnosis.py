"""The failure page: which rank failed first, in which phase, why; how the others ended; what to change."""

from __future__ import annotations

import re
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from plait.launch.failure import merge_messages
from plait.launch.records import RankRecord, causes, signal_name

# Why a rank ended, from its exit code, its last lines and the host's counters; and what to change.


_BYTES_PER_GIB = 1 << 30
_MESSAGE_LINES = 5
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Iteration)\b(?::|$)")
_ANY_NAME = re.compile(r"^[A-Za-z_][\w.]*(?:: |$)")
_FRAME = re.compile(r'^  File ".*", line \d+')
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_GROUPS_PREFIX = re.compile(r"^  \| ")
_GPU_FULL = re.compile(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_HOST_FULL = re.compile(r"^MemoryError|can't allocate memory|Cannot allocate memory|std::bad_alloc")
_CUT_OFF = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|remote process (?:exited|has terminated)|"
    r"ncclRemoteError|ncclSystemError|Socket (?:closed|Timeout)|failed to (?:recv|send)|recvValue failed|"
    r"Read error|Connection was likely closed",
    re.IGNORECASE,
)
_MISMATCH = re.compile("Received data size doesn't match expected size")
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*(?:exited unexpectedly|is killed by signal)")
_WORKERS_SIGNAL = re.compile(r"DataLoader worker \(pid.* is killed by signal: ([\w ]+)\.")
_TIMED_OUT = re.compile(r"timed? ?out|DistStoreError", re.IGNORECASE)

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
_LESS_HOST_MEMORY = (
    "let ranks hold less host memory: fewer ranks per host, fewer data workers, no offload to the host; or raise the "
    "limit of the container"
)
_SENT = "somebody or something on its host sent the signal: a batch system at its limit, an operator, a clean-up"
_HOST_KILLED = "the kernel killed a process of this host at that time, and nothing shows that it was this one"
_ASK_THE_KERNEL = "look for its process in the kernel's log (`dmesg -T | grep -i 'killed process'`)"
LEAK_REMEDY = (
    "something keeps what belongs to a step: a loss that is added up without .item() or .detach(), outputs in a list, "
    "a cache without a bound; smaller micro-batches only put off the end, so they are not tried"
)
_LESS_GPU_MEMORY = (
    "let the rank hold less: a smaller batch.micro with more accumulation, strategy.recompute, a higher strategy.zero"
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a rank ended: `what` happened to it, as text, the remedy, and kinds of causes that are treated apart."""

    what: str
    remedy: str = ""
    victim: bool = False
    """The rank failed only because another rank was missing or late."""
    outside: bool = False
    """Something outside of the run ended the rank."""
    full: bool = False
    """It ran out of the memory that it computes in (of its GPU, or of the host): smaller micro-batches may fit."""


def diagnose(record: RankRecord) -> Diagnosis:
    """Return why a rank failed."""
    if record.lost:
        return Diagnosis(
            "is lost: its host no longer answers",
            "look at the host and its network; it may have been restarted, or reclaimed",
        )
    code = record.exit_code or 0
    if code < 0:
        return _diagnose_signal(record, -code)
    exception = exception_in(record.tail) if code == 1 else ""
    if exception:
        return _diagnose_exception(record, exception)
    if record.message:
        return Diagnosis(f"stopped: {record.message}")
    return Diagnosis(
        f"left with exit code {code} and no exception",
        "something called sys.exit or os._exit, or a library ended the process; its last lines may say which",
    )


def _diagnose_signal(record: RankRecord, number: int) -> Diagnosis:
    name, observation = signal_name(number), record.observation
    if (
        number == signal.SIGKILL
        and observation.oom_kills
        and (observation.oom_of_group or observation.grew_into_the_limit)
    ):
        return _diagnose_host_memory(record, f"was killed by the kernel: {_host_memory_text(record)}")
    if number == signal.SIGKILL and observation.oom_kills:
        what = "was ended by SIGKILL, perhaps for want of memory"
        return Diagnosis(f"{what}: {_HOST_KILLED}", f"{_ASK_THE_KERNEL}; else {_SENT}", outside=True)
    if number == signal.SIGKILL:
        return Diagnosis(
            "was ended by SIGKILL, and not for want of memory: the kernel counts no such kill",
            _SENT,
            outside=True,
        )
    if number == signal.SIGBUS:
        return Diagnosis("crashed with SIGBUS, bad access to mapped memory", "is /dev/shm full? see `plait doctor`")
    if number == signal.SIGABRT and any(_MISMATCH.search(line) for line in record.tail):
        return Diagnosis(
            "got other data than it waited for: another rank was in another collective, or had another shape",
            "every rank must call the same collectives, in the same order, with the same shapes",
        )
    if number in _CRASHES:
        return Diagnosis(
            f"crashed with {name}, in native code",
            "the stack below shows which call; an extension or a library there does not fit, or has an error",
        )
    return Diagnosis(f"was ended by {name}", "somebody sent the signal; Plait did not", outside=True)


def _diagnose_exception(record: RankRecord, exception: str) -> Diagnosis:
    text = "\n".join(record.tail)
    shown = exception if len(exception) < 300 else f"{exception[:300]} …"
    if _GPU_FULL.search(exception) and not _HOST_FULL.search(exception):
        return _diagnose_memory(
            f"ran out of GPU memory: {shown}", _LESS_GPU_MEMORY, record.observation.gpu_steps, smaller=True
        )
    if _HOST_FULL.search(exception):
        return _diagnose_host_memory(record, f"was refused host memory: {shown}")
    if _LOST_WORKER.search(exception):
        return _diagnose_data_worker(record, text)
    if _CUT_OFF.search(exception):
        return Diagnosis(f"lost the connection to another rank: {shown}", victim=True)
    if _TIMED_OUT.search(exception) and "distributed" in text:
        return Diagnosis(f"waited too long for another rank: {shown}", victim=True)
    return Diagnosis(f"raised {shown}", "its last lines show where")


def _diagnose_data_worker(record: RankRecord, text: str) -> Diagnosis:
    """Diagnose a data worker that has ended; torch's error names its signal, if any."""
    signals, kills = _WORKERS_SIGNAL.findall(text), record.observation.recent_oom_kills
    how = f"ended by a signal: {signals[-1]}" if signals else "which ended by itself"
    if signals and signals[-1] == "Bus error":
        remedy = "is /dev/shm full? see `plait doctor`; fewer data.workers need less"
        return Diagnosis(f"lost a data worker, {how}", remedy)
    killed = not signals or signals[-1] == "Killed"
    if killed and kills and record.observation.oom_of_group:
        return Diagnosis(f"lost a data worker, killed by the kernel: {_host_memory_text(record)}", _LESS_HOST_MEMORY)
    if signals and signals[-1] == "Killed" and kills:
        what = f"lost a data worker, {how}, perhaps for want of memory: {_HOST_KILLED}"
        return Diagnosis(what, f"{_ASK_THE_KERNEL}; else {_SENT}", outside=True)
    if signals and signals[-1] == "Killed":
        what = f"lost a data worker, {how}; not for want of memory: the kernel counts no such kill"
        return Diagnosis(what, _SENT, outside=True)
    return Diagnosis(
        f"lost a data worker, {how}",
        "what reads the samples crashes, or leaves: with data.workers 0 the rank does, and its stack shows where",
    )


def _diagnose_host_memory(record: RankRecord, what: str) -> Diagnosis:
    return _diagnose_memory(what, _LESS_HOST_MEMORY, record.observation.host_steps, smaller=_computes_on_host(record))


def _diagnose_memory(what: str, remedy: str, steps: tuple[int, int, int] | None, *, smaller: bool) -> Diagnosis:
    """Diagnose too little memory. `smaller`: smaller micro-batches may fit, unless memory grew from step to step."""
    if steps is None:
        return Diagnosis(what, remedy, full=smaller)
    return Diagnosis(f"{what}; {growth_text(steps)}", LEAK_REMEDY)


def growth_text(steps: tuple[int, int, int]) -> str:
    """Return a sentence about memory that grows from step to step: over which steps, and by how much."""
    first, last, grown = steps
    return f"its memory grew from step to step, by {grown / _BYTES_PER_GIB:.2f} GiB from step {first} to {last}"


def _host_memory_text(record: RankRecord) -> str:
    limit = record.observation.limit
    of = "" if limit is None else f" of the {limit / _BYTES_PER_GIB:.1f} GiB that its container may have"
    return f"the host ran out of memory{of}"


def _computes_on_host(record: RankRecord) -> bool:
    beat = record.observation.beat
    return beat is not None and beat.gpu_peak == 0


def exception_in(lines: Sequence[str]) -> str:
    """Return the exception that Python printed last, its message on one line; empty if there is none."""
    plain = [_GROUPS_PREFIX.sub("", _TORCHS_PREFIX.sub("", line)) for line in lines]
    starts = [index for index, line in enumerate(plain) if _EXCEPTION.match(line) or _ends_a_stack(plain, index)]
    return " ".join(line.strip() for line in plain[starts[-1] :][:_MESSAGE_LINES]) if starts else ""


def _ends_a_stack(lines: Sequence[str], index: int) -> bool:
    """Return whether a line directly follows the frames of a stack: it is then an exception, whatever its name."""
    if not _ANY_NAME.match(lines[index]):
        return False
    frames = takewhile(lambda line: line.startswith("  "), reversed(lines[:index]))
    return any(_FRAME.match(line) for line in frames)


# Which ranks the others wait for.


def absent_ranks(records: Sequence[RankRecord]) -> tuple[list[RankRecord], str]:
    """Return the ranks that the others wait for, and what is wrong with them; no ranks if that is not known."""
    if stopped := [record for record in records if record.observation.state == "T"]:
        return stopped, "is stopped by a signal, while the others wait for it"
    known = [record for record in records if record.observation.beat is not None]
    silent = [record for record in records if record not in known and not record.failed and record.exit_code != 0]
    if known and silent:
        return silent, "did not join the others"
    away = [record for record in known if not _waits(record)]
    if away and len(away) < len(known):
        left = [record for record in away if record.exit_code == 0]
        if left:
            return left, "has left, and its exit code is 0, while the others wait for it"
        return away, f"did not come to {_common_collective(known)}"
    # All ranks wait, so they wait in different collectives. The ranks in the less common ones are taken for the cause.
    groups = Counter(_collective_and_step(record) for record in known)
    common = groups.most_common()
    if len(common) < 2 or common[0][1] == common[1][1]:
        return [], ""
    odd = [record for record in known if _collective_and_step(record) != common[0][0]]
    rest = [record for record in known if record not in odd]
    return odd, f"waits for another collective than the others, who wait in {_common_collective(rest)}"


def _waits(record: RankRecord) -> bool:
    beat = record.observation.beat
    return beat is not None and beat.pending and record.exit_code != 0


def _collective_and_step(record: RankRecord) -> tuple[str, str, int]:
    beat = record.observation.beat
    assert beat is not None
    return beat.collective, beat.phase, beat.step


def _common_collective(known: Sequence[RankRecord]) -> str:
    """Return the collective that most ranks wait in."""
    collectives = Counter(r.observation.beat.collective for r in known if r.observation.beat is not None and _waits(r))
    return collectives.most_common(1)[0][0] if collectives else "the collective"


EXPLAINED_EXIT_CODE = 2
"""The exit code of a rank that has ended with an error message for the user, such as a wrong setting."""
_GIB = 1 << 30
_LAST_LINES = 15
_STACK_LINES = 25
_STACKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RootCause:
    """The ranks that caused a failure, and why they failed. Without records the cause is not known."""

    records: tuple[RankRecord, ...]
    diagnosis: Diagnosis


def report_end(records: Sequence[RankRecord], *, hung: bool, log_dir: str | None, several_hosts: bool) -> None:
    """Report a failed run: on the console, and as `report.txt` in the run's folder.

    If every rank that failed has left an error message, only these messages are printed.
    """
    failed = causes(records)
    if not failed and not hung:
        return
    messages = {record.placement.rank: record.message for record in failed if record.message}
    if not hung and messages and all(record.message or record.exit_code == EXPLAINED_EXIT_CODE for record in failed):
        _print(merge_messages(messages))
        return
    page = failure_page(records, hung=hung, several_hosts=several_hosts)
    folders = [record.observation.beat.folder for record in records if record.observation.beat is not None]
    folder = next(filter(None, folders), log_dir)
    print(f"\n{page}", file=sys.stderr, flush=True)
    if folder is not None:
        with suppress(OSError):  # the folder is on another host, or the disk is full; the page is also on the console
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "report.txt").write_text(page, encoding="utf-8")
            _print([f"this page is in {Path(folder, 'report.txt')}"])


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"plait: {line}", file=sys.stderr, flush=True)


def find_root_cause(records: Sequence[RankRecord], *, hung: bool) -> RootCause:
    """Return the root cause: the first failed rank that is not a victim, or the ranks that the others waited for."""
    diagnoses = [(record, diagnose(record)) for record in causes(records)]
    not_victims = [(record, diagnosis) for record, diagnosis in diagnoses if not diagnosis.victim]
    if not_victims and not hung:
        return RootCause((not_victims[0][0],), not_victims[0][1])
    absent, why = absent_ranks(records)
    if absent:
        return RootCause(tuple(absent), Diagnosis(why, _remedy_for_absence(absent[0])))
    if hung:
        what = "all ranks wait for each other, and no rank stands out"
        return RootCause(
            (), Diagnosis(what, "compare the stacks below: the ranks took different ways through the code")
        )
    left = [record for record in records if record.exit_code == 0]
    if left:
        what = "has left, and its exit code is 0, while the others still needed it"
        return RootCause((min(left, key=lambda record: record.ended or 0.0),), Diagnosis(what, _SAME_STEPS))
    return RootCause((diagnoses[0][0],), diagnoses[0][1])


def needs_stacks(records: Sequence[RankRecord]) -> bool:
    """Whether only victims have failed, so that the stacks of the other ranks may show the cause.

    Otherwise the cause is known, and no stacks are requested.
    """
    return all(diagnose(record).victim for record in causes(records))


_SAME_STEPS = "every rank must take equally many steps, and call collectives in the same order"


def _remedy_for_absence(record: RankRecord) -> str:
    beat = record.observation.beat
    if record.observation.state == "T":
        return (
            "find what sent SIGSTOP: Ctrl-Z, a debugger, a batch system that suspends jobs; SIGCONT lets a rank go on"
        )
    if record.observation.state == "D":
        return "it waits inside of the kernel: look whether the disks and network file systems of its host answer"
    if beat is None and record.exit_code != 0:
        return "it had not come to its part of the run: its imports, its data or its own code before that take too long"
    if record.exit_code == 0 or (beat is not None and beat.pending):
        return _SAME_STEPS
    return "its stack below shows what keeps it; if that may take so long, raise timeout_s"


def failure_page(records: Sequence[RankRecord], *, hung: bool, several_hosts: bool) -> str:
    """Return the page that explains how a run failed."""
    cause = find_root_cause(records, hung=hung)
    root_ranks = cause.records
    lines = ["The run hangs, and was ended." if hung else "The run failed.", ""]
    subject = ", ".join(_name(record, several_hosts) for record in root_ranks[:_STACKS_SHOWN])
    lines.append(f"{subject} {cause.diagnosis.what}" if subject else cause.diagnosis.what)
    for record in root_ranks[:_STACKS_SHOWN]:
        lines += _details(record, several_hosts=several_hosts and len(root_ranks) > 1)
    if cause.diagnosis.remedy:
        lines += ["", f"What to do: {cause.diagnosis.remedy}."]
    lines += _other_ranks([record for record in records if record not in root_ranks])
    for record in root_ranks[:_STACKS_SHOWN]:
        if record.tail:
            said = [f"  {line}" for line in list(record.tail)[-_LAST_LINES:]]
            lines += ["", f"Last lines of rank {record.placement.rank}:", *said]
    return "\n".join([*lines, *_stacks(records, root_ranks, hung)]) + "\n"


def _name(record: RankRecord, several_hosts: bool) -> str:
    return f"rank {record.placement.rank}" + (f" on {record.placement.host}" if several_hosts else "")


def _details(record: RankRecord, *, several_hosts: bool) -> list[str]:
    observation, rows = record.observation, []
    if several_hosts:
        rows.append(("rank", _name(record, several_hosts)))
    if observation.beat is not None:
        rows.append(("doing", f"{_phase_text(record)}, for {max(observation.at - observation.beat.since, 0.0):.1f} s"))
        if observation.beat.collective:
            state = f"waiting for {observation.waiting_s:.1f} s" if observation.beat.pending else "done"
            rows.append(("collective", f"{observation.beat.collective}, no. {observation.beat.count} ({state})"))
    if observation.memory:
        seconds, growth = observation.growth
        limit = "" if observation.limit is None else f", limit {observation.limit / _GIB:.2f} GiB"
        moved = f"; {growth / _GIB:+.2f} GiB in the last {seconds:.0f} s" if abs(growth) > _GIB // 10 else ""
        peak = observation.memory_peak / _GIB
        rows.append(("host memory", f"{observation.memory / _GIB:.2f} GiB, peak {peak:.2f} GiB{limit}{moved}"))
    if observation.beat is not None and observation.beat.gpu_peak:
        rows.append(
            ("GPU memory", f"{observation.beat.gpu / _GIB:.2f} GiB, peak {observation.beat.gpu_peak / _GIB:.2f} GiB")
        )
    return [f"  {name:<12} {value}" for name, value in rows]


def _phase_text(record: RankRecord) -> str:
    beat = record.observation.beat
    return "unknown" if beat is None else f"{beat.phase}, after step {beat.step}"


def _other_ranks(records: Sequence[RankRecord]) -> list[str]:
    """Return lines about the other ranks; ranks that ended alike share a line."""
    same: dict[str, list[str]] = {}
    for record in records:
        beat = record.observation.beat
        end = "was ended by the launcher" if record.exit_code else "ended well"
        what = textwrap.shorten(diagnose(record).what, 160, placeholder=" …") if record.failed else end
        wait = f", waiting in {beat.collective}" if beat is not None and beat.pending else ""
        text = f"{what} ({_phase_text(record)}{wait})" if beat is not None else what
        same.setdefault(text, []).append(str(record.placement.rank))
    if not same:
        return []
    return ["", "The others:", *(f"  rank {', '.join(who)}: {text}" for text, who in same.items())]


def _stacks(records: Sequence[RankRecord], root_ranks: Sequence[RankRecord], hung: bool) -> list[str]:
    """Return the stacks of all ranks if the run hung, else of the root cause's; equal stacks are listed once."""
    same: dict[str, list[int]] = {}
    order = [*root_ranks, *(record for record in records if record not in root_ranks)] if hung else root_ranks
    for record in order:
        if text := "\n".join(_main_thread(record.observation.stacks)[:_STACK_LINES]):
            same.setdefault(text, []).append(record.placement.rank)
    lines: list[str] = []
    for text, ranks in list(same.items())[:_STACKS_SHOWN]:
        lines += ["", f"Stack of rank {', '.join(map(str, ranks))}, the innermost call first:", text]
    return lines


def _main_thread(stacks: str) -> list[str]:
    """Return the stack of the thread that got the signal: the main thread on request, or the one that crashed.

    If that thread belongs to a library and has no Python frames, return the main thread's, which is written last.
    """
    head = "Current thread" if "Current thread" in stacks else "\nThread "
    current = stacks.rpartition(head)[2].splitlines()[1:]
    return list(takewhile(lambda line: line.startswith("  "), current))
