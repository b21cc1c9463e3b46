"""`import plait.config` is cheap: no torch, and no reader before there is something to read."""

from __future__ import annotations

import subprocess
import sys

import pytest

import plait.config

PROBE = "import sys, plait.config; print(*sorted(set(sys.argv[1:]) & set(sys.modules)))"


@pytest.mark.parametrize("module", ["torch", "numpy", "yaml", "tomllib", "difflib", "plait.config.dialect"])
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


def test_the_public_names():
    assert plait.config.__all__ == [
        "Layout",
        "Parsed",
        "ResolvedBatch",
        "RunConfig",
        "check",
        "describe",
        "parse",
        "parse_sections",
        "parse_stored",
        "resolve_batch",
        "resolve_layout",
        "to_dict",
        "to_yaml",
    ]
    assert all(hasattr(plait.config, name) for name in plait.config.__all__)
