"""What ranks of this host print, passed on as it comes, and the last lines of each kept."""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, cast

from plait.launch.records import Record

_CHUNK = 1 << 16


class Relay:
    """Reads only when it is asked to `pump`: there is no thread, so that ranks can be started again at any time."""

    def __init__(self) -> None:
        self._waiting = selectors.DefaultSelector()
        self._rests: dict[int, bytes] = {}

    def open(self, outputs: Iterable[tuple[Record, str, IO[bytes]]]) -> None:
        """Begin with these pipes: whose, `out` or `err`, and the pipe."""
        for record, name, pipe in outputs:
            os.set_blocking(pipe.fileno(), False)
            self._waiting.register(pipe, selectors.EVENT_READ, (record, name))

    def pump(self, seconds: float) -> bool:
        """Pass on what comes within that time; returns early, and true, once something has."""
        if not self._waiting.get_map():
            time.sleep(seconds)
            return False
        ready = self._waiting.select(seconds)
        for key, _ in ready:
            record, name = key.data
            data = os.read(key.fd, _CHUNK)
            if not data:
                self._end(key)
                continue
            _put(name, data)
            *lines, self._rests[key.fd] = (self._rests.get(key.fd, b"") + data).split(b"\n")
            record.tail.extend(line.decode(errors="replace") for line in lines)
        return bool(ready)

    def close(self) -> None:
        """Pass on what is left. A worker that outlives its rank may hold a pipe open: that is not waited for."""
        while self.pump(0.0):
            pass
        for key in list(self._waiting.get_map().values()):
            self._end(key)
        self._waiting.close()

    def _end(self, key: selectors.SelectorKey) -> None:
        pipe = cast(IO[bytes], self._waiting.unregister(key.fileobj).fileobj)
        pipe.close()
        if rest := self._rests.pop(key.fd, b""):
            key.data[0].tail.append(rest.decode(errors="replace"))


def _put(name: str, data: bytes) -> None:
    target = sys.stdout if name == "out" else sys.stderr
    with suppress(OSError, ValueError):  # nobody listens any more: the ranks go on all the same
        target.flush()
        target.buffer.write(data)
        target.buffer.flush()
