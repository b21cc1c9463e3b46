"""Why a rank ended, from its exit code, its last lines and what the host knows; and what to change."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from plait.launch.records import Record, signal_name

_GIB = 1 << 30
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
    "let ranks hold less host memory: fewer ranks a host, fewer data workers, no offload to the host; or raise the "
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
class Verdict:
    """What ended a rank."""

    what: str
    remedy: str = ""
    victim: bool = False
    """It only noticed that another one was gone or late."""
    outside: bool = False
    """Somebody else ended it, for reasons that are not the run's."""
    full: bool = False
    """There was not enough memory where it computes: smaller micro-batches may fit."""


def judge(record: Record) -> Verdict:
    """The verdict on a rank that ended badly of itself."""
    if record.lost:
        return Verdict(
            "is lost: its host no longer answers",
            "look at the host and its network; it may have been restarted, or reclaimed",
        )
    code = record.exit_code or 0
    if code < 0:
        return _of_signal(record, -code)
    exception = exception_in(record.tail) if code == 1 else ""
    if exception:
        return _of_exception(record, exception)
    if record.message:
        return Verdict(f"stopped: {record.message}")
    return Verdict(
        f"left with exit code {code} and no exception",
        "something called sys.exit or os._exit, or a library ended the process; its last lines may say which",
    )


def _of_signal(record: Record, number: int) -> Verdict:
    name, found = signal_name(number), record.evidence
    if number == signal.SIGKILL and found.oom_kills and (found.oom_of_group or found.grew_into_the_limit):
        return _short_of_host_memory(record, f"was killed by the kernel: {_host_full(record)}")
    if number == signal.SIGKILL and found.oom_kills:
        what = "was ended by SIGKILL, perhaps for want of memory"
        return Verdict(f"{what}: {_HOST_KILLED}", f"{_ASK_THE_KERNEL}; else {_SENT}", outside=True)
    if number == signal.SIGKILL:
        return Verdict(
            "was ended by SIGKILL, and not for want of memory: the kernel counts no such kill",
            _SENT,
            outside=True,
        )
    if number == signal.SIGBUS:
        return Verdict("crashed with SIGBUS, bad access to mapped memory", "is /dev/shm full? see `plait doctor`")
    if number == signal.SIGABRT and any(_MISMATCH.search(line) for line in record.tail):
        return Verdict(
            "got other data than it waited for: another rank was in another collective, or had another shape",
            "every rank must call the same collectives, in the same order, with the same shapes",
        )
    if number in _CRASHES:
        return Verdict(
            f"crashed with {name}, in native code",
            "the stack below shows which call; an extension or a library there does not fit, or has an error",
        )
    return Verdict(f"was ended by {name}", "somebody sent the signal; Plait did not", outside=True)


def _of_exception(record: Record, exception: str) -> Verdict:
    text = "\n".join(record.tail)
    shown = exception if len(exception) < 300 else f"{exception[:300]} …"
    if _GPU_FULL.search(exception) and not _HOST_FULL.search(exception):
        return _short(f"ran out of GPU memory: {shown}", _LESS_GPU_MEMORY, record.evidence.gpu_steps, smaller=True)
    if _HOST_FULL.search(exception):
        return _short_of_host_memory(record, f"was refused host memory: {shown}")
    if _LOST_WORKER.search(exception):
        return _of_worker(record, text)
    if _CUT_OFF.search(exception):
        return Verdict(f"lost the connection to another rank: {shown}", victim=True)
    if _TIMED_OUT.search(exception) and "distributed" in text:
        return Verdict(f"waited too long for another rank: {shown}", victim=True)
    return Verdict(f"raised {shown}", "its last lines show where")


def _of_worker(record: Record, text: str) -> Verdict:
    """A process that read data for the rank has ended; what torch raises then names its signal, if anything."""
    found, kills = _WORKERS_SIGNAL.findall(text), record.evidence.recent_oom_kills
    how = f"ended by a signal: {found[-1]}" if found else "which ended by itself"
    if found and found[-1] == "Bus error":
        remedy = "is /dev/shm full? see `plait doctor`; fewer data.workers need less"
        return Verdict(f"lost a data worker, {how}", remedy)
    killed = not found or found[-1] == "Killed"
    if killed and kills and record.evidence.oom_of_group:
        return Verdict(f"lost a data worker, killed by the kernel: {_host_full(record)}", _LESS_HOST_MEMORY)
    if found and found[-1] == "Killed" and kills:
        what = f"lost a data worker, {how}, perhaps for want of memory: {_HOST_KILLED}"
        return Verdict(what, f"{_ASK_THE_KERNEL}; else {_SENT}", outside=True)
    if found and found[-1] == "Killed":
        what = f"lost a data worker, {how}; not for want of memory: the kernel counts no such kill"
        return Verdict(what, _SENT, outside=True)
    return Verdict(
        f"lost a data worker, {how}",
        "what reads the samples crashes, or leaves: with data.workers 0 the rank does, and its stack shows where",
    )


def _short_of_host_memory(record: Record, what: str) -> Verdict:
    return _short(what, _LESS_HOST_MEMORY, record.evidence.host_steps, smaller=_computes_on_host(record))


def _short(what: str, remedy: str, steps: tuple[int, int, int] | None, *, smaller: bool) -> Verdict:
    """There was too little memory; `smaller` micro-batches may fit, unless it grew from step to step."""
    if steps is None:
        return Verdict(what, remedy, full=smaller)
    return Verdict(f"{what}; {growth_text(steps)}", LEAK_REMEDY)


def growth_text(steps: tuple[int, int, int]) -> str:
    """Of memory that grows from step to step: from which to which, and by how much."""
    first, last, grown = steps
    return f"its memory grew from step to step, by {grown / _GIB:.2f} GiB from step {first} to {last}"


def _host_full(record: Record) -> str:
    limit = record.evidence.limit
    of = "" if limit is None else f" of the {limit / _GIB:.1f} GiB that its container may have"
    return f"the host ran out of memory{of}"


def _computes_on_host(record: Record) -> bool:
    beat = record.evidence.beat
    return beat is not None and beat.gpu_peak == 0


def exception_in(lines: Sequence[str]) -> str:
    """The exception that Python printed last, its message on one line; empty where there is none."""
    found = [_GROUPS_PREFIX.sub("", _TORCHS_PREFIX.sub("", line)) for line in lines]
    starts = [index for index, line in enumerate(found) if _EXCEPTION.match(line) or _ends_a_stack(found, index)]
    return " ".join(line.strip() for line in found[starts[-1] :][:_MESSAGE_LINES]) if starts else ""


def _ends_a_stack(lines: Sequence[str], index: int) -> bool:
    """Whether a line is what follows the frames of a stack: an exception, whatever its name."""
    if not _ANY_NAME.match(lines[index]):
        return False
    frames = takewhile(lambda line: line.startswith("  "), reversed(lines[:index]))
    return any(_FRAME.match(line) for line in frames)
