"""Places where UTF-8 is not spoken: a console in another encoding, a locale that has ASCII alone."""

from __future__ import annotations

import codecs
import io
import os
import sys


def speak_utf8() -> None:
    """Start over in Python's UTF-8 mode where the locale has ASCII alone: no Chinese name of a file could be opened."""
    if _is(sys.getfilesystemencoding(), "ascii"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def spell_what_can_be() -> None:
    """Let the console show `?` for what its encoding lacks, rather than end the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape" if _is(sys.stdout.encoding, "utf-8") else "replace")
    if isinstance(sys.stdin, io.TextIOWrapper) and _is(sys.stdin.encoding, "ascii"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # which ASCII is a part of


def _is(encoding: str, name: str) -> bool:
    return codecs.lookup(encoding).name == name
