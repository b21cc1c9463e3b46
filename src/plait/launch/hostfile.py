"""The hostfile and the filters on it: which hosts, and which slots of each. A slot holds one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from plait.config import read_lines, whole_number
from plait.errors import WorldError

Pool = dict[str, tuple[int, ...]]
"""Host → the numbers of its slots, in the order of ranks."""

_NAME = re.compile(r"(?!-)[\w.:%@+~-]+")
"""A name or an address, optionally after `user@`. ssh would take a leading dash for an option."""
MOST_SLOTS = 65_536
"""The most slots of a host: more than any has. A typo must not allocate a huge list of slots."""
_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?(?:\s+max[_-]slots\s*=\s*\d+)?\s*")


def read_hostfile(path: Path) -> Pool:
    """Return the hosts in a file.

    Its lines are like `worker-0 slots=4`; `#` and `//` begin a comment, and an IPv6 address may be in brackets.
    """
    lines = read_lines(path, lambda reason: WorldError(f"the hostfile {reason}"))
    pool: Pool = {}
    for number, line in enumerate(lines, start=1):
        text = re.split(r"#|(?:^|\s)//", line, maxsplit=1)[0].strip()
        if text:
            host, slots = _entry(text, f"{path}:{number}")
            if host in pool:
                raise WorldError(f"{path}:{number}: {host!r} appears twice; give it one line with all of its slots")
            pool[host] = tuple(range(slots))
    if not pool:
        raise WorldError(f"the hostfile {str(path)!r} names no host; write one per line: `worker-0 slots=4`")
    return pool


def _entry(text: str, where: str) -> tuple[str, int]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise WorldError(f"{where}: cannot read {text!r}; write a host and its slots: `worker-0 slots=4`")
    if match["slots"] is None:
        raise WorldError(f"{where}: {text!r} has no slots; write how many ranks it takes: `{match['host']} slots=4`")
    slots = whole_number(match["slots"])
    if not slots:
        raise WorldError(f"{where}: slots={match['slots']:.20} is not a number from 1; write `{match['host']} slots=4`")
    if slots > MOST_SLOTS:
        raise WorldError(f"{where}: slots={slots} is more than the {MOST_SLOTS} that a host may have")
    host = _without_brackets(match["host"])
    if _NAME.fullmatch(host) is None:
        raise WorldError(f"{where}: {host!r} is not the name or address of a host; write it like `worker-0 slots=4`")
    return host, slots


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def choose(pool: Pool, *, include: str = "", exclude: str = "") -> Pool:
    """Return the hosts and slots that a filter such as `worker-0@worker-1:0,2` leaves, in the order of the pool.

    A host that the filter names without slots stands for all of its slots. Only one of the two filters can be given.
    """
    if include and exclude:
        raise WorldError(f"--include {include!r} and --exclude {exclude!r} exclude each other; give one of them")
    if include:
        wanted = _named(include, pool, "--include")
        left = {host: wanted[host] for host in pool if host in wanted}
    elif exclude:
        unwanted = _named(exclude, pool, "--exclude")
        left = {
            host: tuple(slot for slot in slots if slot not in unwanted.get(host, ())) for host, slots in pool.items()
        }
        left = {host: slots for host, slots in left.items() if slots}
    else:
        return dict(pool)
    if not left:
        raise WorldError(f"--exclude {exclude!r} leaves no slot of {', '.join(pool)}")
    return left


def _named(text: str, pool: Pool, flag: str) -> Pool:
    """Return the hosts and slots that a filter names; raise an error for those that the pool does not have."""
    slots_of: dict[str, set[int]] = {}
    for entry in text.split("@"):
        name, slots = _split_entry(entry.strip(), flag)
        host = _host(name, pool, flag)
        absent = [slot for slot in slots if slot not in pool[host]]
        if absent:
            there = ",".join(map(str, pool[host]))
            raise WorldError(f"{flag} {text!r}: {host!r} has no slot {absent[0]}; it has {there}")
        slots_of.setdefault(host, set()).update(slots or pool[host])
    return {host: tuple(sorted(slots)) for host, slots in slots_of.items()}


def _split_entry(entry: str, flag: str) -> tuple[str, list[int]]:
    """Return the name and the slots in an entry such as `worker-1:0,2`. IPv6 needs brackets: `[fd00::2]:0,2`."""
    if entry.startswith("["):
        name, _, slots = entry[1:].partition("]")
        slots = slots.removeprefix(":")
    elif entry.count(":") > 1:
        name, slots = entry, ""
    else:
        name, _, slots = entry.partition(":")
    if not name:
        raise WorldError(f"{flag}: {entry!r} names no host; write `worker-0@worker-1:0,2`")
    numbers = [number.strip() for number in slots.split(",")] if slots else []
    parsed = [whole_number(number) for number in numbers]
    if None in parsed:
        raise WorldError(f"{flag}: {slots!r} in {entry!r} is not a list of slots; write `{name}:0,2`")
    return name, [number for number in parsed if number is not None]


def _host(name: str, pool: Mapping[str, object], flag: str) -> str:
    """Return the pool's host with this name; it may be given without the `user@` that it has in the pool."""
    for host in pool:
        if name in (host, host.rpartition("@")[2]):
            return host
    close = get_close_matches(name, pool, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(pool)}"
    raise WorldError(f"{flag}: unknown host {name!r}; {hint}")


def limit(pool: Pool, *, hosts: int | None, slots: int | None) -> Pool:
    """Return the first `hosts` hosts of the pool, with the first `slots` slots of each; None takes all."""
    if hosts is not None and hosts > len(pool):
        raise WorldError(f"--num_nodes {hosts}: there are only {len(pool)} hosts ({', '.join(pool)})")
    left = dict(list(pool.items())[:hosts])
    for host, there in left.items():
        if slots is not None and slots > len(there):
            raise WorldError(f"--num_gpus {slots}: {host!r} has only {len(there)} slots in the hostfile")
    return {host: there[:slots] for host, there in left.items()}
