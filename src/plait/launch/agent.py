"""The launcher's agent on one host: starts its ranks, reports their state, and ends them when the launcher has ended.

    python -m plait.launch.agent --node 1          job and orders on stdin, messages on stdout, a line of JSON each
    python -m plait.launch.agent --node 1 --job …  for launchers without stdin: ranks print to the console
    python -m plait.launch.agent --end ID          end the agent that was started with --job

In the first form the agent ends its ranks when the connection to the launcher is lost for any reason (Ctrl-C, `kill -9`
of the launcher, a pulled cable): stdin closes, or the launcher's beats stop. A *beat* is a line that the launcher sends
every few seconds to show that it still runs. *Orders* are to signal or end the ranks, or to request their stacks.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from plait.errors import PlaitError
from plait.launch.diagnosis import report_end
from plait.launch.failure import RankMessages
from plait.launch.job import Job, RankPlacement
from plait.launch.local import LocalRanks, Relay, Signals
from plait.launch.messages import Reporter, apply_order
from plait.launch.network import interface_variables, source_address
from plait.launch.records import exit_code

# The connection to the launcher's `Controller`, where mpirun, srun or pdsh started this process.


_CONNECT_S = 5.0


class Connection:
    """Sends messages and receives orders. If the launcher cannot be reached, does nothing, and raises no error."""

    def __init__(self, contact: str) -> None:
        """`contact` is `address:port:password` of the launcher's `Controller`; empty: do not connect."""
        self.cut = False
        """The connection was open, and has been closed."""
        self._rest = b""
        self._socket: socket.socket | None = None
        if contact:
            address, port, password = contact.rsplit(":", 2)
            try:
                self._socket = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
            except OSError:
                return  # a firewall: the run continues, and each host reports its own failures
            self.send(password=password)

    @property
    def connected(self) -> bool:
        """Whether the launcher is connected."""
        return self._socket is not None and not self.cut

    def send(self, **message: Any) -> None:
        """Send a message to the launcher."""
        if self._socket is None or self.cut:
            return
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.cut = True

    def orders(self) -> list[dict[str, Any]]:
        """Return the orders since the last call, without waiting."""
        if self._socket is None or self.cut:
            return []
        self._socket.setblocking(False)
        data = b""
        try:
            data = self._socket.recv(65536)
            self.cut = not data
        except BlockingIOError:
            return []
        except OSError:
            self.cut = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()


SILENCE_S = 60.0
"""If no beat is received for this many seconds, the launcher is considered to have ended."""
ORPHANED_S = 5.0
"""Seconds that ranks may take to exit after the launcher has ended, or after one of them has failed."""
_BLOCKED_S = 5.0
"""Seconds that the main thread may then still block on writing the ranks' output, before the process exits."""
_TICK_S = 0.05


def extra_variables(job: Job) -> dict[str, str]:
    """Return environment variables for the ranks of this host, in addition to the job's."""
    variables: dict[str, str] = {}
    if len(job.nodes) > 1:
        variables |= interface_variables(job.address, {**os.environ, **job.environment})
    if len(job.nodes) > 1 and job.rendezvous:
        # The host's own name may resolve to the loopback address.
        variables["PET_LOCAL_ADDR"] = source_address(job.address)
    return variables


class _Link:
    """The connection to the launcher over stdin and stdout.

    A thread reads, so that beats are received also while the main thread blocks on writing output.
    """

    def __init__(self, output: IO[bytes], ranks: LocalRanks) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cut = False
        self._output, self._ranks = output, ranks

    def listen(self) -> None:
        """Start the reading thread. Call it after the ranks have started: a process with threads should not fork."""
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message to the launcher."""
        try:
            self._output.write(json.dumps(message).encode() + b"\n")
            self._output.flush()
        except OSError:
            self.cut = True

    def _listen(self) -> None:
        rest, stdin = b"", sys.stdin.fileno()
        while select.select([stdin], [], [], SILENCE_S)[0]:
            data = os.read(stdin, 65536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.orders.put(json.loads(line))
        self.cut = True
        # Meanwhile the main thread ends the ranks, unless it blocks on writing their output.
        time.sleep(ORPHANED_S + _BLOCKED_S)
        self._ranks.send(signal.SIGKILL)
        os._exit(1)


def serve(node: int) -> int:
    """Run the job that the first line of stdin describes, and carry out the launcher's orders; return the exit code."""
    job = Job.from_json(_first_line())
    with RankMessages() as messages:
        ranks = LocalRanks(job, node, messages=messages, variables=extra_variables(job), stdin=False)
        link = _Link(sys.stdout.buffer, ranks)
        try:
            ranks.start()
        except PlaitError as error:
            link.send(error=str(error))
            return 2
        link.listen()
        with Signals(ranks.send):
            _AgentRanks(link, ranks).supervise()
    return exit_code(ranks.records)


