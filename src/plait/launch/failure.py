"""How an error reaches the user: once, however many ranks met it.

A rank that `run_ranks` started leaves its message in a folder, and the launcher, who knows when all are gone,
says it. A rank that somebody else started says it itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from plait.errors import ConfigError, PlaitError
from plait.spec.beat import FOLDER_VARIABLE


def tell(error: PlaitError) -> None:
    """Pass the error on in plain words, or print it."""
    rank = int(os.environ.get("RANK", "0"))
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None and Path(folder).is_dir():
        with suppress(OSError):  # full, most likely, which may be what the error is about: then it is said here
            Path(folder, str(rank)).write_text(str(error), encoding="utf-8")
            return
    if rank != 0:
        if isinstance(error, ConfigError):
            return  # all ranks meet a wrong setting alike, and rank 0 speaks for them
        # Rank 0 most likely met the same thing and says so first; if it did not, this rank is the one to hear.
        time.sleep(1.0)
    print(f"plait: {error}" if rank == 0 else f"plait: rank {rank}: {error}", file=sys.stderr, flush=True)


class Messages:
    """What the ranks have to say, while it is open."""

    def __enter__(self) -> Messages:
        self._folder = tempfile.TemporaryDirectory(prefix="plait-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Where ranks leave messages, heartbeats and stacks."""
        return Path(self._folder.name)

    @property
    def environment(self) -> dict[str, str]:
        """What a rank must find in its environment. torch's flight recorder tells the heartbeat of collectives."""
        return {
            FOLDER_VARIABLE: self._folder.name,
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "16"),
        }

    def raw(self) -> dict[int, str]:
        """By rank, the message that it left."""
        found = (path for path in Path(self._folder.name).iterdir() if path.name.isdecimal())
        paths = sorted(found, key=lambda path: int(path.name))
        return {int(path.name): path.read_text(encoding="utf-8") for path in paths}


def merged(messages: Mapping[int, str]) -> list[str]:
    """Each message once, with the ranks that left it where not all said the same."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(messages.items()):
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return list(ranks)
    return [f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()]
