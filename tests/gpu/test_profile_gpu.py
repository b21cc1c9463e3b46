"""A profile of a real device: kernels by kind, module and phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait import Runner
from plait.profile.hook import Profile
from plait.profile.report import Report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEQUENCE = 256
MODEL = {"type": "llama", "vocab_size": 512, "dim": 512, "layers": 3, "heads": 8, "seq_len": SEQUENCE}


class Packed(Dataset[dict[str, Tensor]]):
    """Random tokens, as one document a row or as several."""

    seq_len = SEQUENCE

    def __init__(self, documents: bool) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 512, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        row = {"input_ids": ids[:-1], "labels": ids[1:]}
        if self._documents:
            place = torch.arange(SEQUENCE)
            row |= {"document_ids": place // 100, "positions": place % 100}
        return row


def profiled(folder: Path, *, documents: bool = False, **sections: Any) -> Report:
    settings: dict[str, Any] = {
        "model": MODEL,
        "data": Packed(documents),
        "train": {"max_steps": 12},
        "batch": {"total": 16, "micro": 8},
        "precision": "bf16",
        "profile": {"start": 10, "steps": 3},
        "work_dir": folder,
        "checkpoint": {"last": False},
        "log": {"console": "none", "sinks": []},
        "plan": "off",
        "device": "cuda",
    }
    runner = Runner(**{**settings, **sections})
    runner.train()
    (hook,) = [hook for hook in runner.hooks.hooks if isinstance(hook, Profile)]
    assert hook.report is not None
    return hook.report


WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "recompute": {"recompute": "full"},
    "compiled": {"compile": {"scope": "block"}},
    "compiled whole": {"compile": {"scope": "model"}},
    "offloaded": {"offload": {"optimizer": "cpu"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_kernels_have_kinds_that_add_up_to_the_step(tmp_path: Path, way: str) -> None:
    report = profiled(tmp_path, strategy=WAYS[way])
    kinds = report.time.kinds
    print(way, {kind: round(use.ms, 3) for kind, use in kinds.items()}, report.summary(), report.mfu, report.hfu)
    assert sum(use.ms for use in kinds.values()) == pytest.approx(report.time.ms)
    assert report.covered == pytest.approx(1.0, abs=0.2)
    assert {"matmul", "attention", "elementwise", "idle"} <= set(kinds)
    if way != "offloaded":
        assert kinds["optimizer"].ms > 0
    assert report.memory.measured >= report.memory.by_owner["parameters"]
    assert report.formula_flops is not None
    if way != "recompute":
        assert report.counted_flops == pytest.approx(report.formula_flops, rel=0.05)
    names = {row.name: row for row in report.modules}
    if way == "eager":
        assert names["blocks.*.ffn.up"].forward_ms > 0
        assert names["blocks.*.ffn.up"].backward_ms > names["blocks.*.ffn.up"].forward_ms
    if way == "recompute":
        block, last = names["blocks.*"].flops, names["blocks.*.ffn.down"].flops
        assert block.again == block.forward - last.forward
    trace = {
        event["name"] for event in json.loads((tmp_path / "profile" / "trace-rank0.json").read_text())["traceEvents"]
    }
    assert {"phase: forward", "phase: backward", "phase: step", "data loading"} <= trace


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_over_documents_is_counted_and_runs_as_ever(tmp_path: Path, compiled: bool) -> None:
    strategy = {"compile": {"scope": "block"}} if compiled else {}
    report = profiled(tmp_path, documents=True, strategy=strategy)
    attention = next(row for row in report.modules if row.name == "blocks.*.attention")
    products = 4 * 3 * 2 * 16 * SEQUENCE * 512 * 512
    assert attention.flops.forward > products  # its four layers, and the mixing of tokens on top
    assert report.time.kinds["attention"].ms > 0
