"""What DeepSpeed-Chat's scripts ask of engines: methods besides `forward`, adapters, copies, several engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait.frontends.deepspeed as deepspeed
from plait.frontends.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.multi.ranks import RankPool

WIDTH, TOKENS = 16, 11
Weights = dict[str, Tensor]


class Layer(nn.Module):
    """A linear layer that does not train, with an adapter that does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=False)
        self.right = nn.Parameter(torch.randn(WIDTH, 2) / 4)
        self.left = nn.Parameter(torch.randn(2, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.t() + x @ self.right @ self.left)


class Critic(nn.Module):
    """A trunk and a head, which a method besides `forward` goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.v_head = nn.Linear(WIDTH, 1, bias=False)
        self.trunk = nn.Sequential(nn.Embedding(TOKENS, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH))

    def values(self, tokens: Tensor) -> Tensor:
        return self.v_head(self.trunk(tokens)).squeeze(-1)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.values(tokens).float() - 1).square().mean()


def critic() -> Critic:
    torch.manual_seed(3)
    return Critic()


def config(stage: int, *, offload: bool = False, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **more,
    }


def begin(stage: int, **more: Any) -> Any:
    return deepspeed.initialize(model=critic(), config=config(stage, **more))[0]


def tokens(step: int, rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(40 + step)
    return torch.randint(TOKENS, (8, 5), generator=generator).chunk(size)[rank]


def values_of(engine: Any, way: str, given: Tensor) -> Tensor:
    if way == "engine":
        return engine.values(given)
    if way == "module":
        return engine.module.values(given)
    return engine.module.v_head(engine.module.trunk(given)).squeeze(-1)


def train(rank: int, size: int, stage: int, offload: bool, way: str) -> dict[str, Any]:
    engine = begin(stage, offload=offload)
    losses = []
    for step in range(4):
        given = tokens(step, rank, size)
        if way == "forward":
            loss = engine(given)
        else:
            with torch.no_grad():
                seen = values_of(engine, way, given)
            values = values_of(engine, way, given)
            assert torch.equal(values, seen)
            loss = (values.float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return {"losses": losses, "weights": engine.module_state_dict()}


def as_fp32(weights: Weights) -> Weights:
    return {name: value.float() for name, value in weights.items()}


def close(a: Weights, b: Weights, within: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=within) for name in a)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_a_loss_may_come_from_any_part_of_the_model(two_ranks: RankPool, stage: int, offload: bool) -> None:
    usual = two_ranks.run(train, 0, False, "forward")
    for way in ("engine", "module", "parts"):
        found = two_ranks.run(train, stage, offload, way)
        for one, other in zip(found, usual, strict=True):
            assert torch.allclose(torch.stack(one["losses"]), torch.stack(other["losses"]), rtol=0, atol=1e-6)
        assert close(found[0]["weights"], usual[0]["weights"], 1e-5)


def gather_each(rank: int, size: int, stage: int, offload: bool, format_: str) -> list[Any]:
    engine = begin(stage, offload=offload, **({} if format_ == "fp32" else {format_: {"enabled": True}}))
    found: dict[str, Tensor] = {}
    for step in range(2):
        engine.backward(engine(tokens(step, rank, size)))
        engine.step()  # with an offloaded optimizer it goes on after this
        for name, param in engine.module.named_parameters():
            assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = param.data.clone()
                param.data.zero_()
    layer = engine.module.trunk[1]
    with deepspeed.zero.GatheredParameters([layer.weight, layer.left, layer.right], modifier_rank=0):
        if rank == 0:
            layer.weight.data += (layer.right @ layer.left).t()
    return [found, engine.module_state_dict()]


@pytest.mark.parametrize("format_", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
def test_gathered_parameters_are_those_of_the_latest_update(two_ranks: RankPool, format_: str, offload: bool) -> None:
    (gathered, weights), _ = two_ranks.run(gather_each, 3, offload, format_)
    fused = "trunk.1.weight"
    right, left = gathered["trunk.1.right"], gathered["trunk.1.left"]
    expected: Weights = gathered | {fused: gathered[fused] + (right @ left).t()}
    within = 1e-6 if format_ == "fp32" else 2e-2
    assert close(as_fp32(weights), as_fp32(expected), within)
