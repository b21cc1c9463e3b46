"""Lets every test import `tests` as a package, from whichever folder pytest was given.

A run plans itself first, which takes a second. Tests of other things do without; those marked `planned` do not.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unplanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("planned") is None:
        monkeypatch.setattr("plait.runner.forecast.Foresight.look", lambda *_: None)
