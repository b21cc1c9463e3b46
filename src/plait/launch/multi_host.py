"""Runs a job on several hosts, with one connection to the `plait.launch.agent` of each."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

from plait.launch.diagnosis import EXPLAINED_EXIT_CODE, needs_stacks, report_end
from plait.launch.heartbeat_monitor import HeartbeatMonitor
from plait.launch.job import Job
from plait.launch.local import Signals, end_with_parent
from plait.launch.messages import apply_message
from plait.launch.records import (
    FAILURE_WAIT_S,
    GRACE_S,
    HANG_GRACE_S,
    SAVE_AND_EXIT_S,
    STACK_WAIT_S,
    LaunchOutcome,
    RankRecord,
    causes,
    exit_code,
    new_records,
    record_end,
)

# Output of many ranks on one console, in whole lines that begin with host and rank.


_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_LONGEST = 1 << 16
"""The longest line, in bytes; longer ones are shown in parts."""


class Console:
    """Shows the output of ranks on several hosts, and keeps the last lines of each in its record."""

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self._rests: dict[tuple[int, str], bytes] = {}
        self._records = {record.placement.rank: record for record in records}

    def write(self, record: RankRecord, stream: str, data: bytes) -> None:
        """Show the complete lines of a rank's output, and keep the rest; `\\r` (progress bars) ends a line too."""
        key = (record.placement.rank, stream)
        *lines, rest = _LINE_END.split(self._rests.pop(key, b"") + data)
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest + b"\n"], b""
        for line in lines:
            self._show(record, stream, line)
        if rest:
            self._rests[key] = rest

    def other(self, host: str, line: bytes) -> None:
        """Show output of the connection to a host, which is not a rank's."""
        _put("err", f"{host}: ".encode() + line)

    def flush(self) -> None:
        """Show the last lines that have no line end."""
        for (rank, stream), rest in self._rests.items():
            self._show(self._records[rank], stream, rest + b"\n")
        self._rests.clear()

    def _show(self, record: RankRecord, stream: str, line: bytes) -> None:
        record.tail.append(line.decode(errors="replace").rstrip("\r\n"))
        _put(stream, f"{record.placement.host}[{record.placement.rank}]: ".encode() + line)


