"""One console for many ranks: whole lines, each with who said it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from plait.launch.records import Record

_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
_LONGEST = 1 << 16
"""A line may be so long before it is shown in parts."""


class Console:
    """Shows what ranks of several hosts print, and keeps the last lines of each in its record."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._rests: dict[tuple[int, str], bytes] = {}
        self._records = {record.place.rank: record for record in records}

    def write(self, record: Record, stream: str, data: bytes) -> None:
        """A rank printed something. Shown as far as lines are complete; `\\r`, as bars have it, ends one too."""
        key = (record.place.rank, stream)
        *lines, rest = _LINE_END.split(self._rests.pop(key, b"") + data)
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest + b"\n"], b""
        for line in lines:
            self._show(record, stream, line)
        if rest:
            self._rests[key] = rest

    def other(self, host: str, line: bytes) -> None:
        """The connection to a host said something, not a rank."""
        _put("err", f"{host}: ".encode() + line)

    def flush(self) -> None:
        """Show what has no line end yet, and will get none."""
        for (rank, stream), rest in self._rests.items():
            self._show(self._records[rank], stream, rest + b"\n")
        self._rests.clear()

    def _show(self, record: Record, stream: str, line: bytes) -> None:
        record.tail.append(line.decode(errors="replace").rstrip("\r\n"))
        _put(stream, f"{record.place.host}[{record.place.rank}]: ".encode() + line)


def _put(stream: str, line: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.buffer.write(line)
    target.flush()
