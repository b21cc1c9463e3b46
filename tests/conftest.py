"""Lets every test import `tests` as a package, from whichever folder pytest was given.

A run plans itself first, which takes a second. Tests of other things do without; those marked `planned` do not.

Random inputs come from one seed for the whole session, mixed with the name of the test or of the fixture that several
tests share, so that a test draws the same inputs alone and beside others. The seed is fixed: the same tests give the
same answer twice. `--fresh` draws a new one (`make test-all`), the first lines of the output name it, and `--draw SEED`
repeats that session, Hypothesis and the fuzz included.

Torch computes on one thread, here and in what a test starts: at the end of each operation its threads wait for one
another at full speed, and on cores that other tests need as well that takes longer than the work.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is loaded

SEED = 20261119

# How long an example takes says more of the machine than of the code. Failures of earlier sessions are not looked up:
# they would make a second answer differ from the first. Where Hypothesis finds itself on a CI machine, it draws by the
# name of the test and no seed has an effect, unless it is told.
settings.register_profile(
    "plait", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None, derandomize=False
)
settings.load_profile("plait")

# Hypothesis also draws from the constants of all modules that happen to be loaded, which differ with what ran before.
providers._get_local_constants = Constants

# Started with `nohup` or `&`, signals are ignored. What tests start would ignore them too, and some tests send them.
_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for _number, _handler in _HANDLERS.items():
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    from tests.real import require

    require(item)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fresh", action="store_true", help="draw random inputs anew, and run the long versions of tests")
    parser.addoption("--draw", type=int, metavar="SEED", help="draw the random inputs of a session that printed this")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The workers of xdist are given the options as they stand after this.
    if config.option.draw is None:
        config.option.draw = random.SystemRandom().randrange(2**31) if config.option.fresh else SEED
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.draw)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --draw {config.option.draw}"


def _draw_from(name: str) -> None:
    import numpy as np
    import torch  # not before its number of threads is set

    seed = zlib.crc32(name.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    # What several tests share is made before the first of them, whichever that is in this session.
    if fixturedef.scope != "function":
        _draw_from(f"{request.config.option.draw} {fixturedef.baseid} {fixturedef.argname} {request.param_index}")


@pytest.fixture(autouse=True)
def _drawn(request: pytest.FixtureRequest) -> None:
    _draw_from(f"{request.config.option.draw} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def _unplanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("planned") is None:
        monkeypatch.setattr("plait.trainer.memory_plan.MemoryPlan.make", lambda *_: None)


@pytest.fixture(autouse=True)
def _no_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group that a test leaves behind makes others fail that come later in the same process."""
    torch = sys.modules.get("torch")
    before = torch is not None and torch.distributed.is_initialized()
    yield
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if not before and dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail(f"{request.node.nodeid} left its process group open")
