"""Commands that are started with closed standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, "a file that prints would be written into"
    file.write("mine")
    print("said", flush=True)
    os.write(1, b"said"), os.write(2, b"said")
"""


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_ranks_of_a_command_without_streams_print_into_nothing(tmp_path: Path, closed: tuple[int, ...]) -> None:
    script, written = tmp_path / "script.py", tmp_path / "file"
    script.write_text(SCRIPT)

    def prepare() -> None:
        for number in closed:
            os.close(number)

    command = [sys.executable, "-m", "plait", "launch", "--nproc_per_node", "1", str(script), str(written)]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=prepare, timeout=120, check=False)
    assert done.returncode == 0
    assert written.read_text() == "mine"
