"""Models with norms, gates and rotations exchanged: the same answers and gradients, under the same names."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from plait.config.model import HFConfig, LlamaConfig, MoeConfig
from plait.kernels.linears import bypassed_layers
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
    """A few steps of two micro-batches; the fused model's blocks are recomputed."""
    ours, theirs = (dict(model.named_parameters()) for model in (fused, plain))
    assert list(ours) == list(theirs)
    for block in fused.modules():
        if isinstance(block, fused.block_classes):  # type: ignore[arg-type]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (plain, fused)]
    for _ in range(3):
        for tokens in torch.randint(50, (2, 2, 9)):
            losses = [model(tokens, tokens) for model in (plain, fused)]
            torch.testing.assert_close(losses[1].sum, losses[0].sum)
            for loss in losses:
                loss.sum.backward()
        for name, param in theirs.items():
            torch.testing.assert_close(ours[name].grad, param.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), MoeConfig(**SMALL, moe_every=2)], ids=lambda c: c.type)
def test_own_models_train_as_before(config: Any) -> None:
    model = build_model(config)
    fused = copy.deepcopy(model)
    assert fuse(fused) == {"norms": 5, "gates": 2 if config.type == "llama" else 1, "attentions": 2}
    same_training(model, fused)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_of_transformers_train_as_before_and_nobody_elses_change(family: str) -> None:
    pytest.importorskip("transformers")
    own = {"head_dim": 8} if family == "qwen3" else {}
    model = build_model(HFConfig(config={"model_type": family, **HF, **own}))
    fused = copy.deepcopy(model)
    projections = 0 if family == "qwen2" else 3  # whose projections have a bias
    norms = 9 if family == "qwen3" else 5  # it norms queries and keys as well
    assert fuse(fused) == {"norms": norms, "gates": 2, "attentions": 2}
    assert len(bypassed_layers(fused)) == 2 * (3 + projections)
    same_training(model, fused)
    assert {type(m).__name__ for m in fused.modules()} == {type(m).__name__ for m in model.modules()}
    assert not any(type(m) in map(type, fused.modules()) for m in model.modules() if "RMSNorm" in type(m).__name__)


@pytest.mark.usefixtures("one_rank")
def test_sharded_blocks_gather_their_weights_for_both_passes() -> None:
    model = build_model(LlamaConfig(**SMALL))
    fused = copy.deepcopy(model)
    fuse(fused)
    blocks: Any = fused.blocks
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*blocks, fused]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.bfloat16()
    found: list[int] = []
    blocks[0].ffn.register_forward_pre_hook(lambda module, _: found.append(len(bypassed_layers(module))))
    tokens = torch.randint(50, (2, 9))
    for each in (model, fused):
        each(tokens, tokens).sum.backward()
    assert found == [3]
    assert bypassed_layers(fused) == set()  # between passes the weights are parts
    for (name, param), whole in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert (param.grad.full_tensor() - whole.grad).norm() < 0.05 * whole.grad.norm(), name  # type: ignore[union-attr]


def test_what_is_not_recognised_stays() -> None:
    pytest.importorskip("transformers")
    gelu = build_model(HFConfig(config={"model_type": "llama", **HF, "hidden_act": "gelu"}))
    assert "gates" not in fuse(gelu)
    assert fuse(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm((4, 4)))) == {}