def _put(stream: str, line: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.buffer.write(line)
    target.flush()


BEAT_S = 5.0
"""Seconds between two beats, by which the launcher tells the agents that it still runs."""
_TICK_S = 0.05
_CLEAR_S = 5.0
"""Seconds that a connection may stay open after the time in which its ranks must have ended."""


def run_multi_host(
    job: Job,
    commands: Sequence[Sequence[str]],
    *,
    stop_grace: float | None,
    grace: float | None = None,
    join: Callable[[], bool] = lambda: False,
) -> LaunchOutcome:
    """Run a job to its end, with one command per host, and return how it ended; if it fails, report why.

    The other arguments are those of `run_job`.
    """
    run = MultiHostRun(job, commands, grace=GRACE_S if grace is None else grace, join=join)
    suspended = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # suspended, it would send no beats
    try:
        with Signals(run.send) as signals:
            run.start()
            run.supervise(signals, stop_grace)
    finally:
        run.close()
        signal.signal(signal.SIGTSTP, suspended)
    if signals.interrupts > 1:
        return LaunchOutcome(128 + signal.SIGINT, run.records, interrupted=True)
    if not signals.waited and not run.reform:
        run.report_end()
    code, interrupted = signals.code(run.exit_code()), signals.waited > 0.0
    return LaunchOutcome(code, run.records, hung=run.hung, interrupted=interrupted, reform=run.reform)


class MultiHostRun:
    """A running job on several hosts. `records` has the record of every rank."""

    def __init__(
        self,
        job: Job,
        commands: Sequence[Sequence[str]],
        *,
        grace: float = GRACE_S,
        join: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._grace, self._join = job, grace, join
        self._nodes = [_Connection(index, job.nodes[index].host, command) for index, command in enumerate(commands)]
        placements = [placement for node in range(len(job.nodes)) for placement in job.started_on(node)]
        self.records = new_records(job, placements)
        self._by_rank = {record.placement.rank: record for record in self.records}
        self._messages: _HostMessages = queue.Queue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._console = Console(self.records)
        self._errors: list[str] = []
        self._watch = HeartbeatMonitor(self.records)
        self._asked_for_stacks = False
        self.hung = False
        self.reform = False
        """The ranks were asked to exit because others can join them."""

    def start(self) -> None:
        """Connect to all hosts at the same time."""
        for node in self._nodes:
            node.open()
        for node in self._nodes:  # after all have started: a process with threads should not fork
            node.talk(self._job, self._messages)
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Send beats from a thread of its own, so that they are sent also while output to the console blocks."""
        while any(node.is_open for node in self._nodes):
            time.sleep(BEAT_S)
            for node in self._nodes:
                node.order(beat=True)

    def send(self, number: int) -> None:
        """Have `supervise` send a signal to every rank on every host. Safe inside a signal handler."""
        self._signals.put(number)

    def supervise(self, signals: Signals, stop_grace: float | None) -> None:
        """Run until every connection is closed; end all ranks if too many hosts failed, or `stop_grace` has passed."""
        deadlines = _Deadlines()
        while any(node.is_open for node in self._nodes):
            self._receive()
            self._pass_on()
            if len(self._failed_nodes()) > self._job.spare:
                self._end_soon(deadlines, FAILURE_WAIT_S)
            elif self._is_hung():
                self.hung = True
                self._end_soon(deadlines, STACK_WAIT_S)
            elif not self.reform and not signals.waited and self._join():
                self.reform = True
                self.send(signal.SIGTERM)
                deadlines.start(SAVE_AND_EXIT_S)
            elif signals.interrupts > 1 or (stop_grace is not None and signals.waited > stop_grace):
                deadlines.start(0.0)
            self._enforce(deadlines)

    def _is_hung(self) -> bool:
        """Check the heartbeats, at most once a second; return whether the run hangs."""
        if self.hung or not self._watch.due():
            return False
        if (straggler := self._watch.straggler()) is not None:
            print(f"plait: {straggler}", file=sys.stderr, flush=True)
        return self._watch.hangs()

    def _end_soon(self, deadlines: _Deadlines, seconds: float) -> None:
        if not self._asked_for_stacks and (self.hung or needs_stacks(self.records)):
            self._asked_for_stacks = True
            for node in self._nodes:
                node.order(stacks=True)
        deadlines.start(seconds)

    def _failed_nodes(self) -> set[int]:
        return {record.placement.node for record in causes(self.records)}

    def _enforce(self, deadlines: _Deadlines) -> None:
        if deadlines.passed(0.0):
            if not deadlines.order_sent:
                for node in self._nodes:
                    node.order(end=HANG_GRACE_S if self.hung else self._grace)
                deadlines.order_sent = True
            if deadlines.passed(self._grace + _CLEAR_S):
                self.close()

    def _pass_on(self) -> None:
        while not self._signals.empty():
            number = self._signals.get()
            for node in self._nodes:
                node.order(signal=number)

    def _receive(self) -> None:
        """Handle all messages that have arrived; if there are none, wait a little for one."""
        with suppress(queue.Empty):
            self._handle(*self._messages.get(timeout=_TICK_S))
            while True:
                self._handle(*self._messages.get_nowait())

    def _handle(self, node: _Connection, message: dict[str, Any]) -> None:
        if "closed" in message:
            self._closed(node, message["closed"])
        elif "error" in message:
            node.error = f"{node.host}: {message['error']}"
        elif "said" in message:
            self._console.other(node.host, message["said"])
        else:
            self._handle_rank_message(self._by_rank[message["rank"]], message)

    def _handle_rank_message(self, record: RankRecord, message: dict[str, Any]) -> None:
        for stream in ("out", "err"):
            if stream in message:
                self._console.write(record, stream, message[stream].encode("latin-1"))
                return
        apply_message(record, message)

    def _closed(self, node: _Connection, code: int) -> None:
        """Handle a closed connection. Mark its ranks whose end was not reported as lost, unless they never started."""
        node.is_open = False
        for record in self.records:
            if record.placement.node != node.index or not record.running:
                continue
            if node.error:
                record.message = node.error
                record_end(record, EXPLAINED_EXIT_CODE, by_us=False)
            else:
                record.lost, record.ended = True, time.time()
        if (
            not node.error
            and code not in (0, 255)
            and not any(r.pid for r in self.records if r.placement.node == node.index)
        ):
            self._errors.append(f"{node.host}: nothing could be started there (exit code {code})")

    def close(self) -> None:
        """Close all connections: the agents then end their ranks."""
        for node in self._nodes:
            node.close_stdin()
        deadline = time.monotonic() + _CLEAR_S
        for node in self._nodes:
            node.wait_until(deadline)
        self._console.flush()

    def report_end(self) -> None:
        """Report, below all output, the errors of hosts and why ranks failed."""
        for text in self._errors:
            print(f"plait: {text}", file=sys.stderr, flush=True)
        report_end(self.records, hung=self.hung, log_dir=self._job.log_dir, several_hosts=True)

    def exit_code(self) -> int:
        """Return the exit code of the worst rank; 0 if no more hosts failed than `job.spare`."""
        if 0 < len(self._failed_nodes()) <= self._job.spare and any(record.exit_code == 0 for record in self.records):
            return 0
        return exit_code(self.records, hung=self.hung) or (2 if self._errors else 0)


class _Deadlines:
    """The time when ranks are ended: the earliest of all deadlines that were set."""

    def __init__(self) -> None:
        self._at: float | None = None
        self.order_sent = False

    def start(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._at = at if self._at is None else min(self._at, at)

    def passed(self, more: float) -> bool:
        return self._at is not None and time.monotonic() > self._at + more


class _Connection:
    """The connection to one host."""

    def __init__(self, index: int, host: str, command: Sequence[str]) -> None:
        self.index, self.host = index, host
        self.is_open = False
        self.error = ""
        """Why it could not start its ranks."""
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start the command."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # so that the terminal's Ctrl-C does not reach it; it gets an order instead
            preexec_fn=end_with_parent,
        )
        self.is_open = True

    def talk(self, job: Job, messages: _HostMessages) -> None:
        """Send the job, and put the agent's messages into `messages`."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        stderr_reader = threading.Thread(target=self._listen, args=(self._process.stderr, messages), daemon=True)
        stderr_reader.start()
        threading.Thread(
            target=self._talk, args=(job, self._process.stdout, messages, stderr_reader), daemon=True
        ).start()

    def _talk(self, job: Job, pipe: IO[bytes], messages: _HostMessages, stderr_reader: threading.Thread) -> None:
        assert self._process is not None
        self._write(job.to_json().encode() + b"\n")
        for line in pipe:
            if line.startswith(b'{"'):
                messages.put((self, json.loads(line)))
            else:
                messages.put((self, {"said": line}))  # not from the agent, such as a shell's greeting
        code = self._process.wait()
        stderr_reader.join(1.0)  # so that ssh's own error message is handled first
        messages.put((self, {"closed": code}))

    def _listen(self, pipe: IO[bytes], messages: _HostMessages) -> None:
        for line in pipe:
            messages.put((self, {"said": line}))

    def order(self, **order: Any) -> None:
        """Send an order to the agent."""
        self._write(json.dumps(order).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                return  # the connection is closed; `_talk` reports that

    def close_stdin(self) -> None:
        """Close the agent's stdin. It then ends its ranks."""
        if self._process is not None and self._process.stdin is not None:
            with self._lock, suppress(OSError):
                self._process.stdin.close()

    def wait_until(self, deadline: float) -> None:
        """Wait for the end of the connection's process; kill it at the deadline."""
        if self._process is None:
            return
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_HostMessages = queue.Queue[tuple[_Connection, dict[str, Any]]]
