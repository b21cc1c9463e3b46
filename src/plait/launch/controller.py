"""Where the launcher hears of ranks that mpirun, srun or pdsh have started for it, and gives them orders.

Those programs start processes and pass on what is printed; that a rank hangs, or why it died, they do not know. So
whatever they start calls back over a connection of its own.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.errors import WorldError
from plait.launch.diagnosis import report_end
from plait.launch.heartbeat_monitor import HeartbeatMonitor
from plait.launch.job import Job
from plait.launch.local import Signals, follow_the_launcher
from plait.launch.messages import apply_message
from plait.launch.network import is_this_host, resolve, source_address
from plait.launch.records import GRACE_S, HANG_GRACE_S, STACK_WAIT_S, exit_code, new_records, record_end

_MOST_BYTES = 1 << 24
"""A line longer than this is not from a rank of ours."""


class Controller:
    """Listens while it is open. `job` is the job with the way to here in it."""

    def __init__(self, job: Job) -> None:
        far = [node.host for node in job.nodes if not is_this_host(node.host)]
        address = source_address(resolve(far[0])) if far else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._password = secrets.token_hex(16)
        self._server = socket.create_server((address, 0), family=family, backlog=job.size)
        self._server.setblocking(False)
        self.job = replace(job, contact=f"{address}:{self._server.getsockname()[1]}:{self._password}")
        self.records = new_records(job, job.placements())
        self.hung = False
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._watch = HeartbeatMonitor(self.records)
        self._end_at: float | None = None

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in [*self._clients, self._server]:
            connection.close()
        self._selector.close()

    @property
    def connected(self) -> bool:
        """Whether any rank can be told anything."""
        return any(client.known for client in self._clients.values())

    def send(self, number: int) -> None:
        """Pass a signal on to every rank, soon: this is safe inside a signal handler."""
        self._signals.put(number)

    def poll(self, seconds: float) -> None:
        """Hear what comes within that time, and see to a run that hangs."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
            else:
                self._receive(key.fileobj)  # type: ignore[arg-type]
        while not self._signals.empty():
            self._broadcast(signal=self._signals.get())
        if not self.hung and self._watch.due():
            if (straggler := self._watch.straggler()) is not None:
                print(f"plait: {straggler}", file=sys.stderr, flush=True)
            if self._watch.hangs():
                self.hung, self._end_at = True, time.monotonic() + STACK_WAIT_S
                self._broadcast(stacks=True)
        if self._end_at is not None and time.monotonic() > self._end_at:
            self._end_at = None
            self._broadcast(end=HANG_GRACE_S if self.hung else GRACE_S)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._clients[connection] = _Client()
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        client = self._clients[connection]
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.rest += data
        *lines, client.rest = client.rest.split(b"\n")
        for text in lines:
            if not self._handle(client, text):
                data = b""
        if not data or len(client.rest) > _MOST_BYTES:
            self._disconnect(connection)

    def _handle(self, client: _Client, text: bytes) -> bool:
        """Whether the caller may go on."""
        if not client.known:
            client.known = self._is_password(text)
            return client.known
        message: dict[str, Any] = json.loads(text)
        record = self.records[message["rank"]]
        client.ranks.add(record.placement.rank)
        apply_message(record, message)
        return True

    def _is_password(self, text: bytes) -> bool:
        """Anybody on the network may call, and say anything."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return False
        password = message.get("password") if isinstance(message, dict) else None
        return isinstance(password, str) and secrets.compare_digest(
            password.encode(errors="replace"), self._password.encode()
        )

    def _disconnect(self, connection: socket.socket) -> None:
        """A caller is gone. Ranks that it did not tell the end of went with it."""
        self._selector.unregister(connection)
        connection.close()
        client = self._clients.pop(connection)
        others_left = any(record.exit_code or record.lost for record in self.records)
        for rank in client.ranks:
            record = self.records[rank]
            if record.running and others_left:
                record_end(
                    record, -signal.SIGKILL, by_us=True
                )  # as MPI and Slurm do once a rank ended with another code
            elif record.running:
                record.lost, record.ended = True, time.time()

    def _broadcast(self, **order: Any) -> None:
        text = json.dumps(order).encode() + b"\n"
        for connection, client in self._clients.items():
            if client.known:
                with suppress(OSError):  # gone: `_hear` sees it
                    connection.sendall(text)

    def report_end(self, code: int) -> int:
        """Say why a run ended badly whose command ended with `code`; returns the exit code of the worst rank."""
        deadline = time.monotonic() + 1.0
        while self._clients and time.monotonic() < deadline:
            self.poll(0.05)
        known = [record for record in self.records if record.exit_code is not None or record.lost]
        # A command may say that all is well when a rank has failed: a shell that only waits does.
        ill = bool(code) or self.hung or any(record.failed for record in known)
        if known and ill:
            several = len(self.job.nodes) > 1
            report_end(known, hung=self.hung, log_dir=self.job.log_dir, several_hosts=several)
        return (exit_code(known, hung=self.hung) or code) if ill else 0


class _Client:
    """Who is at the other end of a connection."""

    def __init__(self) -> None:
        self.known = False
        """Has given the password."""
        self.rest = b""
        self.ranks: set[int] = set()


# A command line of another program, complete enough to be shown, and to be run from what was shown.


_GRACE_S = 5.0
"""How long it may take to leave after SIGTERM, once the user has waited enough."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is run."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of what is there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → text: written before it starts."""
    keep_files: bool = False
    """They stay when it has ended."""
    stdin: str | None = None
    """What it is given to read."""

    def shown(self) -> str:
        """As a shell would take it."""
        files = [f"cat > {shlex.quote(path)} <<'END'\n{text.rstrip()}\nEND" for path, text in self.files.items()]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*variables, shlex.join(self.argv)])
        return "\n".join([*files, line if self.stdin is None else f"{line} <<'END'\n{self.stdin}\nEND"])

    @contextmanager
    def with_files(self) -> Iterator[None]:
        """Its files are there while it runs."""
        for path, text in self.files.items():
            Path(path).write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            for path in () if self.keep_files else self.files:
                Path(path).unlink(missing_ok=True)


def run_command(
    command: Command,
    *,
    stop_grace: float | None,
    afterwards: Sequence[Command] = (),
    controller: Controller | None = None,
) -> int:
    """Run it to its end; returns its exit code, or the worst rank's where the `desk` knows.

    A signal ends it, and `afterwards` ends what it may have left.
    """
    with command.with_files():
        code, signals = _run(command, stop_grace, controller)
    if controller is not None and not signals.waited:
        code = controller.report_end(code)
    code = signals.code(code)
    if code:
        for other in afterwards:
            subprocess.run(other.argv, env={**os.environ, **other.environment}, check=False)
    return code


def _run(command: Command, stop_grace: float | None, controller: Controller | None) -> tuple[int, Signals]:
    try:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.environment},
            process_group=0,
            preexec_fn=follow_the_launcher,
        )
    except OSError as error:
        raise WorldError(f"{command.argv[0]} could not be started: {error}; is it installed?") from error
    wait = time.sleep if controller is None else controller.poll
    with Signals(lambda number: _pass_on(process, number, controller)) as signals:
        while process.poll() is None:
            if stop_grace is not None and signals.waited > stop_grace:
                process.terminate()
            if signals.interrupts > 1 or (stop_grace is not None and signals.waited > stop_grace + _GRACE_S):
                process.kill()
            wait(0.05)
    code = process.returncode
    return 128 - code if code < 0 else code, signals


def _pass_on(process: subprocess.Popen[bytes], number: int, controller: Controller | None) -> None:
    """To the ranks themselves, where they can be reached, so that they have time to save.

    Else to what started them: mpirun, srun and pdsh all end their processes on SIGTERM, while two of them want SIGINT
    twice.
    """
    if controller is not None and controller.connected:
        controller.send(number)
    elif process.poll() is None:
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
