"""What reads a run description is cheap to import: no torch, and no reader before there is something to read."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = (
    "import sys; from plait.config import RunConfig, check, describe, parse, resolve_layout\n"
    "print(*sorted(set(sys.argv[1:]) & set(sys.modules)))"
)


@pytest.mark.parametrize("module", ["torch", "numpy", "yaml", "tomllib", "difflib", "plait.config.yaml_io"])
def test_importing_config_does_not_import(module):
    done = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_whole_parse_and_check_needs_no_torch():
    code = (
        "import sys; from plait.config import parse, check, to_yaml\n"
        "c = parse({'strategy': 'zero3'}, ['optim.lr=1e-3']).config; check(c, has_val=False, require_length=False)\n"
        "to_yaml(c); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
