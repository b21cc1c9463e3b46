"""Where a program is on this host: what a shell over ssh has on its path is less than what a terminal has."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find_program(name: str, *, path: str | None = None, folder: str | None = None) -> str | None:
    """The path of a program; None where there is none.

    A bare name is looked for on `path` (absent: this process's), then beside this Python, where `plait` itself and
    other commands of its environment are. A name with a slash counts from `folder`.
    """
    if "/" in name:
        found = Path(folder or os.curdir, name)
        return name if found.is_file() and os.access(found, os.X_OK) else None
    return shutil.which(name, path=path) or shutil.which(name, path=str(Path(sys.executable).parent))


def absent(name: str) -> str:
    """What to say of a program that is not there."""
    return (
        f"there is no program {name!r}, neither on the path nor beside {sys.executable}; give its whole path, install "
        "it there, or leave out --no_python if it is a Python script"
    )
