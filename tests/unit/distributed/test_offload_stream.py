"""A model whose weights do not fit the device answers as if they did."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from plait.config import parse_sections
from plait.generate import sample
from plait.generate.streamed import build_streamed
from plait.models import build_model

TIERS: list[Literal["cpu", "nvme"]] = ["cpu", "nvme"]
MODEL = {"type": "llama", "vocab_size": 97, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq_len": 32}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tied", [False, True])
def test_streamed_weights_generate_the_same_text(tier: Literal["cpu", "nvme"], tied: bool, tmp_path: Path) -> None:
    config = parse_sections(model={**MODEL, "tie_embeddings": tied}).config
    assert config.model is not None
    whole = build_model(config.model)
    model, stream = build_streamed(config, torch.device("cpu"), tier=tier, folder=tmp_path)
    tensors = stream.tensors()
    assert tensors.keys() == dict(whole.named_parameters()).keys()
    for name, param in whole.named_parameters():
        tensors[name].copy_(param.detach())
    stream.filled()
    del tensors
    prompt = torch.randint(0, 97, (5,))
    expected = sample(whole, prompt, new_tokens=12, window=32, seed=7)
    assert torch.equal(sample(model, prompt, new_tokens=12, window=32, seed=7), expected)
    held = sum(param.nbytes for param in whole.parameters())
    blocks = sum(param.nbytes for block in whole.blocks for param in block.parameters())  # type: ignore[union-attr]
    assert stream.device_bytes() <= held - blocks // 2  # at most two of four blocks, once they are ahead
    assert list(tmp_path.iterdir()) == []
