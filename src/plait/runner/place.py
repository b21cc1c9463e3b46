"""The folder of a run, which one run at a time writes into."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from plait.config import RunConfig, to_yaml
from plait.errors import ConfigError, Problem
from plait.ops import write_whole

_MARK = ".running"
"""Who writes here now: host and process. Gone when the run has ended; without a lock, a kill has left it."""
_PATIENCE_S = 5.0
"""How long to wait for the lock: a process that was killed a moment ago has not let go of everything yet."""


class WorkDir:
    """`work_dir`, as rank 0 makes and holds it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._mark: TextIO | None = None

    def make(self) -> None:
        """Have it there, and be able to write to it. Raises `ConfigError` where that cannot be."""
        with self._writing():
            try_to_write(self.path)

    def take(self, config: RunConfig) -> None:
        """Hold it until `let_go`, and write `config.yaml`. Another run that writes here is a `ConfigError`.

        A lock belongs to the process and not to those that it forks, so it ends with rank 0, however that ends. Where
        the lock is another host's, it may be what a lost host has left, and is not waited for.
        """
        self.make()
        with self._writing():
            mark = (self.path / _MARK).open("a+", encoding="utf-8")
            try:
                _lock(mark)
            except (BlockingIOError, PermissionError):
                self._refuse(mark)
            except OSError:
                mark.close()  # a file system without locks
            else:
                mark.truncate(0)
                mark.write(f"{socket.gethostname()} {os.getpid()}")
                mark.flush()
                self._mark = mark
            write_whole(self.path / "config.yaml", to_yaml(config))

    def let_go(self) -> None:
        """Let others write here."""
        if self._mark is not None:
            (self.path / _MARK).unlink(missing_ok=True)
            self._mark.close()
            self._mark = None

    def _refuse(self, mark: TextIO) -> None:
        with mark:
            mark.seek(0)
            host, _, process = mark.read().partition(" ")
        if host == socket.gethostname():
            message = f"another run writes to {str(self.path)!r} now, process {process} of this machine"
            raise ConfigError(Problem("work_dir", message, "Wait for its end, stop it, or choose another `work_dir`."))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{str(self.path)!r} cannot be written to: {error.strerror}"
            raise ConfigError(Problem("work_dir", message, "Choose another one.")) from error


def try_to_write(folder: Path) -> None:
    """Make a folder, and find out by writing whether files can be written there. Raises `OSError` where not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()


def _lock(mark: TextIO) -> None:
    """Take the lock of a file, within `_PATIENCE_S`."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return
