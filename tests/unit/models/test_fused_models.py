"""Models with norms, gates and rotations exchanged: the same answers and gradients, under the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plait.config.model import HFConfig, LlamaConfig, MoeConfig
from plait.models import build_model
from plait.models.fused import fuse

SMALL: dict[str, Any] = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
HF: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def same_training(plain: nn.Module, fused: nn.Module) -> None:
    tokens = torch.randint(50, (2, 9))
    losses = [model(tokens, tokens) for model in (plain, fused)]
    torch.testing.assert_close(losses[1].sum, losses[0].sum)
    for loss in losses:
        loss.sum.backward()
    ours, theirs = (dict(model.named_parameters()) for model in (fused, plain))
    assert list(ours) == list(theirs)
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name].grad, param.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), MoeConfig(**SMALL, moe_every=2)], ids=lambda c: c.type)
def test_own_models_train_as_before(config: Any) -> None:
    model = build_model(config)
    fused = copy.deepcopy(model)
    assert fuse(fused) == {"norms": 5, "gates": 2 if config.type == "llama" else 1, "rotations": 2}
    same_training(model, fused)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_of_transformers_train_as_before_and_nobody_elses_change(family: str) -> None:
    pytest.importorskip("transformers")
    own = {"head_dim": 8} if family == "qwen3" else {}
    model = build_model(HFConfig(config={"model_type": family, **HF, **own}))
    fused = copy.deepcopy(model)
    norms = 9 if family == "qwen3" else 5  # it norms queries and keys as well
    assert fuse(fused) == {"norms": norms, "gates": 2, "rotations": 2}
    same_training(model, fused)
    assert {type(m).__name__ for m in fused.modules()} == {type(m).__name__ for m in model.modules()}
    assert not any(type(m) in map(type, fused.modules()) for m in model.modules() if "RMSNorm" in type(m).__name__)


def test_what_is_not_recognised_stays() -> None:
    pytest.importorskip("transformers")
    gelu = build_model(HFConfig(config={"model_type": "llama", **HF, "hidden_act": "gelu"}))
    assert "gates" not in fuse(gelu)
    assert fuse(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm((4, 4)))) == {}
