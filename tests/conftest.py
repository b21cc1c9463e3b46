"""Lets every test import `tests` as a package, from whichever folder pytest was given.

A run plans itself first, which takes a second. Tests of other things do without; those marked `planned` do not.
A run seeds `random` and torch, and would leave the next test drawing the same "fresh" inputs in every worker, or others
with other tests before it: each test starts from a seed of its own, which a failure shows and `--draw` repeats.
Torch computes on one thread, here and in what a test starts: at the end of each operation its threads wait for one
another at full speed, and on cores that other tests need as well that takes longer than the work.
"""

from __future__ import annotations

import os
import random
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is loaded

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started with `nohup` or `&`. What tests start would ignore it too, and some tests interrupt what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.real import require

    require(item)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", type=int, metavar="SEED", help="draw the random inputs of a test that printed this")


@pytest.fixture(autouse=True)
def _drawn_anew(request: pytest.FixtureRequest) -> None:
    import torch  # not before its number of threads is set

    given: int | None = request.config.getoption("--draw")
    seed = random.SystemRandom().randrange(2**32) if given is None else given
    print(f"random inputs: --draw {seed}")
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _unplanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("planned") is None:
        monkeypatch.setattr("plait.runner.forecast.Foresight.look", lambda *_: None)
