"""Work of which every rank does its share: if one of them fails, all raise the same error."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from plait.errors import CheckpointError, PlaitError
from plait.world import Channel


def attempt(action: Callable[[], Any]) -> str | None:
    """Do something; the reason if it fails, with its traceback where it is neither the disk's nor the user's doing."""
    try:
        action()
    except (OSError, PlaitError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return None


def together(channel: Channel, failure: str | None, what: str) -> None:
    """Raise on every rank if one has a failure to tell. Every rank must call it."""
    if not channel.any(failure is not None):
        return
    told = [f"rank {rank}: {text}" for rank, text in enumerate(channel.all_gather(failure)) if text is not None]
    raise CheckpointError(f"{what}.\n  " + "\n  ".join(told))
