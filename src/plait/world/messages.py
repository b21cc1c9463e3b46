"""Waiting for messages between two ranks, so that a rank which does is seen to wait.

[Note: messages that nobody records]
torch's flight recorder knows the collectives of every backend, but messages between two ranks only where NCCL carries
them. A rank that waits for one over gloo would seem to compute, and a run that hangs to be busy. So whoever sends
messages of its own waits for them here, and leaves word for as long as that takes: which is two stores into a table,
one for the process as the recorder is, and a row for each thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

_waits: dict[int, tuple[float, str]] = {}
"""By thread: since when it has waited, and for what."""


def wait_for(works: Iterable[dist.Work | None], what: str) -> None:
    """Wait until all of these messages were sent or have come; `what` they are, in a few words."""
    thread = threading.get_ident()
    _waits[thread] = time.time(), what
    try:
        for work in works:
            assert work is not None
            work.wait()
    finally:
        del _waits[thread]


def longest_wait() -> tuple[float, str] | None:
    """Of all threads, who has waited longest: since when, and for what. None where nobody waits."""
    return min(_waits.copy().values(), default=None)
