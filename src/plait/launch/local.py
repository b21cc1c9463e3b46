"""The ranks of one host: started together, ended together."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, cast

from plait.config import whole_number
from plait.errors import WorldError
from plait.launch.diagnosis import needs_stacks, report_end
from plait.launch.failure import RankMessages
from plait.launch.heartbeat_monitor import HeartbeatMonitor
from plait.launch.job import Job, Node, RankPlacement, available_cores, cpu_count, find_program, missing_program
from plait.launch.network import free_port
from plait.launch.observer import Observer
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

# The output of ranks, copied to the console as it arrives; the last lines of each rank are kept.


_CHUNK = 1 << 16


class Relay:
    """Copies the output of ranks to this console, and keeps its last lines in their records.

    All work is done in `pump`, not in a thread, because ranks may be started again by a fork.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._rests: dict[int, bytes] = {}

    def open(self, outputs: Iterable[tuple[RankRecord, str, IO[bytes]]]) -> None:
        """Add pipes: the rank's record, `out` or `err`, and the pipe."""
        for record, name, pipe in outputs:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (record, name))

    def pump(self, seconds: float) -> bool:
        """Wait up to `seconds` for output, and copy it to the console; return whether there was any."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            record, name = key.data
            data = os.read(key.fd, _CHUNK)
            if not data:
                self._end(key)
                continue
            _put(name, data)
            *lines, self._rests[key.fd] = (self._rests.get(key.fd, b"") + data).split(b"\n")
            record.tail.extend(line.decode(errors="replace") for line in lines)
        return bool(ready)

    def close(self) -> None:
        """Copy the output that is left and close the pipes, without waiting for data workers that hold one open."""
        while self.pump(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._end(key)
        self._selector.close()

    def _end(self, key: selectors.SelectorKey) -> None:
        pipe = cast(IO[bytes], self._selector.unregister(key.fileobj).fileobj)
        pipe.close()
        if rest := self._rests.pop(key.fd, b""):
            key.data[0].tail.append(rest.decode(errors="replace"))


def _put(name: str, data: bytes) -> None:
    target = sys.stdout if name == "out" else sys.stderr
    with suppress(OSError, ValueError):  # a closed console must not end the ranks
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()


_POLL_S = 0.05


def gpu_count() -> int:
    """Return how many GPUs a process started here would see, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def launched_size() -> int | None:
    """Return the world size of the launch that this process is a rank of; None where no launcher started it."""
    return whole_number(os.environ.get("WORLD_SIZE", ""))


def run_ranks(command: Sequence[str], count: int) -> int:
    """Run `command` once per rank on this host and wait; return 0, or the exit code of the rank that failed.

    If a signal stopped the run, the code is 128 plus its number, even if all ranks exited with 0.

    The ranks find each other through the same variables that torchrun sets. When one fails, the others, which would
    wait for it, are ended. Ctrl-C, SIGTERM and a closed terminal reach every rank, which then saves and exits; a second
    Ctrl-C ends all at once.
    """
    job = Job(tuple(command), (Node("localhost", tuple(range(count))),), port=free_port())
    return run_job(job, 0, stop_grace=None).code


def run_job(
    job: Job, node: int, *, stop_grace: float | None, grace: float = GRACE_S, join: Callable[[], bool] = lambda: False
) -> LaunchOutcome:
    """Run this host's ranks of a job to their end, and return how they ended; if they fail, report why.

    `stop_grace` is the number of seconds that ranks may take to exit after the first Ctrl-C; None: no limit. `grace` is
    the same after one has failed. When `join` returns true, other hosts can join the job: all ranks are asked to
    save and exit.
    """
    with RankMessages() as messages:
        relay = Relay()
        group = LocalRanks(job, node, messages=messages, capture=not sys.stdout.isatty(), pause=relay.pump)
        with Signals(group.send) as signals:
            group.start()
            relay.open(group.outputs())
            hung, reform = _wait(group, signals, stop_grace, grace, join)
            relay.close()
            if signals.interrupts > 1:
                return LaunchOutcome(128 + signal.SIGINT, group.records, interrupted=True)
            if not signals.waited and not reform:
                # Report last, so that the report is printed below the output of the ranks.
                several = len(job.nodes) > 1
                report_end(group.records, hung=hung, log_dir=job.log_dir, several_hosts=several)
            code = signals.code(exit_code(group.records, hung=hung))
            return LaunchOutcome(code, group.records, hung=hung, interrupted=signals.waited > 0.0, reform=reform)


