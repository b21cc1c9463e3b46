"""What is to run where: the whole of a launch, as plain data that every host reads alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from plait.errors import WorldError
from plait.launch.binding import cores_of


@dataclass(frozen=True, slots=True)
class Node:
    """A host and the slots of it that are used, one rank each."""

    host: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
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

    def places(self) -> list[Place]:
        """Every rank's place, rank 0 first."""
        places: list[Place] = []
        for index, node in enumerate(self.nodes):
            for local_rank, slot in enumerate(node.slots):
                places.append(Place(len(places), node.host, index, local_rank, len(node.slots), slot))
        return places

    def started_on(self, node: int) -> list[Place]:
        """What has to be started on one host."""
        places = [place for place in self.places() if place.node == node]
        return places[:1] if self.once_per_node else places

    def argv(self, place: Place) -> list[str]:
        """The command line of a rank."""
        flag = [f"--local_rank={place.local_rank}"] if self.local_rank_flag else []
        return [*self.program, *flag, *self.arguments]

    def variables(self, place: Place, present: Mapping[str, str]) -> dict[str, str]:
        """What a rank's environment gets on top of `present`, the environment of its host."""
        found = dict(self.environment)
        if self.devices and (visible := _visible(place, self.nodes[place.node].slots, {**present, **found})):
            found["CUDA_VISIBLE_DEVICES"] = visible
        if self.rendezvous:
            # torch would compare the address with the host's own name, which often leads to another one.
            found["PET_RDZV_CONF"] = ",".join(
                filter(None, (f"is_host={int(place.node == 0)}", found.get("PET_RDZV_CONF")))
            )
        if not self.once_per_node:
            found |= {
                "RANK": str(place.rank),
                "LOCAL_RANK": str(place.local_rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(place.local_size),
                "GROUP_RANK": str(place.node),
                "GROUP_WORLD_SIZE": str(len(self.nodes)),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port),
            }
        return found

    def cores_for(self, place: Place, available: tuple[int, ...]) -> tuple[int, ...] | None:
        """The cores that a rank is bound to; None where it may roam."""
        if not self.bind_cores:
            return None
        return cores_of(place.local_rank, place.local_size, self.cores or available, available)

    def log_file(self, place: Place) -> str | None:
        """Where a rank's output goes, if not to the console."""
        return None if self.log_dir is None else f"{self.log_dir}/{self.log_prefix}rank{place.rank}.log"

    def to_json(self) -> str:
        """On one line, for another host; what is as usual is left out."""
        usual = {each.name: each.default for each in fields(self)}
        found = {name: value for name, value in asdict(self).items() if value != usual[name] and value != {}}
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        found = json.loads(text)
        nodes = tuple(Node(node["host"], tuple(node["slots"])) for node in found.pop("nodes"))
        names = ("program", "arguments", "cores")
        lists: dict[str, Any] = {name: tuple(found.pop(name)) for name in names if name in found}
        return cls(nodes=nodes, **lists, **found)


def _visible(place: Place, slots: tuple[int, ...], present: Mapping[str, str]) -> str | None:
    """The GPUs of a host's slots. Slots count within what CUDA_VISIBLE_DEVICES already allows there."""
    allowed = present.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return ",".join(map(str, slots))
    names = [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    if not names:
        return None  # the user hides all GPUs: ranks run on the CPU
    if max(slots) >= len(names):
        raise WorldError(
            f"{place.host}: slot {max(slots)} is asked for, but CUDA_VISIBLE_DEVICES={allowed} leaves {len(names)} "
            "GPUs there; choose fewer slots, or unset it"
        )
    return ",".join(names[slot] for slot in slots)
