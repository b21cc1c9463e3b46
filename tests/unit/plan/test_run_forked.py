"""What is done in a child of this process: its errors come back, whatever they are."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.refusals import missing

from plait.errors import ConfigError, Problem
from plait.plan.gate import run_forked


def test_the_answer_comes_back() -> None:
    assert run_forked(lambda: {"a": os.getpid()}, seconds=30.0) != {"a": os.getpid()}


def test_an_exception_that_nobody_expected_is_one_line_with_its_place() -> None:
    def fails() -> int:
        return {"a": 1}["the key"]

    reason = run_forked(fails, seconds=30.0)
    assert isinstance(reason, str)
    assert reason.startswith("KeyError: 'the key'")
    assert "\n" not in reason
    assert "in fails" in reason


def test_what_somebody_has_to_change_is_raised_here() -> None:
    def refuses() -> int:
        raise ConfigError(Problem("strategy.zero", "does not fit", "Write 3."))

    with pytest.raises(ConfigError) as error:
        run_forked(refuses, seconds=30.0)
    assert [problem.path for problem in error.value.problems] == ["strategy.zero"]


@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ["SIGKILL", "memory"]),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), ["SIGTERM"]),
        (lambda: os._exit(7), ["7"]),
        (lambda: time.sleep(60), ["1 s"]),
        (lambda: lambda: 1, ["pickle"]),
    ],
)
def test_a_child_that_does_not_answer_is_told_from_one_that_takes_long(ends: object, named: list[str]) -> None:
    reason = run_forked(ends, seconds=1.0)  # type: ignore[arg-type]
    assert isinstance(reason, str)
    assert not missing(reason, *named)
