"""Engines as somebody outside would write them."""

from __future__ import annotations

import sys
from pathlib import Path

from plait.engine import Preparation

sys.path.append(str(Path(__file__).parents[2] / "examples" / "plugin" / "src"))
from plait_example.engine import PlainDDP as DdpEngine


class NotAnEngine:
    """Declares a key that does not exist."""

    honours = ("strategy.zeroo",)


class OwnWay(DdpEngine):
    """One that no plan is near."""

    as_native = False


def makes_nothing(given: Preparation) -> None:
    """Returns no engine."""


makes_nothing.honours = ("*",)  # type: ignore[attr-defined]
