"""Whole weights are gathered where they fit, and only there."""

from __future__ import annotations

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_manual
from plait.generate import HybridEngine, Sampling
from plait.generate import hybrid as room
from plait.models import build_model, preset


def test_the_cache_takes_what_is_predicted() -> None:
    model = build_model(preset("llama", "tiny"))  # 2 layers, 2 of 4 heads for keys and values, 16 wide
    assert room.cache_bytes(model, rows=3, tokens=10, dtype=torch.bfloat16) == 2 * 2 * (2 * 16) * 3 * 10 * 2


def test_a_policy_that_has_no_room_for_a_copy_writes_as_it_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = preset("llama", "tiny").model_dump()
    config = parse_sections(model=sizes, device="cpu").config
    engine = prepare_manual(Preparation(config, open_world(config), model=None, log=lambda _line: None))
    said: list[str] = []
    hybrid = HybridEngine(engine, config, log=said.append)
    roomy = hybrid.generate([[1, 2], [3]], Sampling(6))
    assert said == []
    held = sum(param.numel() for param in engine.model.parameters()) * 4
    monkeypatch.setattr(room, "free_bytes", lambda _world: held)  # no room for the cache beside it
    assert [each.tokens for each in hybrid.generate([[1, 2], [3]], Sampling(6))] == [each.tokens for each in roomy]
    assert len(said) == 1
    assert "GiB" in said[0]
