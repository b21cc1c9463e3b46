"""What users may rely on."""

from __future__ import annotations

import subprocess
import sys

import plait


def test_the_public_names_are_these() -> None:
    assert sorted(plait.__all__) == ["LossTerm", "Runner", "__version__", "errors", "prepare"]
    for name in plait.__all__:
        assert getattr(plait, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(plait, "Trainer")


def test_importing_plait_loads_neither_torch_nor_pydantic() -> None:
    code = "import sys, plait; print([m for m in ('torch', 'pydantic', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
