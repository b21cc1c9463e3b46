"""What another framework's launcher tells the processes that it starts."""

from __future__ import annotations

import os

_BEGINNING = "ACCELERATE_"
_ALWAYS = "MIXED_PRECISION"


def told_by_accelerate() -> dict[str, str]:
    """The variables of `accelerate launch`, without their common beginning; empty where something else has started us.

    It always names a mixed precision. Other variables of that name are set by Accelerate itself as well.
    """
    if _BEGINNING + _ALWAYS not in os.environ:
        return {}
    return {name.removeprefix(_BEGINNING): value for name, value in os.environ.items() if name.startswith(_BEGINNING)}
