"""Profiles of runs on several ranks: what each sends, and how long it waits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait import Runner
from plait.config.model import LlamaConfig
from plait.models import build_model
from plait.profile.hook import Profile
from tests.communication_volume import data_traffic
from tests.multi.ranks import RankPool

SEQUENCE = 8
LOSS, NORM = 3 * 8, 8
"""Bytes that go around once a step: loss, count and stop flag; the norm, where ranks have parts."""


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    seq_len = SEQUENCE

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 32, (SEQUENCE + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def model_of(dim: int) -> dict[str, Any]:
    return {"type": "llama", "vocab_size": 32, "dim": dim, "layers": 2, "heads": 2, "seq_len": SEQUENCE}


def profiled(rank: int, size: int, folder: str, runs: dict[str, Any], dim: int, micro: int) -> dict[str, Any]:
    """Profile each of the runs; from rank 0 comes its report, from all what they were named in their traces."""
    found = {}
    for name, strategy in runs.items():
        work_dir = Path(folder) / name
        runner = Runner(
            model=model_of(dim),
            data=Rows(),
            strategy=strategy,
            train={"max_steps": 5},
            batch={"micro": 2, "accumulation": micro},
            profile={"start": 4, "steps": 2},
            work_dir=work_dir,
            checkpoint={"last": False},
            log={"console": "none", "sinks": []},
            plan="off",
            device="cpu",
        )
        runner.train()
        (hook,) = [hook for hook in runner.hooks.hooks if isinstance(hook, Profile)]
        trace = json.loads((work_dir / "profile" / f"trace-rank{rank}.json").read_text())
        named = {event["name"] for event in trace["traceEvents"]}
        assert (hook.report is not None) == (rank == 0)
        found[name] = named if hook.report is None else hook.report.as_json()
    return found


def all_reduced(size: float) -> float:
    return size  # around two ranks: twice one half


def test_two_ranks_of_any_stage_send_what_theory_says_and_every_millisecond_is_accounted_for(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    dim, micro = random.choice([16, 24]), random.choice([1, 2])
    print(f"dim {dim}, {micro} micro-batches")
    runs: dict[str, Any] = {f"zero{stage}": {"zero": stage} for stage in range(4)}
    reports, names = two_ranks.run(profiled, str(tmp_path), runs, dim, micro)
    with torch.device("meta"):
        shapes = [tuple(param.shape) for param in build_model(LlamaConfig(**model_of(dim))).parameters()]
    for stage in range(4):
        report = reports[f"zero{stage}"]
        theory = data_traffic(stage=stage, shapes=shapes, shards=2, micro_batches=micro)
        small = all_reduced(LOSS + (NORM if stage else 0))
        assert sum(row["sent"] for row in report["messages"]["rows"]) == theory + small
        assert [rank["sent"] for rank in report["ranks"]] == [theory + small] * 2
        assert report["messages"]["note"] == ""
        # A trace on the host does not tell how long a message from one rank to another was under way.
        assert all(row["ms"] > 0 for row in report["messages"]["rows"] if row["kind"] != "send")
        assert {row["axis"] for row in report["messages"]["rows"]} <= {"dp_shard", "dp_replicate"}
        for rank in report["ranks"]:
            assert sum(rank["kinds"].values()) == pytest.approx(rank["ms"])
            assert rank["kinds"]["communication"] > 0
        assert report["covered"] == pytest.approx(1.0, abs=0.5)
        assert report["counted_flops"] == pytest.approx(report["formula_flops"], rel=0.01)
        assert {f"phase: {phase}" for phase in ("forward", "backward", "reduce", "step")} <= names[f"zero{stage}"]
        assert "module: blocks.1.ffn" in names[f"zero{stage}"]


def test_a_pipeline_and_shared_layers_are_profiled_as_they_are(two_ranks: RankPool, tmp_path: Path) -> None:
    runs = {"pipeline": {"layout": {"pp": 2}}, "tensor": {"layout": {"tp": 2}}}
    reports, _ = two_ranks.run(profiled, str(tmp_path), runs, 16, 2)
    pipeline, tensor = reports["pipeline"], reports["tensor"]
    sent = {(row["kind"], row["axis"]): row for row in pipeline["messages"]["rows"]}
    assert sent["send", "pp"]["count"] == 2  # one stage hands two micro-batches on
    assert sent["send", "pp"]["bytes"] == 2 * SEQUENCE * 16 * 4
    assert {"forward", "backward", "step"} <= set(pipeline["time"]["phases"])
    assert "blocks.*.ffn" in {row["name"] for row in pipeline["modules"]}
    assert "tp" in {row["axis"] for row in tensor["messages"]["rows"]}
    for report in (pipeline, tensor):
        # Both ranks together do the whole model's arithmetic.
        assert report["counted_flops"] > max(rank["flops"] for rank in report["ranks"])
        assert sum(report["ranks"][0]["kinds"].values()) == pytest.approx(report["ranks"][0]["ms"])
