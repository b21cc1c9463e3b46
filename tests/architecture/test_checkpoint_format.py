"""The reader printed in docs/checkpoint-format.md reads real checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.toys import fit

from plait.checkpoint.convert.plait import PlaitSource

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["checkpoint-format.md", "zh-CN/checkpoint-format.md"])
def test_the_printed_reader_reads_every_tensor(tmp_path: Path, page: str) -> None:
    fit(0, 1, {"work_dir": tmp_path, "hooks": [{"type": "ema"}]})
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code.replace("runs/gpt", str(tmp_path)), scope)
    with PlaitSource(tmp_path) as source:
        assert set(source.entries) == set(scope["index"])
        for name in source.entries:
            assert torch.equal(scope["read"](name), source.read(name))
        kinds = {name.split(".")[0] for name in source.entries}
        generators = {name.split(".")[2] for name in source.entries if name.startswith("rng.")}
    table = "\n".join(line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `"))
    assert all(f"| `{kind}." in table for kind in kinds)
    assert all(f"`{generator}`" in table for generator in generators)
