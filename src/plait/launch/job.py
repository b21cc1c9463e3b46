"""What is to run where: the whole of a launch, as plain data that every host reads alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from plait.errors import WorldError

# Cores for ranks, so that they do not push each other from core to core.


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
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", entry)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise WorldError(f"--bind_core_list {text!r}: {entry!r} is no core or range of cores; write `1,3-5,7`")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
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


@dataclass(frozen=True, slots=True)
class Node:
    """A host and the slots of it that are used, one rank each."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank runs."""

    rank: int
    host: str
    node: int
    """Which of the hosts, from 0."""
    local_rank: int
    local_size: int
    slot: int


@dataclass(frozen=True, slots=True)
class Job:
    """One launch. Ranks are given out host by host, in the order of `nodes`."""

    program: tuple[str, ...]
    """What every rank runs, up to and with the script."""
    nodes: tuple[Node, ...]
    arguments: tuple[str, ...] = ()
    """The script's own, never touched."""
    id: str = "local"
    address: str = "127.0.0.1"
    """Where rank 0 listens."""
    port: int = 29500
    folder: str | None = None
    """Where ranks start; None: where the launcher is."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Forwarded to every host, on top of what is there."""
    devices: bool = False
    """Slots are GPUs: ranks of a host see those of its slots, and no others."""
    local_rank_flag: bool = False
    """Give the script `--local_rank=N`, as older launchers did."""
    bind_cores: bool = False
    """Each rank gets cores of its own."""
    cores: tuple[int, ...] = ()
    """Those to give out; none: all that there are."""
    log_dir: str | None = None
    """One file a rank for what it prints; None: it prints to the console."""
    log_prefix: str = ""
    spare: int = 0
    """So many hosts may fail before the rest is ended too."""
    once_per_node: bool = False
    """Start the program once a host: it starts the ranks itself."""
    contact: str = ""
    """Where ranks that others start for the launcher call it back; empty: nowhere."""
    rendezvous: bool = False
    """The first host keeps the meeting place of torch's elastic agents."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(len(node.slots) for node in self.nodes)

    def placements(self) -> list[RankPlacement]:
        """Every rank's place, rank 0 first."""
        placements: list[RankPlacement] = []
        for index, node in enumerate(self.nodes):
            for local_rank, slot in enumerate(node.slots):
                placements.append(RankPlacement(len(placements), node.host, index, local_rank, len(node.slots), slot))
        return placements

    def started_on(self, node: int) -> list[RankPlacement]:
        """What has to be started on one host."""
        placements = [placement for placement in self.placements() if placement.node == node]
        return placements[:1] if self.once_per_node else placements

    def argv(self, placement: RankPlacement) -> list[str]:
        """The command line of a rank."""
        flag = [f"--local_rank={placement.local_rank}"] if self.local_rank_flag else []
        return [*self.program, *flag, *self.arguments]

    def variables(self, placement: RankPlacement, present: Mapping[str, str]) -> dict[str, str]:
        """What a rank's environment gets on top of `present`, the environment of its host."""
        variables = dict(self.environment)
        if self.devices and (
            visible := _visible(placement, self.nodes[placement.node].slots, {**present, **variables})
        ):
            variables["CUDA_VISIBLE_DEVICES"] = visible
        if self.rendezvous:
            # torch would compare the address with the host's own name, which often leads to another one.
            variables["PET_RDZV_CONF"] = ",".join(
                filter(None, (f"is_host={int(placement.node == 0)}", variables.get("PET_RDZV_CONF")))
            )
        if not self.once_per_node:
            variables |= {
                "RANK": str(placement.rank),
                "LOCAL_RANK": str(placement.local_rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(placement.local_size),
                "GROUP_RANK": str(placement.node),
                "GROUP_WORLD_SIZE": str(len(self.nodes)),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port),
            }
        return variables

    def cores_for(self, placement: RankPlacement, available: tuple[int, ...]) -> tuple[int, ...] | None:
        """The cores that a rank is bound to; None where it may roam."""
        if not self.bind_cores:
            return None
        return cores_of(placement.local_rank, placement.local_size, self.cores or available, available)

    def log_file(self, placement: RankPlacement) -> str | None:
        """Where a rank's output goes, if not to the console."""
        return None if self.log_dir is None else f"{self.log_dir}/{self.log_prefix}rank{placement.rank}.log"

    def to_json(self) -> str:
        """On one line, for another host; what is as usual is left out."""
        usual = {info.name: info.default for info in fields(self)}
        changed = {name: value for name, value in asdict(self).items() if value != usual[name] and value != {}}
        return json.dumps(changed, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        values = json.loads(text)
        nodes = tuple(Node(node["host"], tuple(node["slots"])) for node in values.pop("nodes"))
        names = ("program", "arguments", "cores")
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in names if name in values}
        return cls(nodes=nodes, **lists, **values)


def _visible(placement: RankPlacement, slots: tuple[int, ...], present: Mapping[str, str]) -> str | None:
    """The GPUs of a host's slots. Slots count within what CUDA_VISIBLE_DEVICES already allows there."""
    allowed = present.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return ",".join(map(str, slots))
    names = [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    if not names:
        return None  # the user hides all GPUs: ranks run on the CPU
    if max(slots) >= len(names):
        raise WorldError(
            f"{placement.host}: slot {max(slots)} is asked for, but CUDA_VISIBLE_DEVICES={allowed} leaves {len(names)} "
            "GPUs there; choose fewer slots, or unset it"
        )
    return ",".join(names[slot] for slot in slots)


# Where a program is on this host: what a shell over ssh has on its path is less than what a terminal has.


def find_program(name: str, *, path: str | None = None, folder: str | None = None) -> str | None:
    """The path of a program; None where there is none.

    A bare name is looked for on `path` (absent: this process's), then beside this Python, where `plait` itself and
    other commands of its environment are. A name with a slash counts from `folder`.
    """
    if "/" in name:
        file = Path(folder or os.curdir, name)
        return name if file.is_file() and os.access(file, os.X_OK) else None
    return shutil.which(name, path=path) or shutil.which(name, path=str(Path(sys.executable).parent))


def absent(name: str) -> str:
    """What to say of a program that is not there."""
    return (
        f"there is no program {name!r}, neither on the path nor beside {sys.executable}; give its whole path, install "
        "it there, or leave out --no_python if it is a Python script"
    )
