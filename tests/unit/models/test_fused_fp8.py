"""Fused models in 8 bits: layers of one input are computed together, and the model trains as it does layer by layer."""

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

from plait.config.model import HFConfig, LlamaConfig
from plait.config.precision import Fp8Config
from plait.kernels.fp8 import WEIGHT
from plait.models import build_model
from plait.models.fused import fuse
from plait.precision import apply_fp8, enable_delayed_scaling
from plait.precision.fp8 import Fp8Linear, bypassed_layers

SMALL: dict[str, Any] = {"vocab_size": 50, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
HF: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CPU = torch.device("cpu")
TOKENS = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(1))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, model.block_classes)]  # type: ignore[arg-type]


def two_of(config: Any, **fp8: Any) -> tuple[nn.Module, nn.Module]:
    """A model with layers in 8 bits, and a copy that is fused."""
    model = build_model(config).bfloat16()
    apply_fp8(blocks_of(model), Fp8Config(recipe="tensorwise", emulate=True, **fp8), torch.device("cpu"))
    fused = copy.deepcopy(model)
    fuse(fused)
    return model, fused


def gradients(model: Any, times: int = 1) -> dict[str, torch.Tensor]:
    for _ in range(times):
        model(TOKENS, TOKENS).sum.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Up to the rounding of other scales: layers of one input share theirs. Small sums of large ones show it."""
    assert list(found) == list(wanted)
    for name, grad in wanted.items():
        assert (found[name] - grad).float().norm() < 0.5 * grad.float().norm(), name
    ours, theirs = (torch.cat([grad.float().flatten() for grad in each.values()]) for each in (found, wanted))
    assert (ours - theirs).norm() < 0.2 * theirs.norm()


@pytest.mark.parametrize("family", ["own", "llama", "qwen2"])
def test_it_is_the_model_layer_by_layer_up_to_rounding(family: str) -> None:
    if family != "own":
        pytest.importorskip("transformers")
    config = LlamaConfig(**SMALL) if family == "own" else HFConfig(config={"model_type": family, **HF})
    model, fused = two_of(config)
    assert len(bypassed_layers(fused)) == 2 * 6  # all but the output of attention; a bias does not matter
    losses = [float(each(TOKENS, TOKENS).sum.detach()) for each in (fused, model)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    near(gradients(fused), gradients(model))


def test_recomputed_and_accumulated_it_is_the_same() -> None:
    _, fused = two_of(LlamaConfig(**SMALL))
    again = copy.deepcopy(fused)
    for _, block in blocks_of(again):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    plain = gradients(fused, times=2)
    for name, grad in gradients(again, times=2).items():
        assert torch.equal(grad, plain[name]), name


def test_what_is_left_in_16_bits_frozen_or_watched_is_called() -> None:
    model, fused = two_of(LlamaConfig(**SMALL), skip=["*.down", "blocks.0.attention.k"])
    assert sum(isinstance(layer, Fp8Linear) for layer in bypassed_layers(fused)) == 3
    block: Any = fused.blocks[1]  # type: ignore[index]
    seen: list[str] = []
    block.attention.q.register_forward_hook(lambda *_: seen.append("q"))
    for each in (model, fused):
        each.get_submodule("blocks.1.ffn.up").weight.requires_grad_(False)
    near(gradients(fused), gradients(model))
    assert seen == ["q"]
    whole, frozen = two_of(LlamaConfig(**SMALL))
    for each in (whole, frozen):
        each.get_submodule("blocks.1.ffn.up").weight.requires_grad_(False)
    near(gradients(frozen), gradients(whole))


@pytest.mark.parametrize("family", ["own", "llama"])
def test_layers_together_note_what_each_would_alone(family: str) -> None:
    if family != "own":
        pytest.importorskip("transformers")
    config = LlamaConfig(**SMALL) if family == "own" else HFConfig(config={"model_type": family, **HF})
    model = build_model(config).bfloat16()
    wanted = Fp8Config(recipe="tensorwise", emulate=True, scales="earlier", history=1)
    states = []
    for each, fused in ((model, False), (copy.deepcopy(model), True)):
        scales = enable_delayed_scaling(apply_fp8(blocks_of(each), wanted, CPU), wanted, CPU)
        assert scales is not None
        if fused:
            fuse(each)
        for _ in range(2):  # the second time with the scales of the first
            gradients(each)
            scales.after_step(None)
        states.append(scales.state())
    alone, together = states
    assert len(alone) == 2 * 7
    assert list(together) == list(alone)
    for name, numbers in alone.items():
        found, expected = torch.tensor(together[name]), torch.tensor(numbers)
        assert torch.equal(found[WEIGHT], expected[WEIGHT])
        torch.testing.assert_close(found, expected, rtol=0.2, atol=0.0)


@pytest.mark.usefixtures("one_rank")
def test_sharded_blocks_gather_their_weights_for_both_passes() -> None:
    _, fused = two_of(LlamaConfig(**SMALL))
    sharded: Any = copy.deepcopy(fused)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*sharded.blocks, sharded]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    found: list[int] = []
    sharded.blocks[0].ffn.register_forward_pre_hook(lambda module, _: found.append(len(bypassed_layers(module))))
    ours = gradients(sharded)
    assert found == [3]
    for name, grad in gradients(fused).items():
        assert torch.equal(ours[name].full_tensor(), grad), name  # type: ignore[attr-defined]
