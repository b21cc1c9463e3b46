"""What tests marked `real("…")` need of this machine, and why it is not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

VARIABLE = "PLAIT_TESTS_REQUIRE_REAL"
"""With `1`, a test whose program is absent fails: for machines on which all of them are to be installed."""
OF_THE_MACHINE = {"cgroup"}
"""What no package brings: always a reason to skip."""


@cache
def missing(name: str) -> str | None:
    """Why a test that needs this cannot run here; None where it can."""
    if name in _CHECKS:
        return _CHECKS[name]()
    return None if shutil.which(name) else f"{name} is not installed"


def require(item: pytest.Item) -> None:
    """Skip a test whose programs are not all here, or fail it where they must be."""
    names = [name for marker in item.iter_markers("real") for name in marker.args]
    for name in names:
        reason = missing(name)
        if reason is not None and name in OF_THE_MACHINE:
            pytest.skip(reason)
        if reason is not None:
            unavailable(reason)


def unavailable(reason: str) -> NoReturn:
    """End a test whose programs are here but do not work: a failure where they must, and else a skip."""
    if os.environ.get(VARIABLE) == "1":
        pytest.fail(f"{VARIABLE}=1, and {reason}", pytrace=False)
    pytest.skip(reason)


def _sshd() -> str | None:
    from tests.multi import hosts

    return hosts.missing()


def _slurm() -> str | None:
    from tests.multi import slurm

    return slurm.missing()


def _cgroup() -> str | None:
    """Control groups that limit memory, which this user may make."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        found = (root / "cgroup.subtree_control").read_text().split()
        if "memory" not in found:
            return "the memory controller is not given to control groups here"
    else:
        root = root / "memory"
    return None if os.access(root, os.W_OK) else f"no control groups can be made in {root}"


_CHECKS: dict[str, Callable[[], str | None]] = {"sshd": _sshd, "slurm": _slurm, "cgroup": _cgroup}