def _wait(
    group: LocalRanks, signals: Signals, stop_grace: float | None, grace: float, join: Callable[[], bool]
) -> tuple[bool, bool]:
    """Wait until all ranks have ended; return (they hung and were killed, they were asked to exit for `join`)."""
    watch, hung, asked = HeartbeatMonitor(group.records), False, 0.0
    while group.poll():
        if causes(group.records):
            if needs_stacks(group.records):
                group.observer.request_stacks()
            group.end(wait=FAILURE_WAIT_S, grace=grace)
        elif stop_grace is not None and signals.waited > stop_grace:
            group.end(wait=0.0, grace=GRACE_S)
        elif asked and time.monotonic() > asked + SAVE_AND_EXIT_S:
            group.end(wait=0.0, grace=grace)
        elif not asked and not signals.waited and join():
            asked = time.monotonic()
            group.send(signal.SIGTERM)
        elif watch.due():
            group.observer.look_at_all()
            if (straggler := watch.straggler()) is not None:
                print(f"plait: {straggler}", file=sys.stderr, flush=True)
            if watch.hangs():
                hung = True
                group.observer.request_stacks()
                group.end(wait=STACK_WAIT_S, grace=HANG_GRACE_S)
        else:
            group.pause(_POLL_S)
    return hung, bool(asked)