def _first_line() -> str:
    """Return the first line of stdin, read byte by byte so that no later line (an order) is buffered here."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode()


class _AgentRanks:
    """Supervises the ranks of this host, and reports them to the launcher."""

    def __init__(self, link: _Link, ranks: LocalRanks) -> None:
        self._link, self._ranks = link, ranks
        self._reporter = Reporter(ranks, link.send)
        self._selector = selectors.DefaultSelector()
        ranks.pause = self._pump

    def supervise(self) -> None:
        """Run until all ranks have ended and all their output is passed on."""
        for record, name, pipe in self._ranks.outputs():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (record, name))
        self._reporter.begin()
        while True:
            running = self._ranks.poll()
            ready = self._pump(_TICK_S if running else 0)
            while not self._link.orders.empty():
                apply_order(self._ranks, self._link.orders.get())
            self._reporter.report()
            if running and self._link.cut:
                self._ranks.end(wait=0.0, grace=ORPHANED_S)
            # Do not wait for the pipe to close: a data worker that outlives its rank may hold it open.
            if not running and not ready:
                return

    def _pump(self, seconds: float) -> bool:
        """Wait up to `seconds` for output of ranks, and send it to the launcher; return whether there was any."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            record, name = key.data
            data = os.read(key.fd, 65536)
            if data:
                # JSON holds text: latin-1 maps every byte to a character and back.
                self._link.send(rank=record.placement.rank, **{name: data.decode("latin-1")})
            else:
                self._selector.unregister(key.fileobj)
        return bool(ready)


def run_alone(job: Job, node: int) -> int:
    """Run a host's ranks without stdin. They print to the console, and end when that closes. Return the exit code."""
    pid_file = _pid_file(job.id, node)
    pid_file.write_text(str(os.getpid()), encoding="utf-8")
    console = select.poll()
    console.register(sys.stdout.fileno(), 0)  # no events: only reports that the other end has closed
    try:
        return supervise_here(job, node, must_end=lambda: bool(console.poll(0)))
    finally:
        pid_file.unlink(missing_ok=True)


def supervise_here(
    job: Job,
    node: int,
    placements: Sequence[RankPlacement] | None = None,
    *,
    must_end: Callable[[], bool] = lambda: False,
) -> int:
    """Run ranks of this host to their end, connected to the launcher if it can be reached; return the exit code.

    If it cannot be reached, failures are reported here.
    """
    connection = Connection(job.contact)
    with RankMessages() as messages:
        relay = Relay()
        variables = extra_variables(job)
        ranks = LocalRanks(
            job,
            node,
            placements=placements,
            messages=messages,
            variables=variables,
            capture=placements is None,
            pause=relay.pump,
        )
        reporter = Reporter(ranks, connection.send)
        with Signals(ranks.send) as signals:
            ranks.start()
            reporter.begin()
            relay.open(ranks.outputs())
            while ranks.poll():
                for order in connection.orders():
                    apply_order(ranks, order)
                reporter.report(ended_by_us=signals.waited > 0.0)
                failed = any(record.failed for record in ranks.records)
                if failed or signals.waited > ORPHANED_S or connection.cut or must_end():
                    ranks.end(wait=0.5, grace=ORPHANED_S)
                relay.pump(_TICK_S)
        relay.close()
        reporter.report(ended_by_us=signals.waited > 0.0)
        if not signals.waited and not connection.connected:
            report_end(ranks.records, hung=False, log_dir=job.log_dir, several_hosts=True)
    connection.close()
    return exit_code(ranks.records)


def end(job: str) -> int:
    """End the ranks of a job that `run_alone` runs on this host, if there are any; return the exit code."""
    for pid_file in Path(tempfile.gettempdir()).glob(_pid_file(job, "*").name):
        with suppress(OSError, ValueError):  # ended already
            if pid_file.stat(follow_symlinks=False).st_uid == os.getuid():  # every user may write files to that folder
                os.kill(int(pid_file.read_text(encoding="utf-8")), signal.SIGTERM)
    return 0


def _pid_file(job: str, node: int | str) -> Path:
    """Return the file with the agent's pid, for `end`; its name has the node number, as hosts may share the folder."""
    return Path(tempfile.gettempdir(), f"plait-{os.getuid()}-{job}-{node}.pid")


def main() -> int:
    """Run the command line of this module; return the exit code."""
    options = argparse.ArgumentParser(prog="plait.launch.agent")
    options.add_argument("--node", type=int, default=0)
    options.add_argument("--job")
    options.add_argument("--end", metavar="ID")
    given = options.parse_args()
    try:
        if given.end is not None:
            return end(given.end)
        return serve(given.node) if given.job is None else run_alone(Job.from_json(given.job), given.node)
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
