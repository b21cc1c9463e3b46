"""Modules of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path


def import_from_here() -> None:
    """Let `target: my_module:MyModel` find modules in the current folder, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
