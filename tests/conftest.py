"""Lets every test import `tests` as a package, from whichever folder pytest was given.

A run plans itself first, which takes a second. Tests of other things do without; those marked `planned` do not.
A run seeds `random` as well, for its users' data sets, and would leave the next test drawing the same "fresh" inputs
in every worker: each test starts from a seed of its own, which a failure shows and `--draw` repeats.
"""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", type=int, metavar="SEED", help="draw the random inputs of a test that printed this")


@pytest.fixture(autouse=True)
def _drawn_anew(request: pytest.FixtureRequest) -> None:
    given: int | None = request.config.getoption("--draw")
    seed = random.SystemRandom().randrange(2**32) if given is None else given
    print(f"random inputs: --draw {seed}")
    random.seed(seed)


@pytest.fixture(autouse=True)
def _unplanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("planned") is None:
        monkeypatch.setattr("plait.runner.forecast.Foresight.look", lambda *_: None)
