"""Restarts after a failure: with the same ranks, with those that are left, or with hosts that came back.

An *attempt* is one start of all ranks. It has new processes, which meet at a new port, so processes that the last
attempt left cannot interfere. They resume from the last checkpoint: `PLAIT_ATTEMPT` gives the Runner its number.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from plait.launch.diagnosis import EXPLAINED_EXIT_CODE, RootCause, find_root_cause
from plait.launch.environment import rendezvous_address, unused_hosts_note
from plait.launch.job import Job, Node
from plait.launch.local import run_job
from plait.launch.network import DEFAULT_PORT, check_port
from plait.launch.records import LaunchOutcome, causes

GRACE_S = 2.0
"""Seconds that ranks may take to exit after one has failed. They cannot finish a step without it."""
PROBE_S = 10.0
"""Seconds between two probes of a host that does not answer."""
WAIT_S = 600.0
"""Seconds to wait for hosts to come back if too few are left."""

_AGAIN = "starting again from the last checkpoint, if there is one"
MICRO_BATCHES_SPLIT = "micro-batches are split, batch.total stays"
"""Printed when a run is restarted with smaller micro-batches."""

Slot = tuple[str, int]
Reach = Callable[[str, Sequence[str]], list[str]]
"""Function (host, argv) → the command that runs `argv` on that host."""


@dataclass
class Membership:
    """The hosts that may take part, those that do, and the world sizes with which the run can continue."""

    job: Job
    least: int
    """The smallest number of hosts."""
    most: int
    reach: Reach
    away: set[str] = field(default_factory=set)
    """Hosts that do not answer."""
    bad: set[Slot] = field(default_factory=set)
    """Slots on which a rank failed twice for the same reason at the same step; they are not used again."""
    sizes: tuple[int, ...] = ()
    """World sizes with which the run can continue with the same batch; empty: any."""
    size: int = 0
    split: int = 1
    """The number of parts that each micro-batch is split into, as larger ones did not fit into memory."""
    _probes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _next: float = 0.0

    def nodes(self) -> tuple[Node, ...]:
        """Return the hosts that answer, with their good slots; at most `most`."""
        nodes = []
        for node in self.job.nodes:
            slots = tuple(slot for slot in node.slots if (node.host, slot) not in self.bad)
            if slots and node.host not in self.away:
                nodes.append(Node(node.host, slots))
        return tuple(nodes[: self.most])

    @property
    def available(self) -> int:
        """The number of ranks that could be started."""
        return sum(len(node.slots) for node in self.nodes())

    def update(self, outcome: LaunchOutcome) -> None:
        """Update the lost hosts and the possible world sizes from an attempt's outcome."""
        beats = (record.observation.beat for record in outcome.records)
        self.sizes = next((beat.sizes for beat in beats if beat is not None and beat.sizes), self.sizes)
        self.away |= {record.placement.host for record in outcome.records if record.lost}

    def fitting(self, available: int) -> int:
        """Return the largest world size up to `available` with which the run can continue; 0 if there is none."""
        if not self.sizes:
            return available
        return max((size for size in self.sizes if size <= available), default=0)

    def host_is_back(self) -> bool:
        """Probe lost hosts in the background; return whether one came back that makes the run larger."""
        if not self.away:
            return False
        if time.monotonic() > self._next:
            self._next = time.monotonic() + PROBE_S
            self._ask()
        back = {host for host, probe in self._probes.items() if probe.poll() == 0}
        self._probes = {host: probe for host, probe in self._probes.items() if probe.poll() is None}
        self.away -= back
        return bool(back) and self.fitting(self.available) > self.size

    def _ask(self) -> None:
        for host in self.away - self._probes.keys():
            quiet = subprocess.DEVNULL
            command = self.reach(host, ["true"])
            self._probes[host] = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, process_group=0)

    def close(self) -> None:
        """End the probes."""
        for probe in self._probes.values():
            probe.kill()
            probe.wait()


