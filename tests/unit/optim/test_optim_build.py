"""From configuration to optimizer."""

from __future__ import annotations

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn

from plait.config.optim import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    OptimConfig,
    SGDConfig,
)
from plait.errors import ConfigError
from plait.optim import OptimizerGroup, build_optimizer, split_groups, supports_grad_scale

ALL: list[OptimConfig] = [
    AdamWConfig(),
    AdamConfig(),
    SGDConfig(momentum=0.9),
    AdagradConfig(),
    LionConfig(),
    LambConfig(),
    AdafactorConfig(),
    MuonConfig(),
]
FUSABLE: list[OptimConfig] = [config for config in ALL if hasattr(config, "implementation")]
by_type = pytest.mark.parametrize("config", ALL, ids=lambda config: config.type)
by_fusable = pytest.mark.parametrize("config", FUSABLE, ids=lambda config: config.type)


def views(config: OptimConfig, model: nn.Module) -> list[OptimizerGroup]:
    params = dict(model.named_parameters())
    return [
        OptimizerGroup(spec.names, [params[name] for name in spec.names], spec.options)
        for spec in split_groups(model, config)
    ]


def one(*tensors: Tensor) -> list[OptimizerGroup]:
    return [OptimizerGroup([f"p{index}" for index in range(len(tensors))], tensors)]


@by_type
def test_every_optimizer_lowers_a_loss(config: OptimConfig) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
    optimizer = build_optimizer(config, views(config, model))
    losses = []
    for _ in range(30):
        loss = (model(inputs) - targets).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@by_type
def test_groups_carry_names_and_the_rate_that_schedules_scale(config: OptimConfig) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    groups = views(config, model)
    optimizer = build_optimizer(config, groups)
    for group, view in zip(optimizer.param_groups, groups, strict=True):
        assert group["param_names"] == list(view.names)
        assert group["initial_lr"] == group["lr"] == view.options.get("lr", config.lr)
        assert group["weight_decay"] == view.options["weight_decay"]


def test_elementwise_optimizers_are_those_whose_shards_need_no_exchange() -> None:
    assert {c.type for c in ALL if c.elementwise} == {"AdamW", "Adam", "SGD", "Adagrad", "Lion"}


@by_type
def test_an_empty_shard_is_tolerated_alone_or_among_others(config: OptimConfig) -> None:
    if not config.elementwise:
        pytest.skip("its views are whole parameters")
    empty, full = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))
    for tensors in ([empty], [empty, full]):
        optimizer = build_optimizer(config, one(*tensors))
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        for _ in range(2):
            optimizer.step()
    assert torch.all(full < 1)


@by_fusable
def test_auto_is_fused_on_cpu(config: OptimConfig) -> None:
    optimizer = build_optimizer(config, one(nn.Parameter(torch.ones(3))))
    assert all(group["fused"] for group in optimizer.param_groups)


@by_fusable
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_all_implementations_agree(config: OptimConfig, implementation: str) -> None:
    start, gradients = torch.randn(5, 3), torch.randn(4, 5, 3)
    results = []
    for word in ("auto", implementation):
        p = nn.Parameter(start.clone())
        optimizer = build_optimizer(config.model_copy(update={"implementation": word}), one(p))
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


@by_fusable
def test_fused_where_no_kernel_is_is_an_error_and_auto_takes_foreach(config: OptimConfig) -> None:
    groups = one(nn.Parameter(torch.ones(3, device="meta")))
    with refused(ConfigError, "'fused'", config.type, "meta", "'auto'", key="optim.implementation"):
        build_optimizer(config.model_copy(update={"implementation": "fused"}), groups)
    assert build_optimizer(config, groups).param_groups[0]["foreach"]


@by_fusable
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_steps_unscale_gradients_and_skip_on_overflow(config: OptimConfig, dtype: torch.dtype) -> None:
    start, gradient = torch.randn(5, dtype=dtype), torch.randn(5, dtype=dtype)
    plain, scaled = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference, optimizer = build_optimizer(config, one(plain)), build_optimizer(config, one(scaled))
    if config.type == "SGD" and dtype == torch.bfloat16:  # torch's kernel is wrong there, so it is not taken
        assert not supports_grad_scale(optimizer)
        return
    assert supports_grad_scale(optimizer)

    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.found_inf = torch.tensor(1.0)
    scaled.grad = torch.full_like(scaled, float("inf"))
    optimizer.step()
    assert torch.equal(scaled, start)

    optimizer.found_inf = torch.tensor(0.0)
    for _ in range(2):
        plain.grad, scaled.grad = gradient.clone(), gradient * 8
        reference.step()
        optimizer.step()
    torch.testing.assert_close(scaled, plain)


@by_type
def test_only_fused_steps_claim_to_honour_grad_scale(config: OptimConfig) -> None:
    matrix = nn.Parameter(torch.ones(3, 3))
    if hasattr(config, "implementation"):
        config = config.model_copy(update={"implementation": "foreach"})
    assert not supports_grad_scale(build_optimizer(config, one(matrix)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_on_16_bit_weights_equals_the_plain_loop(dtype: torch.dtype) -> None:
    weight = torch.randn(64)
    gradient = torch.randn(64).to(dtype)

    def stepped(implementation: str) -> torch.Tensor:
        view = torch.nn.Parameter(weight.to(dtype))
        view.grad = gradient.clone()
        config = SGDConfig(lr=0.1, implementation=implementation)
        build_optimizer(config, [OptimizerGroup(["w"], [view])]).step()
        return view.detach()

    assert torch.equal(stepped("auto"), stepped("loop"))
