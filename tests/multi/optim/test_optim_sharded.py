"""Sharded optimizers and norms against whole ones, over gloo ranks, with shards uneven and empty."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.multi.ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from plait.config.optim import AdafactorConfig, LambConfig, MuonConfig, OptimConfig
from plait.optim import OptimizerGroup, build_optimizer, grad_norm, split_groups

STEPS = 4
CONFIGS: dict[str, OptimConfig] = {
    "Lamb": LambConfig(lr=0.01, weight_decay=0.1),
    "Adafactor": AdafactorConfig(lr=0.05, weight_decay=0.1),
    "Muon": MuonConfig(adam_patterns=("*.6.*",)),
}
LAYOUTS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"sharded": (2,)},
    4: {"sharded": (4,), "hybrid": (2, 2)},
}
"""By world size: shapes of the mesh; of two axes the first one replicates."""


def build_model() -> nn.Module:
    """Odd sizes everywhere: with 4 ranks 7, 5, 3 and 1 rows make uneven and empty shards."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 1),
    )


def build(config: OptimConfig, model: nn.Module) -> Optimizer:
    params = dict(model.named_parameters())
    groups = [
        OptimizerGroup(spec.names, [params[name] for name in spec.names], spec.options)
        for spec in split_groups(model, config)
    ]
    return build_optimizer(config, groups)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every parameter and state tensor, by name, as a whole."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = whole(p.detach()).clone()
        for key, value in optimizer.state[p].items():
            found[f"{name}/{key}"] = whole(value).clone()
    return found


def train(model: nn.Module, optimizer: Optimizer) -> None:
    """Steps with gradients that are the same on all ranks and for both models, to the bit."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for p in model.parameters():
            full = torch.randn(p.shape, generator=generator)
            if isinstance(p, DTensor):
                full = distribute_tensor(full, p.device_mesh, p.placements)
            p.grad = full
        optimizer.step()


def parity(mesh: DeviceMesh) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        plain, sharded = build_model(), build_model()
        for layer in sharded:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        reference, optimizer = build(config, plain), build(config, sharded)
        train(plain, reference)
        train(sharded, optimizer)
        results[name] = (outcome(sharded, optimizer), outcome(plain, reference))
        results[f"{name} resumed"] = resumed(config, sharded, optimizer)
    return results


def resumed(config: OptimConfig, model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether a state dict of sharded tensors loads, and training goes on from it as without the break."""
    start = [p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]
    fresh = build(config, model)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ends = []
    for chosen in (fresh, optimizer):
        for p, value in zip(model.parameters(), start, strict=True):
            assert isinstance(p, DTensor)
            p.to_local().detach().copy_(value)
        train(model, chosen)
        ends.append([p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def backward(mesh: DeviceMesh) -> tuple[float, float]:
    """The losses before and after training with gradients of `fully_shard`'s own backward pass."""
    model = build_model()
    fully_shard(model, mesh=mesh)
    optimizer = build(CONFIGS["Muon"], model)
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 2, 4, 4), torch.randn(8, 1)
    losses = []
    for _ in range(10):
        loss = (model(inputs) - targets).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1]


def norms(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The norm of sharded gradients, and what it should be."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(shape, generator=generator) for shape in ((7, 3), (1, 4), (5,))]
    group = mesh.get_group(mesh.ndim - 1)
    shards = [chunk(t, group) for t in tensors]
    return torch.tensor(grad_norm(shards, group)), torch.cat([t.flatten() for t in tensors]).norm()


def chunk(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = tensor.chunk(group.size())
    return pieces[group.rank()] if group.rank() < len(pieces) else tensor[:0]


def measure(rank: int, size: int) -> list[dict[str, Any]]:
    """Everything above, for each layout of this world."""
    found = []
    for layout in LAYOUTS[size].values():
        mesh = init_device_mesh("cpu", layout, mesh_dim_names=("dp_replicate", "dp_shard")[-len(layout) :])
        found.append(parity(mesh) | {"backward": backward(mesh), "norms": norms(mesh)})
    return found


@pytest.fixture(scope="module", params=list(LAYOUTS))
def found(request: pytest.FixtureRequest, two_ranks: RankPool, four_ranks: RankPool) -> list[dict[str, Any]]:
    """What every rank measured in every layout."""
    pool = {2: two_ranks, 4: four_ranks}[request.param]
    return [layout for rank in pool.run(measure) for layout in rank]


@pytest.mark.parametrize("name", list(CONFIGS))
def test_sharded_parameters_and_state_equal_whole_ones(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        sharded, plain = rank[name]
        assert sharded.keys() == plain.keys()
        torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_training_goes_on_the_same_from_a_sharded_state_dict(found: list[dict[str, Any]], name: str) -> None:
    assert all(rank[f"{name} resumed"] for rank in found)


def test_gradients_of_a_sharded_backward_pass_train(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, last = rank["backward"]
        assert last < first


def test_the_gradient_norm_is_that_of_the_whole_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        measured, expected = rank["norms"]
        torch.testing.assert_close(measured, expected)