def run_with_restarts(
    members: Membership, once: Callable[[Job, Callable[[], bool]], LaunchOutcome], *, restarts: int
) -> int:
    """Attempt a job until it succeeds, or another attempt would fail too; return the last exit code.

    `once(job, join)` runs one attempt; when `join()` returns true, it must ask the ranks to save and exit.
    """
    attempts, attempt = _Attempts(restarts), 0
    try:
        while True:
            outcome = once(_job(members, attempt), members.host_is_back)
            attempt += 1
            if outcome.interrupted or (outcome.code == 0 and not outcome.reform):
                return outcome.code
            members.update(outcome)
            if outcome.reform:
                _log("hosts have come back; all ranks saved, left, and start again together")
            elif (why := attempts.useless(outcome, members) or _too_few(members)) is not None:
                _log(f"not started again: {why}")
                return outcome.code or 1
            else:
                _log(f"starting again from the last checkpoint with {_ranks_text(members)} ({attempts})")
    finally:
        members.close()


def run_on_host(command: Sequence[str], count: int) -> int:
    """Run a command once per rank on this host; if memory ran out, run it again with smaller micro-batches.

    It is not run again after any other failure. Return the exit code of the last attempt.
    """
    nodes, split, attempt = (Node("localhost", tuple(range(count))),), 1, 0
    if (unused := unused_hosts_note()) is not None:
        _log(f"note: {unused}")
    while True:
        address, port = rendezvous_address()
        job = Job(
            tuple(command), nodes, address=address, port=port, environment=_attempt_variables(attempt, count, split)
        )
        outcome = run_job(job, 0, stop_grace=None)
        if outcome.code == 0 or outcome.interrupted or not causes(outcome.records):
            return outcome.code
        cause = find_root_cause(outcome.records, hung=outcome.hung)
        if not _wants_smaller_batches(cause):
            return outcome.code
        split, attempt = 2 * split, attempt + 1
        _log_smaller(_short_of_memory(cause))
        _log(_AGAIN)


@dataclass(frozen=True, slots=True)
class Machines:
    """Several machines, on each of which the user runs the same command."""

    count: int
    rank: int
    """The number of this machine."""
    address: str
    """Address of the first machine."""
    port: int = DEFAULT_PORT
    """Port of the first machine."""


def run_on_machine(command: Sequence[str], count: int, machines: Machines) -> int:
    """Run a command once per rank on this machine, `count` ranks on each; return the exit code.

    The run is not restarted after a failure, as the other machines would have to restart too.
    """
    if machines.rank == 0:
        check_port(machines.port, asked_by="main_process_port")
    nodes = tuple(Node(f"machine-{number}", tuple(range(count))) for number in range(machines.count))
    job = Job(tuple(command), nodes, address=machines.address, port=machines.port)
    return run_job(job, machines.rank, stop_grace=None).code


def restart_with_smaller_batches(command: Sequence[str], *, attempt: int, split: int, why: str) -> NoReturn:
    """Replace this process by a new attempt of its command, with micro-batches split once more.

    The new attempt has this process's pid; all of its memory is freed.
    """
    _log_smaller(why)
    _log(_AGAIN)
    sys.stdout.flush()
    os.execve(command[0], list(command), {**os.environ, **_attempt_variables(attempt + 1, 1, 2 * split)})


def _attempt_variables(attempt: int, most: int, split: int) -> dict[str, str]:
    """Return the variables that describe an attempt to its ranks; `distributed/ranks.py` reads them."""
    return {"PLAIT_ATTEMPT": str(attempt), "PLAIT_MOST_RANKS": str(most), "PLAIT_SPLIT": str(split)}


def _job(members: Membership, attempt: int) -> Job:
    """Return the job with the hosts and slots of this attempt."""
    nodes = _first_slots(members.nodes(), members.fitting(members.available))
    members.size = sum(len(node.slots) for node in nodes)
    most = sum(len(node.slots) for node in members.job.nodes)
    variables = _attempt_variables(attempt, most, members.split)
    return replace(members.job, nodes=nodes, environment={**members.job.environment, **variables})


