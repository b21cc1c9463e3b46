"""Standard streams that whoever started the command has closed, as some daemons and `>&-` do."""

from __future__ import annotations

import os
import sys


def open_what_is_closed() -> None:
    """Let a stream that is missing lead nowhere: the next file that is opened would be taken for it otherwise.

    Ranks inherit it, so that what they print does not end up in such a file either.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))
