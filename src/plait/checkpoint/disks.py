"""Which ranks see the same folder: one on a shared file system, one a node without it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.together import attempt, together
from plait.errors import CheckpointError
from plait.world import Channel, Ranks


@dataclass(frozen=True, slots=True)
class Disks:
    """Of the ranks that see the same folder, one is in the lead: it makes, names and removes what lies there."""

    lead: int
    """The leading rank of this rank's folder."""
    leads: tuple[int, ...]
    """All of them; one where the file system is shared."""
    rank: int

    @property
    def is_lead(self) -> bool:
        """Whether this rank is in the lead."""
        return self.rank == self.lead

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.leads) == 1


def find_disks(root: Path, channel: Channel, ranks: Ranks, *, node_local: bool) -> Disks:
    """Find out by looking, not by being told: a file that one node makes is seen by another, or it is not.

    Without `node_local`, folders that are not shared are an error. Every rank must call it.
    """
    if ranks.local_size == ranks.size:  # one machine, one file system
        return Disks(0, (0,), channel.rank)
    token = channel.broadcast(uuid.uuid4().hex)
    first = channel.all_gather(ranks.local_rank == 0)
    mine = root / f".seen-{token}-{channel.rank}"

    def show() -> None:
        root.mkdir(parents=True, exist_ok=True)
        mine.touch()

    together(channel, attempt(show) if first[channel.rank] else None, "the checkpoint folder cannot be used")
    try:
        seen = [rank for rank, is_first in enumerate(first) if is_first and (root / f".seen-{token}-{rank}").exists()]
        leads = channel.all_gather(seen[0] if seen else None)
    finally:
        mine.unlink(missing_ok=True)
    if None in leads:
        raise CheckpointError(
            f"rank {leads.index(None)} sees nothing of what its own node writes to {root}; use a folder of its node"
        )
    disks = Disks(leads[channel.rank], tuple(sorted(set(leads))), channel.rank)
    if not disks.shared and not node_local:
        where = "; ".join(f"ranks {[r for r, lead in enumerate(leads) if lead == each]}" for each in disks.leads)
        raise CheckpointError(
            f"{root} is not the same folder everywhere ({where} each see their own); put work_dir on a file system "
            "that all nodes share, or write `checkpoint.node_local: true`: each node then keeps its own shards"
        )
    return disks
