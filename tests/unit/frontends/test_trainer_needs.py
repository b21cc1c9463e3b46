"""What PlaitTrainer needs besides Plait is told by the extra that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.refusals import missing

WITHOUT = """
import sys
sys.modules[{package!r}] = None  # what makes an import of it fail
from plait.frontends.transformers import PlaitTrainer
"""


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_missing_package_is_told_with_its_extra(package: str) -> None:
    # In a process of its own: another test may have loaded the package already.
    command = [sys.executable, "-c", WITHOUT.format(package=package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = done.stderr.splitlines()[-1]
    assert not missing(told, "MissingExtraError", "PlaitTrainer", package, "plait[trainer]")
