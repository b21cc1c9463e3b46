"""Checks every host before any rank starts, and reports what would fail later, with remedies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from plait.launch.job import Job, missing_program
from plait.launch.network import is_this_host
from plait.launch.probe import MARK, HostFacts, ProbeRequest

Reach = Callable[[int, Sequence[str]], list[str]]
"""Function (number of the host, argv) → the command that runs `argv` on that host."""

_ANSWER_S = 60.0
_SKEW_S = 2.0
_LITTLE = 1 << 30


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """A problem of a host."""

    host: str
    what: str
    remedy: str
    fatal: bool = True


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The answer of one host, or why there is none."""

    host: str
    facts: HostFacts | None
    failure: str = ""
    skew: float = 0.0
    """Least seconds by which its clock is ahead of this host's, or (negative) behind; 0 if it may be right."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of checking all hosts."""

    checks: tuple[HostCheck, ...]
    findings: tuple[PreflightFinding, ...]
    job: Job
    """The job, with an address and a port that rank 0 can use."""

    @property
    def good(self) -> bool:
        """Whether the job can start."""
        return not any(finding.fatal for finding in self.findings)


def preflight(job: Job, reach: Reach, *, code: str | None, fixed_port: str | None) -> Preflight:
    """Query all hosts at the same time, and compare their answers. `fixed_port`: the flag that set the port."""
    with _marker(job) as marker, ThreadPoolExecutor(min(len(job.nodes), 64)) as pool:
        question = ProbeRequest(job.folder, code, job.arguments, marker, job.address or None, program=job.program[0])

        def ask(node: int) -> HostCheck:
            mine = replace(question, port=job.port if node == 0 else None)
            argv = [sys.executable, "-m", "plait.launch.probe"]
            return _ask(job.nodes[node].host, reach(node, argv), mine)

        checks = tuple(pool.map(ask, range(len(job.nodes))))
    asked, first = bool(job.address), checks[0].facts
    if first is not None:
        address = job.address or first.reached_at or ""
        taken = not first.port_free and not fixed_port
        job = replace(job, address=address, port=first.other_port if taken else job.port)
    findings = [*_unreachable(checks), *_different(checks), *_lacking(checks, job), *_port(checks[0], job, fixed_port)]
    findings += _without_route(checks, job) if asked else []  # one from the host itself is reachable
    return Preflight(checks, tuple(findings), job)


@contextmanager
def _marker(job: Job) -> Iterator[str | None]:
    """Make a file in the job's folder, yield its path, and remove it on exit; yield None if it cannot be made.

    A host that sees the file shares the folder with this one.
    """
    path = Path(job.folder or os.curdir, f".plait-{job.id}").absolute()
    try:
        path.touch()
    except OSError:
        yield None
        return
    try:
        yield str(path)
    finally:
        with suppress(OSError):
            path.unlink()


