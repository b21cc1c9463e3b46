"""Random inputs of tests come from the seed of the session alone, whichever tests run beside them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import random
import numpy, pytest, torch
from hypothesis import given, strategies
from tests.unit.fuzz.mutate import draws

def drawn():
    return random.random(), numpy.random.random(), torch.rand(()).item()

@pytest.fixture(scope="session")
def shared():
    return drawn()

def test_first(shared):
    import own_constants
    print("first", drawn())

def test_second(request, shared):
    print("second", shared, drawn(), [(name, found.random()) for name, found in draws(request, "kind", 2, 3)])

seen = []

@given(strategies.integers())
def test_third(number):
    seen.append(number)

def test_fourth():
    print("fourth", seen)
"""


def inputs(folder: Path, *words: str) -> dict[str, str]:
    """What the tests printed that were run."""
    (folder / "test_drawing.py").write_text(TESTS)
    (folder / "own_constants.py").write_text("\n".join(f"N{number} = {number**5}" for number in range(99)))
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT} .\ntimeout = 100\n")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(re.findall(r"(first|second|fourth|random inputs: --draw) (.+)", ended.stdout))


SIGNALS = """
import signal, subprocess, sys

def test_signals():
    code = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 15)))"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert started.stdout == "False False False\\n"
"""


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def test_a_session_that_is_started_with_ignored_signals_has_them(tmp_path: Path) -> None:
    """As `nohup` and `&` start it; what tests start can be interrupted, too."""
    (tmp_path / "test_signals.py").write_text(SIGNALS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", "."]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        preexec_fn=ignore_signals,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_what_is_drawn_depends_on_the_seed_of_the_session_alone(tmp_path: Path) -> None:
    words = ("-k", "second or third or fourth")
    whole, alone = inputs(tmp_path), inputs(tmp_path, *words)
    del whole["first"]
    assert whole == alone
    fresh = inputs(tmp_path, "--fresh", *words)
    assert [key for key in alone if fresh[key] == alone[key]] == []
    assert inputs(tmp_path, "--fresh", "--draw", fresh["random inputs: --draw"], *words) == fresh
