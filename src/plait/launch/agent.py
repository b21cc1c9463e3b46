"""The launcher's hand on one host: starts its ranks, tells how they do, and ends them when the launcher is gone.

    python -m plait.launch.agent --node 1          job and orders on stdin, news on stdout, a line of JSON each
    python -m plait.launch.agent --node 1 --job …  for launchers without stdin: ranks print to the console
    python -m plait.launch.agent --end ID          end the one that was started with --job

In the first form the connection is a lifeline. Whatever cuts it (Ctrl-C, `kill -9` of the launcher, a pulled
cable) ends the ranks: stdin closes, or the beats that the launcher sends stay out.
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

# A rank's or a host's connection back to the launcher, where mpirun, srun or pdsh stands between them.


_CONNECT_S = 5.0


class Connection:
    """News go out, orders come in. Where the launcher cannot be reached it is mute, and nothing else changes."""

    def __init__(self, contact: str) -> None:
        """`contact` is address, port and password, as `Controller` gives them out."""
        self.cut = False
        """The launcher was there, and is gone."""
        self._rest = b""
        self._socket: socket.socket | None = None
        if contact:
            address, port, password = contact.rsplit(":", 2)
            try:
                self._socket = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
            except OSError:
                return  # a wall between the hosts: the run goes on, and each host explains its own failures
            self.send(password=password)

    @property
    def connected(self) -> bool:
        """Whether somebody listens."""
        return self._socket is not None and not self.cut

    def send(self, **message: Any) -> None:
        """Tell the launcher something."""
        if self._socket is None or self.cut:
            return
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.cut = True

    def orders(self) -> list[dict[str, Any]]:
        """What has come since the last call; does not wait."""
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
        """No more news."""
        if self._socket is not None:
            self._socket.close()


SILENCE_S = 60.0
"""So long without a beat, and the launcher counts as gone."""
ORPHANED_S = 5.0
"""How long ranks may take to leave once it is gone, or once one of them has failed."""
_BLOCKED_S = 5.0
"""How long the main thread may then still wait for somebody to read what ranks print."""
_TICK_S = 0.05


def extra_variables(job: Job) -> dict[str, str]:
    """What ranks of a host get besides the job's own variables."""
    variables: dict[str, str] = {}
    if len(job.nodes) > 1:
        variables |= interface_variables(job.address, {**os.environ, **job.environment})
    if len(job.nodes) > 1 and job.rendezvous:
        variables["PET_LOCAL_ADDR"] = source_address(
            job.address
        )  # the host's own name may lead to the loopback address
    return variables


class _Link:
    """The connection to the launcher.

    A thread listens, so that beats are heard even while the main thread waits for a console that does not move on.
    """

    def __init__(self, output: IO[bytes], ranks: LocalRanks) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cut = False
        self._output, self._ranks = output, ranks

    def listen(self) -> None:
        """Begin to. Not before the ranks have started: a process with threads should not fork."""
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Tell the launcher something."""
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
        # The main thread ends the ranks now, unless it waits for somebody to read what they print.
        time.sleep(ORPHANED_S + _BLOCKED_S)
        self._ranks.send(signal.SIGKILL)
        os._exit(1)


def serve(node: int) -> int:
    """Run the job that stands on the first line of stdin, under the launcher's orders."""
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
    """The job. Read byte by byte: what follows are orders."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode()


class _AgentRanks:
    """Sees to the ranks of this host, and tells the launcher of them."""

    def __init__(self, link: _Link, ranks: LocalRanks) -> None:
        self._link, self._ranks = link, ranks
        self._reporter = Reporter(ranks, link.send)
        self._selector = selectors.DefaultSelector()
        ranks.pause = self._pump

    def supervise(self) -> None:
        """Until all ranks are gone and all they printed is passed on."""
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
            # A worker that outlives its rank may hold the pipe open: the rank's end counts, not the pipe's.
            if not running and not ready:
                return

    def _pump(self, seconds: float) -> bool:
        """Pass on what ranks print."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            record, name = key.data
            data = os.read(key.fd, 65536)
            if data:
                self._link.send(
                    rank=record.placement.rank, **{name: data.decode("latin-1")}
                )  # any byte, there and back
            else:
                self._selector.unregister(key.fileobj)
        return bool(ready)


def run_alone(job: Job, node: int) -> int:
    """Run a host's ranks without orders on stdin: they print to the console, which is also the lifeline."""
    pid_file = _pid_file(job.id, node)
    pid_file.write_text(str(os.getpid()), encoding="utf-8")
    console = select.poll()
    console.register(sys.stdout.fileno(), 0)  # nothing asked for: only that the other end is gone is told
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
    """Run ranks of this host to their end, in touch with the launcher where it can be reached; returns the exit code.

    Where it cannot, why they failed is said here.
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
    """End the ranks that `run_alone` runs here, if it does."""
    for pid_file in Path(tempfile.gettempdir()).glob(_pid_file(job, "*").name):
        with suppress(OSError, ValueError):  # gone already
            if pid_file.stat(follow_symlinks=False).st_uid == os.getuid():  # every user may leave files there
                os.kill(int(pid_file.read_text(encoding="utf-8")), signal.SIGTERM)
    return 0


def _pid_file(job: str, node: int | str) -> Path:
    """Where `end` finds whom to end. A folder may be shared by hosts, so the file is named for the host too."""
    return Path(tempfile.gettempdir(), f"plait-{os.getuid()}-{job}-{node}.pid")


def main() -> int:
    """The command line of this module."""
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
