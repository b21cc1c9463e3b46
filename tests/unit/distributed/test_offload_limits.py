"""The limits on weights that live on the host: how much comes early, how much is here at a time, what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.offload.params import ParamStream
from plait.engine import Preparation, prepare_native

MODEL = {"type": "llama", "vocab_size": 64, "dim": 32, "layers": 6, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
BLOCK = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
ROOT = 2 * 64 * 32 + 32


def most_blocks_here(monkeypatch: pytest.MonkeyPatch, **limits: int) -> float:
    """How many blocks' weights have memory at the same time, at most, once the order of units is known."""
    offload: dict[str, Any] = {"optimizer": "cpu", "params": "cpu", "persistent_params": 0, **limits}
    config = parse_sections(
        model={**MODEL, "seq_len": 16}, strategy={"zero": 3, "offload": offload}, device="cpu"
    ).config
    found = [0]
    bring = ParamStream._copy_to_device

    def brought(stream: ParamStream, group: Any) -> None:
        bring(stream, group)
        blocks = [each for each in stream._groups if each.numel == BLOCK and each.on_device]
        found.append(len(blocks))

    with open_world(config) as world:
        engine = prepare_native(Preparation(config, world, log=lambda _: None))
        ids = torch.randint(0, 64, (2, 17))
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        engine.train_step([batch])
        with monkeypatch.context() as patch:
            patch.setattr(ParamStream, "_copy_to_device", brought)
            engine.train_step([batch])
    return max(found)


def test_weights_come_early_as_far_as_the_limits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = 10**9
    assert most_blocks_here(monkeypatch, prefetch_params=0, live_params=plenty) == 1
    assert most_blocks_here(monkeypatch, prefetch_params=1, live_params=plenty) == 2  # the next one in any case
    assert most_blocks_here(monkeypatch, prefetch_params=2 * BLOCK, live_params=plenty) == 3
    assert most_blocks_here(monkeypatch, prefetch_params=plenty, live_params=ROOT + 2 * BLOCK) <= 3
    assert most_blocks_here(monkeypatch, prefetch_params=plenty, live_params=plenty) > 3


def test_small_units_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_blocks_here(monkeypatch, persistent_params=BLOCK + 1) == 0  # they are here, and never brought
    assert most_blocks_here(monkeypatch, persistent_params=BLOCK) > 0