def _first_slots(nodes: Sequence[Node], size: int) -> tuple[Node, ...]:
    """Return the nodes with the first `size` slots."""
    kept = []
    for node in nodes:
        slots = node.slots[:size]
        size -= len(slots)
        if slots:
            kept.append(Node(node.host, slots))
    return tuple(kept)


class _Attempts:
    """How earlier attempts failed, to tell a chance failure from one that will happen again."""

    def __init__(self, restarts: int) -> None:
        self._restarts, self._done = restarts, 0
        self._last: tuple[str, int, Slot] | None = None

    def __str__(self) -> str:
        return f"restart {self._done} of {self._restarts}"

    def useless(self, outcome: LaunchOutcome, members: Membership) -> str | None:
        """Return why another attempt would fail too, or None if it may succeed.

        A slot on which a rank failed twice for the same reason at the same step is excluded from further attempts.
        """
        failed = causes(outcome.records)
        if not failed and not outcome.hung and any(record.stopped for record in outcome.records):
            return "its ranks were asked to stop, and not by the launcher; they have saved and exited"
        if any(record.message for record in failed) and all(
            record.exit_code == EXPLAINED_EXIT_CODE for record in failed
        ):
            return "the same error would happen again"
        if not any(record.pid for record in outcome.records):
            return "no rank could be started"
        self._done += 1
        if self._done > self._restarts:
            return f"--max_restarts allows {self._restarts} restarts"
        cause = find_root_cause(outcome.records, hung=outcome.hung)
        if _wants_smaller_batches(cause):
            members.split *= 2
            _log_smaller(_short_of_memory(cause))
            return None
        site, last = _failure_site(cause), self._last
        self._last = site
        if site is None or last is None or site[:2] != last[:2]:
            return None
        host, slot = site[2]
        if site[2] != last[2]:
            same_place = "another rank failed in the same place before, so the run itself is at fault"
            return None if cause.diagnosis.outside else same_place
        members.bad.add(site[2])
        _log(f"slot {slot} of {host} failed twice in the same place and is left out")
        return None


def _wants_smaller_batches(cause: RootCause) -> bool:
    """Return whether memory ran out while a Runner computed on micro-batches, which it can split."""
    beat = cause.records[0].observation.beat if cause.records else None
    return cause.diagnosis.full and beat is not None and bool(beat.sizes) and beat.phase.has_batches


def _short_of_memory(cause: RootCause) -> str:
    return f"rank {cause.records[0].placement.rank} {cause.diagnosis.what.partition(':')[0]}"


def _log_smaller(why: str) -> None:
    _log(f"{why}; {MICRO_BATCHES_SPLIT}")


def _failure_site(cause: RootCause) -> tuple[str, int, Slot] | None:
    """Return why, at which step and on which slot a run failed; None if that is not known."""
    record = cause.records[0] if cause.records else None
    if record is None or record.lost:
        return None
    beat = record.observation.beat
    return cause.diagnosis.what, -1 if beat is None else beat.step, (record.placement.host, record.placement.slot)


def _too_few(members: Membership) -> str | None:
    """If too few hosts are left, wait for others to come back. Return None, or why there are still too few."""
    deadline = time.monotonic() + WAIT_S
    if len(members.nodes()) < members.least:
        _log(f"{len(members.nodes())} hosts are left, and {members.least} are needed: waiting for others to come back")
    while len(members.nodes()) < members.least:
        if time.monotonic() > deadline or not members.away:
            return f"{len(members.nodes())} hosts are left, and {members.least} are needed"
        members.host_is_back()
        time.sleep(0.2)
    if members.fitting(members.available) == 0:
        sizes = ", ".join(map(str, members.sizes))
        return (
            f"{members.available} ranks are left, but the layout and the batch fit only {sizes}; set batch.total, "
            "and leave batch.micro or batch.accumulation open"
        )
    return None


def _ranks_text(members: Membership) -> str:
    available, size = members.available, members.fitting(members.available)
    rest = f" of {available}, the most that fit the layout and the batch" if size < available else ""
    return f"{size} {'rank' if size == 1 else 'ranks'}{rest}"


def _log(text: str) -> None:
    print(f"plait: {text}", file=sys.stderr, flush=True)
