"""An engine that nobody holds any more gives its memory back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_native

MODEL = {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 16}


def trained_weights(strategy: dict[str, Any], precision: Any) -> list[weakref.ref[torch.Tensor]]:
    """The weights of an engine after a step, and nothing else of it."""
    config = parse_sections(model=MODEL, strategy=strategy, precision=precision, device="cpu").config
    engine = prepare_native(Preparation(config, open_world(config), log=lambda _: None))
    ids = torch.randint(0, 64, (2, 17))
    engine.train_step([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]}] * 2)
    return [weakref.ref(param) for param in engine.model.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "strategy", [{}, {"recompute": "full", "offload": {"activations": "all"}}, {"offload": "cpu"}], ids=str
)
def test_no_hook_keeps_the_weights(strategy: dict[str, Any], precision: str) -> None:
    weights = trained_weights(strategy, precision)
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)
