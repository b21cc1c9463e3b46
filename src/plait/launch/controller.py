"""The launcher's connection to ranks that mpirun, srun or pdsh have started.

Those programs start processes and pass on their output; they do not report that a rank hangs, or why it died. So each
process that they start connects to the launcher itself.
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
from plait.launch.local import Signals, end_with_parent
from plait.launch.messages import apply_message
from plait.launch.network import is_this_host, resolve, source_address
from plait.launch.records import GRACE_S, HANG_GRACE_S, STACK_WAIT_S, exit_code, new_records, record_end

_MOST_BYTES = 1 << 24
"""The longest line that is accepted: none of our ranks sends a longer one."""


class Controller:
    """Listens for connections while it is open. `job` is the job with the address to connect to."""

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
        """Whether any rank is connected."""
        return any(client.known for client in self._clients.values())

    def send(self, number: int) -> None:
        """Send a signal to every rank, at the next `poll`. Safe inside a signal handler."""
        self._signals.put(number)

    def poll(self, seconds: float) -> None:
        """Receive messages for that many seconds, and end the run if it hangs."""
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
        """Process a line from a client; return False if its connection must be closed."""
        if not client.known:
            client.known = self._is_password(text)
            return client.known
        message: dict[str, Any] = json.loads(text)
        record = self.records[message["rank"]]
        client.ranks.add(record.placement.rank)
        apply_message(record, message)
        return True

    def _is_password(self, text: bytes) -> bool:
        """Return whether a client's first line has the password. Anybody on the network can connect and send data."""
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return False
        password = message.get("password") if isinstance(message, dict) else None
        return isinstance(password, str) and secrets.compare_digest(
            password.encode(errors="replace"), self._password.encode()
        )

    def _disconnect(self, connection: socket.socket) -> None:
        """Close a connection. Mark those of its ranks whose end was not reported as lost."""
        self._selector.unregister(connection)
        connection.close()
        client = self._clients.pop(connection)
        others_left = any(record.exit_code or record.lost for record in self.records)
        for rank in client.ranks:
            record = self.records[rank]
            if record.running and others_left:
                record_end(record, -signal.SIGKILL, by_us=True)  # by MPI or Slurm, as a rank has failed
            elif record.running:
                record.lost, record.ended = True, time.time()

    def _broadcast(self, **order: Any) -> None:
        text = json.dumps(order).encode() + b"\n"
        for connection, client in self._clients.items():
            if client.known:
                with suppress(OSError):  # closed: `_receive` notices
                    connection.sendall(text)

    def report_end(self, code: int) -> int:
        """Report why a run failed, if it did; `code` is its command's. Return the exit code of the worst rank."""
        deadline = time.monotonic() + 1.0
        while self._clients and time.monotonic() < deadline:
            self.poll(0.05)
        if self.hung:
            # mpirun may end before a rank has told how. What it did until then shows who waited for whom.
            for record in self.records:
                if record.running and record.observation.beat is not None:
                    record_end(record, -signal.SIGKILL, by_us=True)
        known = [record for record in self.records if record.exit_code is not None or record.lost]
        # A command may exit with 0 although a rank has failed, such as a shell that waits for background processes.
        failed = bool(code) or self.hung or any(record.failed for record in known)
        if known and failed:
            several = len(self.job.nodes) > 1
            report_end(known, hung=self.hung, log_dir=self.job.log_dir, several_hosts=several)
        return (exit_code(known, hung=self.hung) or code) if failed else 0


class _Client:
    """The other end of a connection."""

    def __init__(self) -> None:
        self.known = False
        """It has sent the password."""
        self.rest = b""
        self.ranks: set[int] = set()


# A command of another program (mpirun, srun, pdsh, sbatch) with its variables, files and input, to run or to print.


_GRACE_S = 5.0
"""Seconds that the command may take to exit after SIGTERM, which it gets after `stop_grace`."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command of another program, with its environment and input."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of this process's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to write before it starts: path → text."""
    keep_files: bool = False
    """Whether these files are kept when it has ended."""
    stdin: str | None = None
    """The text of its standard input."""

    def shown(self) -> str:
        """Return shell commands that do the same."""
        files = [f"cat > {shlex.quote(path)} <<'END'\n{text.rstrip()}\nEND" for path, text in self.files.items()]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*variables, shlex.join(self.argv)])
        return "\n".join([*files, line if self.stdin is None else f"{line} <<'END'\n{self.stdin}\nEND"])

    @contextmanager
    def with_files(self) -> Iterator[None]:
        """Write its files, and remove them on exit."""
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
    """Run a command to its end; return its exit code, or the worst rank's where the `controller` knows it.

    If it fails, the commands in `afterwards` are run; they end processes that it may have left.
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
            preexec_fn=end_with_parent,
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
    """Send a signal directly to the ranks if they are connected, so that they have time to save.

    Otherwise send it to the program that started them, as SIGTERM if it is SIGINT: mpirun, srun and pdsh all end their
    processes on SIGTERM, but two of them only on a second SIGINT.
    """
    if controller is not None and controller.connected:
        controller.send(number)
    elif process.poll() is None:
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)
