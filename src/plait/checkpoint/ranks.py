"""Work on files by all ranks, where one failure raises on all of them; and which ranks see the same folder."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from plait.distributed import Channel, Ranks
from plait.errors import CheckpointError, PlaitError

T = TypeVar("T")


def collective_call(channel: Channel, action: Callable[[], T] | None, what: str) -> T | None:
    """Call `action` and return its result; None on ranks that pass no action. Collective.

    If it fails on any rank, every rank raises the same `CheckpointError`: its message is `what`, then the errors of the
    failed ranks, with a traceback unless that is an `OSError` or a `PlaitError`.
    """
    result, failure = None, None
    try:
        result = None if action is None else action()
    except (OSError, PlaitError) as error:
        failure = f"{type(error).__name__}: {error}"
    except Exception as error:
        failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    if channel.any(failure is not None):
        failures = channel.all_gather(failure)
        reasons = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        raise CheckpointError(f"{what}.\n  " + "\n  ".join(reasons))
    return result


# Which ranks see the same folder: all on a shared file system, those of one node otherwise.


@dataclass(frozen=True, slots=True)
class Disks:
    """Which ranks see the same checkpoint folder. One of these leads: it makes, renames and removes folders there."""

    lead: int
    """The rank that leads those that see this rank's folder."""
    leads: tuple[int, ...]
    """The leading ranks of all folders; only one if the file system is shared."""
    rank: int

    @property
    def is_lead(self) -> bool:
        """Whether this rank leads."""
        return self.rank == self.lead

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.leads) == 1


def find_disks(root: Path, channel: Channel, ranks: Ranks, *, node_local: bool) -> Disks:
    """Return which ranks share the folder, found with a file that each node makes and the others look for. Collective.

    Without `node_local`, raise a `CheckpointError` if not all ranks see the same folder.
    """
    if ranks.local_size == ranks.size:  # one machine, one file system
        return Disks(0, (0,), channel.rank)
    token = channel.broadcast(uuid.uuid4().hex)
    first = channel.all_gather(ranks.local_rank == 0)
    mine = root / f".seen-{token}-{channel.rank}"

    def show() -> None:
        root.mkdir(parents=True, exist_ok=True)
        mine.touch()

    collective_call(channel, show if first[channel.rank] else None, "the checkpoint folder cannot be used")
    try:
        seen = [rank for rank, is_first in enumerate(first) if is_first and (root / f".seen-{token}-{rank}").exists()]
        leads = channel.all_gather(seen[0] if seen else None)
    finally:
        mine.unlink(missing_ok=True)
    if None in leads:
        raise CheckpointError(
            f"rank {leads.index(None)} does not see what its own node writes to {root}; use a folder of its node"
        )
    disks = Disks(leads[channel.rank], tuple(sorted(set(leads))), channel.rank)
    if not disks.shared and not node_local:
        where = "; ".join(f"ranks {[r for r, lead in enumerate(leads) if lead == leader]}" for leader in disks.leads)
        raise CheckpointError(
            f"{root} is not the same folder everywhere ({where} each see their own); put work_dir on a file system "
            "that all nodes share, or write `checkpoint.node_local: true`: each node then keeps its own shards"
        )
    return disks
