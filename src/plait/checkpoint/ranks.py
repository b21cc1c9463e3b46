"""Work of which every rank does its share: if one of them fails, all raise the same error."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.distributed import Channel, Ranks
from plait.errors import CheckpointError, PlaitError


def attempt(action: Callable[[], Any]) -> str | None:
    """Do something; the reason if it fails, with its traceback where it is neither the disk's nor the user's doing."""
    try:
        action()
    except (OSError, PlaitError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return None


def raise_on_all_ranks(channel: Channel, failure: str | None, what: str) -> None:
    """Raise on every rank if one has a failure to tell. Every rank must call it."""
    if not channel.any(failure is not None):
        return
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(channel.all_gather(failure)) if text is not None]
    raise CheckpointError(f"{what}.\n  " + "\n  ".join(reasons))


# Which ranks see the same folder: one on a shared file system, one a node without it.


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

    raise_on_all_ranks(channel, attempt(show) if first[channel.rank] else None, "the checkpoint folder cannot be used")
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
        where = "; ".join(f"ranks {[r for r, lead in enumerate(leads) if lead == leader]}" for leader in disks.leads)
        raise CheckpointError(
            f"{root} is not the same folder everywhere ({where} each see their own); put work_dir on a file system "
            "that all nodes share, or write `checkpoint.node_local: true`: each node then keeps its own shards"
        )
    return disks