class LocalRanks:
    """The processes of the ranks of one host, and their records.

    A rank with a log file writes its output there. Otherwise its stderr is a pipe of `outputs`, so that its last lines
    can be shown again; with `capture`, so is its stdout. Without `capture`, its stdout is this process's, so that a
    progress bar finds the terminal. `pause(seconds)` is called to wait; a caller that reads the pipes must do it in
    `pause` too, or a rank that fills its pipe never ends. `placements` are the ranks to start; None: all of the host's.
    """

    def __init__(
        self,
        job: Job,
        node: int,
        *,
        messages: RankMessages,
        placements: Sequence[RankPlacement] | None = None,
        variables: dict[str, str] | None = None,
        capture: bool = True,
        stdin: bool = True,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.job = job
        self.records = new_records(job, job.started_on(node) if placements is None else placements)
        self.observer = Observer(self.records, messages.folder)
        self.pause = pause
        self._variables = {**messages.environment, **(variables or {})}
        self._capture = capture
        self._stdin = stdin
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = False

    def start(self) -> None:
        """Start all ranks, or none."""
        cores = available_cores()
        # Before the first rank starts, so that a wrong slot or core leaves no rank running.
        bound = [self.job.cores_for(record.placement, cores) for record in self.records]
        environments = [
            self._environment(record.placement, mine) for record, mine in zip(self.records, bound, strict=True)
        ]
        for record, environment, mine in zip(self.records, environments, bound, strict=True):
            try:
                process = self._start(record, environment, mine)
            except OSError as error:
                self.end(wait=0.0, grace=GRACE_S)
                message = f"rank {record.placement.rank} of {self.job.size} could not be started: {error}"
                raise WorldError(message) from error
            self._processes.append(process)
            record.pid, record.started = process.pid, time.time()
        self.observer.begin()

    def _environment(self, placement: RankPlacement, bound: tuple[int, ...] | None) -> dict[str, str]:
        threads = len(bound) if bound else max(cpu_count() // placement.local_size, 1)
        present = {"OMP_NUM_THREADS": str(threads), **os.environ}
        if bound:
            present["OMP_NUM_THREADS"] = str(threads)
        return {**present, **self.job.variables(placement, present), **self._variables}

    def _start(
        self, record: RankRecord, environment: dict[str, str], cores: tuple[int, ...] | None
    ) -> subprocess.Popen[bytes]:
        """Start a rank in a process group of its own.

        A terminal sends Ctrl-C to its foreground process group. The ranks are not in it, so they get each signal only
        once, from `Signals`, whether it came from the terminal or from another process.
        """

        def prepare() -> None:
            end_with_parent()
            if cores:
                os.sched_setaffinity(0, cores)

        program, *arguments = self.job.argv(record.placement)
        path = find_program(program, path=environment.get("PATH"), folder=self.job.folder)
        if path is None:
            raise FileNotFoundError(missing_program(program))
        log = self._log(record)
        try:
            return subprocess.Popen(
                [path, *arguments],
                env=environment,
                cwd=self.job.folder,
                stdin=None if self._stdin else subprocess.DEVNULL,
                stdout=log or (subprocess.PIPE if self._capture else None),
                stderr=subprocess.STDOUT if log else subprocess.PIPE,
                process_group=0,
                close_fds=False,  # our own are not inheritable; MPICH gives its ranks one that they need
                preexec_fn=prepare,
            )
        finally:
            if log is not None:
                log.close()

    def _log(self, record: RankRecord) -> IO[bytes] | None:
        if record.log is None:
            return None
        path = Path(self.job.folder or ".", record.log)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.log = str(path.absolute())
        return path.open("wb")

    def outputs(self) -> list[tuple[RankRecord, str, IO[bytes]]]:
        """Return the pipes of captured ranks: the record, `out` or `err`, and the pipe."""
        pairs = zip(self.records, self._processes, strict=True)
        pipes = [(record, name, pipe) for record, p in pairs for name, pipe in (("out", p.stdout), ("err", p.stderr))]
        return [(record, name, pipe) for record, name, pipe in pipes if pipe is not None]

    def poll(self) -> bool:
        """Update the records of the ranks; return whether any still runs."""
        for record, process in zip(self.records, self._processes, strict=False):
            if record.exit_code is not None:
                continue
            code = process.poll()
            if code is None:
                self.observer.follow(record)
                continue
            record_end(record, code, by_us=self._ending and code != 0)
            self.observer.look(record)
            if code:
                _kill_group(process.pid)  # data workers of the rank
        return any(record.exit_code is None for record in self.records[: len(self._processes)])

    def send(self, number: int) -> None:
        """Send a signal to every running rank."""
        self.poll()
        for record, process in zip(self.records, self._processes, strict=False):
            if record.exit_code is None:
                _send(process, number)

    def end(self, *, wait: float, grace: float) -> None:
        """End all ranks: wait `wait` seconds, send SIGTERM, wait up to `grace` seconds, kill their process groups."""
        self._wait_until(time.monotonic() + wait)
        self.poll()
        self._ending = True
        self.send(signal.SIGTERM)
        self._wait_until(time.monotonic() + grace)
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
            _kill_group(process.pid)
        self.poll()

    def _wait_until(self, deadline: float) -> None:
        while self.poll() and time.monotonic() < deadline:
            self.pause(_POLL_S)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent ends, so that `kill -9` leaves no orphans."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


class Signals:
    """A context in which SIGINT, SIGTERM and SIGHUP are passed on to the ranks instead of ending this process."""

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send
        self._first: float | None = None
        self._first_signal = 0
        self.interrupts = 0

    @property
    def waited(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return 0.0 if self._first is None else time.monotonic() - self._first

    def code(self, code: int) -> int:
        """Return the exit code of a run whose ranks ended with `code`; if a signal stopped it, that is not 0."""
        return code or (128 + self._first_signal if self._first_signal else 0)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._first = self._first or time.monotonic()
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            number = signal.SIGKILL  # does not damage checkpoints; in a collective, a rank handles no other signal
        elif number == signal.SIGHUP:
            number = signal.SIGTERM
        self._first_signal = self._first_signal or number
        self._send(number)

    def __enter__(self) -> Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Signals that are ignored, such as SIGHUP under `nohup`, stay ignored.
        wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._pass_on) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the rank, or SIGKILL to its process group: data workers must not outlive it."""
    if number == signal.SIGKILL:
        _kill_group(process.pid)
    else:
        process.send_signal(number)


def _kill_group(group: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # no process is left, or on macOS only a zombie
