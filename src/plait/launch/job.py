"""A job: which program runs on which slots of which hosts. It is plain data, and is sent to every host as JSON."""

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

# Binding ranks to cores.


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_count() -> int:
    """Return how many cores this process may use."""
    return len(available_cores())


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores in a list of numbers and ranges: `1,3-5,7` → (1, 3, 4, 5, 7)."""
    cores: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", entry)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise WorldError(f"--bind_core_list {text!r}: {entry!r} is not a core or a range of cores; write `1,3-5,7`")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    if len(set(cores)) < len(cores):
        raise WorldError(f"--bind_core_list {text!r} names a core twice")
    return tuple(cores)


def cores_of(local_rank: int, local_size: int, cores: tuple[int, ...], available: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cores of one rank: adjacent ones, as many as every other rank has. Left-over cores stay idle."""
    missing_program = [core for core in cores if core not in available]
    if missing_program:
        raise WorldError(f"--bind_core_list: core {missing_program[0]} cannot be used here; {_ranges(available)} can")
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
    """A host and those of its slots that are used, one rank each."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The host and slot that one rank runs on."""

    rank: int
    host: str
    node: int
    """The number of the host, from 0."""
    local_rank: int
    local_size: int
    slot: int


@dataclass(frozen=True, slots=True)
class Job:
    """One launch. Ranks are numbered host by host, in the order of `nodes`."""

    program: tuple[str, ...]
    """The command of every rank, up to and including the script's path."""
    nodes: tuple[Node, ...]
    arguments: tuple[str, ...] = ()
    """The script's own arguments, unchanged."""
    id: str = "local"
    address: str = "127.0.0.1"
    """The address where rank 0 listens."""
    port: int = 29500
    folder: str | None = None
    """The current folder of ranks; None: that of the launcher."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the ranks, in addition to those of each host."""
    devices: bool = False
    """Whether slots are GPUs. If so, the ranks of a host see only the GPUs of its slots."""
    local_rank_flag: bool = False
    """Whether the script gets the argument `--local_rank=N`, as with older launchers."""
    bind_cores: bool = False
    """Whether each rank is bound to its own cores."""
    cores: tuple[int, ...] = ()
    """The cores to bind ranks to; empty: all."""
    log_dir: str | None = None
    """The folder for output, one file per rank; None: output goes to the console."""
    log_prefix: str = ""
    spare: int = 0
    """The number of hosts that may fail without ending the job."""
    once_per_node: bool = False
    """Whether the program is started once per host, and starts the ranks itself."""
    contact: str = ""
    """Address, port and password of the launcher's `Controller`, which ranks connect to; empty: there is none."""
    rendezvous: bool = False
    """Whether the first host runs the rendezvous of torch's elastic agents."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(node.slots) for node in self.nodes)

    def placements(self) -> list[RankPlacement]:
        """Return the placement of every rank, rank 0 first."""
        placements: list[RankPlacement] = []
        for index, node in enumerate(self.nodes):
            for local_rank, slot in enumerate(node.slots):
                placements.append(RankPlacement(len(placements), node.host, index, local_rank, len(node.slots), slot))
        return placements

    def started_on(self, node: int) -> list[RankPlacement]:
        """Return the ranks to start on one host."""
        placements = [placement for placement in self.placements() if placement.node == node]
        return placements[:1] if self.once_per_node else placements

    def argv(self, placement: RankPlacement) -> list[str]:
        """Return the command line of a rank."""
        flag = [f"--local_rank={placement.local_rank}"] if self.local_rank_flag else []
        return [*self.program, *flag, *self.arguments]

    def variables(self, placement: RankPlacement, present: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a rank gets in addition to `present`, the environment of its host."""
        variables = dict(self.environment)
        if self.devices and (
            visible := _visible(placement, self.nodes[placement.node].slots, {**present, **variables})
        ):
            variables["CUDA_VISIBLE_DEVICES"] = visible
        if self.rendezvous:
            # Otherwise torch compares the address with that of the host's own name, which often is another one.
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
        """Return the cores that a rank is bound to; None if it is not bound."""
        if not self.bind_cores:
            return None
        return cores_of(placement.local_rank, placement.local_size, self.cores or available, available)

    def log_file(self, placement: RankPlacement) -> str | None:
        """Return the file for a rank's output; None if it goes to the console."""
        return None if self.log_dir is None else f"{self.log_dir}/{self.log_prefix}rank{placement.rank}.log"

    def to_json(self) -> str:
        """Return the job as one line of JSON, without defaults."""
        usual = {info.name: info.default for info in fields(self)}
        changed = {name: value for name, value in asdict(self).items() if value != usual[name] and value != {}}
        return json.dumps(changed, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote."""
        values = json.loads(text)
        nodes = tuple(Node(node["host"], tuple(node["slots"])) for node in values.pop("nodes"))
        names = ("program", "arguments", "cores")
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in names if name in values}
        return cls(nodes=nodes, **lists, **values)


def _visible(placement: RankPlacement, slots: tuple[int, ...], present: Mapping[str, str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a host's slots, which are indices into the value that it has there already."""
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


# Finding a program on this host. Over ssh, PATH has fewer folders than in a terminal.


def find_program(name: str, *, path: str | None = None, folder: str | None = None) -> str | None:
    """Return the path of a program; None if it is not found.

    A bare name is looked up on `path` (absent: this process's), then beside this Python, where `plait` itself and other
    commands of its environment are. A name with a slash is relative to `folder`.
    """
    if "/" in name:
        file = Path(folder or os.curdir, name)
        return name if file.is_file() and os.access(file, os.X_OK) else None
    return shutil.which(name, path=path) or shutil.which(name, path=str(Path(sys.executable).parent))


def missing_program(name: str) -> str:
    """Return the message about a program that does not exist."""
    return (
        f"no program {name!r}, neither on the path nor beside {sys.executable}; give its whole path, install "
        "it there, or leave out --no_python if it is a Python script"
    )