def _ask(host: str, command: Sequence[str], question: ProbeRequest) -> HostCheck:
    before = time.time()
    try:
        said = subprocess.run(
            command,
            input=json.dumps(asdict(question)) + "\n",
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        return HostCheck(host, None, f"no answer within {_ANSWER_S:.0f} seconds")
    after = time.time()
    line = next((line for line in said.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        return HostCheck(host, None, _failure(said.stderr.strip() or said.stdout.strip(), said.returncode))
    facts = HostFacts(**json.loads(line.removeprefix(MARK)))
    return HostCheck(host, facts, skew=min(facts.clock - before, 0.0) + max(facts.clock - after, 0.0))


def _failure(said: str, code: int) -> str:
    """Return why a host gave no answer: its last line of output, or both fingerprints if its ssh key changed."""
    if _KEY_CHANGED not in said:
        return said.splitlines()[-1] if said else f"exit code {code}"
    shown = re.search(r"\bSHA256:[A-Za-z0-9+/=]+", said)
    known = re.search(r"^Offending \S+ key in (.+)$", said, re.MULTILINE)
    return (
        f"{_KEY_CHANGED.lower()}: it now shows {shown[0] if shown else 'another key'}, which is not the key in "
        f"{known[1].strip() if known else 'known_hosts'}"
    )


def _unreachable(checks: Sequence[HostCheck]) -> list[PreflightFinding]:
    return [
        PreflightFinding(check.host, check.failure, _remedy(check.failure)) for check in checks if check.facts is None
    ]


_KEY_CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
"""The start of ssh's message about a host whose key has changed."""
_COMPARE = (
    "ask its administrator, or run `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's own console, and "
    "compare the fingerprints"
)
_HOST_KEYS = {
    _KEY_CHANGED.lower(): (
        "either the host was installed again, or another machine answers in its place and would read all that is sent; "
        f"do not connect before you know: {_COMPARE}. Only if they are equal, remove the old key from that file"
    ),
    # If ssh's own warning is switched off, a changed key gives the same message as an unknown one.
    "Host key verification": (
        f"its key is not known here, or it has changed: {_COMPARE} with that of `ssh HOST`, before you accept it"
    ),
}


def _remedy(failure: str) -> str:
    remedies = {
        **_HOST_KEYS,
        "No module named": f"install Plait for {sys.executable} there, at the same path as here",
        "No such file or directory": "the folder and the Python of this host must be there too, at the same paths",
        "not found": "the Python of this host must be there too, at the same path",
        "Permission denied": "let this user in without a password: ssh-copy-id, or an agent",
        "Connection refused": "start sshd there, or name its port with --ssh_port",
        "Could not resolve": "correct its name in the hostfile, or add it to DNS",
        "timed out": "check the network, a firewall, and that it is up",
        "No route": "check the network, a firewall, and that it is up",
    }
    known = (remedy for text, remedy in remedies.items() if text in failure)
    return next(known, "try the same with ssh by hand; --no_ssh_check leaves this check out")


_MUST_BE_EQUAL = {
    "python": "hosts must have the same Python: pickled messages between ranks may not be readable otherwise",
    "torch": "install the same torch on all hosts",
    "cuda": "install a torch of the same CUDA on all hosts",
    "plait": "install the same Plait on all hosts",
    "code": "copy the code and the files of settings to all hosts, for example with rsync",
}


def _different(checks: Sequence[HostCheck]) -> Iterator[PreflightFinding]:
    """Yield findings about versions and code that differ from those of the first host."""
    answered = [(check.host, check.facts) for check in checks if check.facts is not None]
    for host, facts in answered[1:]:
        first_host, first = answered[0]
        for name, remedy in _MUST_BE_EQUAL.items():
            mine, theirs = getattr(facts, name), getattr(first, name)
            if name == "python":
                mine, theirs = (value.rpartition(".")[0] for value in (mine, theirs))
            if mine != theirs:
                what = f"{name} is {mine or 'absent'}, on {first_host} {theirs or 'absent'}"
                yield PreflightFinding(host, what, remedy)


def _lacking(checks: Sequence[HostCheck], job: Job) -> Iterator[PreflightFinding]:
    """Yield findings about a missing program, too few GPUs, too little memory, a wrong clock."""
    with_gpus = any(check.facts is not None and check.facts.gpus for check in checks)
    for check, node in zip(checks, job.nodes, strict=True):
        facts, ranks = check.facts, len(node.slots)
        if facts is None:
            continue
        if facts.program is None:
            what, _, remedy = missing_program(job.program[0]).partition("; ")
            yield PreflightFinding(check.host, what, remedy)
        if with_gpus and facts.gpus <= max(node.slots):
            what = f"slot {max(node.slots)} is used, but there are {facts.gpus} GPUs"
            yield PreflightFinding(check.host, what, "correct its slots in the hostfile, or use --exclude")
        if facts.gpu_memory is not None and facts.gpu_memory < _LITTLE:
            what = f"a GPU has only {facts.gpu_memory >> 20} MiB free"
            yield PreflightFinding(check.host, what, "nvidia-smi there shows which process has the rest", fatal=False)
        if facts.memory < ranks * _LITTLE:
            what = f"only {facts.memory >> 20} MiB of memory are free for {ranks} ranks"
            yield PreflightFinding(check.host, what, "end programs that use it, or use fewer slots", fatal=False)
        if abs(check.skew) > _SKEW_S:
            what = f"its clock is {abs(check.skew):.0f} s {'ahead' if check.skew > 0 else 'behind'}"
            yield PreflightFinding(check.host, what, "set it with NTP: logs and timeouts use it", fatal=False)


def _port(first: HostCheck, job: Job, fixed: str | None) -> Iterator[PreflightFinding]:
    """Yield findings about the address and port of rank 0."""
    if first.facts is not None and not first.facts.port_free and fixed:
        what = f"{fixed} {job.port} is in use: {first.facts.port_holder} has it"
        yield PreflightFinding(first.host, what, f"end that, or leave {fixed} out and a free port is taken")
    if first.facts is not None and not job.address:
        yield PreflightFinding(first.host, "its address is not known", "name it with --master_addr")


def _without_route(checks: Sequence[HostCheck], job: Job) -> Iterator[PreflightFinding]:
    """Yield findings about hosts without a route to rank 0."""
    remedy = "name an address that all hosts reach with --master_addr"
    for check in checks:
        if check.facts is not None and check.facts.interface is None:
            what = f"no network interface leads to {job.address}, where rank 0 is"
            yield PreflightFinding(check.host, what, remedy)
        elif check.facts is not None and check.facts.interface == "lo" and not _local_only(job):
            what = f"{job.address}, where rank 0 is, is the loopback address there"
            yield PreflightFinding(check.host, what, remedy)


def _local_only(job: Job) -> bool:
    return all(is_this_host(node.host) for node in job.nodes)
