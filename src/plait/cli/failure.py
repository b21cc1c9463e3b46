"""How an error reaches the user: once, however many ranks met it."""

from __future__ import annotations

import os
import sys
import time

from plait.errors import ConfigError, PlaitError


def tell(error: PlaitError) -> None:
    """Print the error in plain words. All ranks meet a wrong setting alike, so rank 0 speaks for them."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        if isinstance(error, ConfigError):
            return
        # Rank 0 most likely met the same thing and says so first; if it did not, this rank is the one to hear.
        time.sleep(1.0)
    prefix = "plait: " if rank == 0 else f"plait: rank {rank}: "
    print(f"{prefix}{error}", file=sys.stderr, flush=True)
