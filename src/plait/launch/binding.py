"""Cores for ranks, so that they do not push each other from core to core."""

from __future__ import annotations

import os
import re

from plait.errors import WorldError


def available_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """How many processors this process may use."""
    return len(available_cores())


def parse_cores(text: str) -> tuple[int, ...]:
    """`1,3-5,7` → (1, 3, 4, 5, 7)."""
    cores: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
            raise WorldError(f"--bind_core_list {text!r}: {part!r} is no core or range of cores; write `1,3-5,7`")
        cores.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    if len(set(cores)) < len(cores):
        raise WorldError(f"--bind_core_list {text!r} names a core twice")
    return tuple(cores)


def cores_of(local_rank: int, local_size: int, cores: tuple[int, ...], available: tuple[int, ...]) -> tuple[int, ...]:
    """The share of one rank: equally many for each, neighbours together. Cores that are left over stay idle."""
    absent = [core for core in cores if core not in available]
    if absent:
        raise WorldError(f"--bind_core_list: core {absent[0]} cannot be used here; {_ranges(available)} can")
    share = len(cores) // local_size
    if share == 0:
        raise WorldError(
            f"{local_size} ranks cannot be bound to {len(cores)} cores; start fewer, or leave --bind_cores_to_rank out"
        )
    return cores[local_rank * share : (local_rank + 1) * share]


def _ranges(cores: tuple[int, ...]) -> str:
    return f"{cores[0]}-{cores[-1]}" if cores == tuple(range(cores[0], cores[-1] + 1)) else ",".join(map(str, cores))
