"""Loss curves that must not move unless somebody means them to; run as a script, it writes them anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native

GOLDEN = Path(__file__).with_name("losses.json")

RUNS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"type": "llama", "vocab_size": 97, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}},
    "llama-bf16": {
        "model": {"type": "llama", "vocab_size": 97, "dim": 32, "layers": 2, "heads": 4, "tie_embeddings": True},
        "precision": "bf16",
    },
    "gpt": {"model": {"type": "gpt", "vocab_size": 97, "dim": 32, "layers": 2, "heads": 4, "seq_len": 16}},
}


def losses(sections: dict[str, Any]) -> list[float]:
    config = parse_sections(seed=11, optim={"type": "AdamW", "lr": 3e-3}, device="cpu", **sections).config
    engine = prepare_native(Preparation(config, open_world(config)))
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(10):
        ids = torch.randint(0, 97, (4, 17), generator=generator) // 3
        result.append(engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}]).loss)
    return result


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_curve_is_the_golden_one(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert losses(RUNS[name]) == pytest.approx(golden[name], rel=2e-3 if "bf16" in name else 1e-5)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(sections) for name, sections in RUNS.items()}, indent=1) + "\n")
