"""How much memory activations take, found without taking any: `recompute: auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from plait.config.run import RunConfig
from plait.errors import ConfigError, Problem
from plait.parallel.units import Unit
from plait.precision import DTYPES
from plait.world import World

_HEADROOM = 0.9
"""Share of the free memory that is counted on; the rest is for buffers, workspaces and fragmentation."""


def units_to_recompute(
    module: nn.Module, units: Sequence[Unit], example: Any, *, config: RunConfig, world: World
) -> int:
    """How many units must recompute so that states and activations fit the budget: as few as possible."""
    if example is None:
        raise ConfigError(
            Problem(
                "strategy.recompute.mode",
                "'auto' needs one micro-batch to measure, and there is none",
                "pass example=… to plait.prepare, or set full, every or selective",
            )
        )
    inside, outside = activation_bytes(module, units, example, config)
    budget = _budget(config, world) - _state_bytes(module, config, world) - outside
    count = 0
    kept = sum(inside)
    # The units are alike, or nearly; the first ones hold their activations longest.
    while kept > budget and count < len(inside):
        kept -= inside[count]
        count += 1
    return count


def activation_bytes(
    module: nn.Module, units: Sequence[Unit], example: Any, config: RunConfig
) -> tuple[list[int], int]:
    """Bytes kept for the backward pass inside each unit, and outside all of them.

    Runs the forward pass on fake tensors: real shapes and dtypes, no storage.
    """
    compute = DTYPES[config.precision.compute]
    inside = [0] * len(units)
    outside = 0
    current: list[int] = []
    seen: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        nonlocal outside
        key = id(tensor.untyped_storage())
        if key not in seen and key not in weights:
            seen.add(key)
            if current:
                inside[current[-1]] += tensor.untyped_storage().nbytes()
            else:
                outside += tensor.untyped_storage().nbytes()
        return tensor

    hooks = []
    for index, unit in enumerate(units):
        hooks.append(unit.module.register_forward_pre_hook(lambda *_, i=index: current.append(i)))
        hooks.append(unit.module.register_forward_hook(lambda *_: void(current.pop())))

    def void(_value: Any) -> None:
        """A forward hook that returns something replaces the output."""

    example = tree_map_only(Tensor, lambda t: t.detach().cpu(), example)
    with FakeTensorMode() as mode:

        def fake(tensor: Tensor) -> Tensor:
            dtype = compute if tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device="cpu", requires_grad=tensor.requires_grad)

        state = {name: fake(t) for name, t in (*module.named_parameters(), *module.named_buffers())}
        weights = {id(t.untyped_storage()) for t in state.values()}
        inputs = tree_map_only(Tensor, mode.from_tensor, example)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = () if kwargs else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
                torch.autocast("cpu", dtype=compute, enabled=compute != torch.float32),
            ):
                functional_call(module, state, args, kwargs, tie_weights=True)
        finally:
            for hook in hooks:
                hook.remove()
    return inside, outside


def _state_bytes(module: nn.Module, config: RunConfig, world: World) -> int:
    """Weights, gradients and two optimizer moments on one rank, by the table of ZeRO stages."""
    numel = sum(p.numel() for p in module.parameters())
    stage, shards = config.strategy.stage, world.layout.dp_shard
    compute = DTYPES[config.precision.compute].itemsize
    whole = 4 + 8  # fp32 weights and moments
    states = numel * whole // (shards if stage >= 1 else 1)
    gradients = numel * 4 // (shards if stage >= 2 else 1)
    gathered = numel * compute if 1 <= stage < 3 or (stage == 0 and compute < 4) else 0
    return states + gradients + gathered


def _budget(config: RunConfig, world: World) -> float:
    if config.strategy.recompute.budget_gib is not None:
        return config.strategy.recompute.budget_gib * 2**30
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0] * _HEADROOM
    return psutil.virtual_memory().available * _HEADROOM / world.ranks.local_size
