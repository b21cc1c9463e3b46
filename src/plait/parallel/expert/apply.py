"""Experts become shards, and their forward a journey.

[Note: which ranks share which parameters]
Ranks of the axis `ep` see different data. For everything but the experts they are data-parallel ranks like
any others; of the experts each holds its own. So the two kinds of parameters have different peers:

| parameters           | are spread over ep by | gradients are summed over, and `fully_shard` shards over |
|----------------------|-----------------------|-----------------------------------------------------------|
| of `expert_modules`  | `Shard(0)`, here      | dp_replicate, dp_shard (and cp), without ep               |
| all others           | nothing               | dp_replicate, dp_shard, ep (and cp)                       |

An expert's gradient over the tokens of all ep ranks is complete where the expert is, since the tokens came to
it. `fully_shard` has to be called on each of the `expert_modules` with the mesh without ep (even if that has
one rank), before the block around it is sharded over the mesh with ep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeGuard

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait.errors import ConfigError, ModelError, Problem
from plait.parallel.expert.dispatch import spread_forward


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts, by name: those whose parameters are stacks with a slice for each expert.

    They are known by their shape, ours and those of `transformers` alike: `num_experts`, direct parameters
    that all have that many slices, and at least one of them a stack of matrices.
    """
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh, *, stage: bool = False) -> dict[str, nn.Module]:
    """Spread the experts of a model over the ranks of a 1-D mesh, in place; returns the modules that hold them.

    Their parameters become `DTensor`s, `Shard(0)` on the mesh, and keep their names. The modules' forward sends
    rows to the experts they chose and brings the answers back; what an expert computes is the module's own code.
    Works on the meta device and on real ones, where the parameters must be equal on all ranks already. A `stage` is
    a part of a model that `check_experts` has seen whole; it may have no experts.
    """
    assert mesh.ndim == 1, "experts are spread over one axis"
    if not stage:
        check_experts(model, mesh.size())
    found = expert_modules(model)
    for module in found.values():
        compute = type(module).forward
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, _own_experts(param, mesh))
        module.forward = spread_forward(module, compute, mesh)
    return found


def expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """How `fully_shard` should cut the parameters of `expert_modules` over `ranks`: its `shard_placement_fn`.

    Along the rows or columns of each expert's matrix where they divide, so that a shard is a plain rectangle of the
    whole; along the experts, which are cut already, where they do not.
    """

    def place(param: nn.Parameter) -> Shard | None:
        return next((Shard(dim) for dim in range(1, param.ndim) if param.shape[dim] % ranks == 0), None)

    return place


def _holds_experts(module: nn.Module) -> TypeGuard[nn.Module]:
    experts = getattr(module, "num_experts", None)
    stacks = list(module.parameters(recurse=False))
    return (
        isinstance(experts, int)
        and any(stack.ndim == 3 for stack in stacks)
        and all(stack.ndim > 1 and stack.shape[0] == experts for stack in stacks)
    )


def check_experts(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose experts cannot be spread over so many ranks, or which has none."""
    found = expert_modules(model)
    if not found:
        message = f"experts are to be spread over {ranks} ranks, and a {type(model).__name__} has none that are known"
        raise ConfigError(Problem("strategy.layout.ep", message, "leave it out, or use a mixture of experts"))
    for name, module in found.items():
        experts = int(module.num_experts)  # type: ignore[arg-type]
        if experts % ranks:
            fit = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            message = f"{experts} experts ÷ {ranks} ranks = {experts / ranks:g}, not a whole number (in {name})"
            raise ConfigError(Problem("strategy.layout.ep", message, f"what divides {experts}: {fit}"))
        where = f"{name or 'the model'} ({type(module).__name__})"
        if any(isinstance(param, DTensor) for param in module.parameters(recurse=False)):
            raise ModelError(
                f"the experts of {where} are sharded already: spread them over ep once, and before tensor parallelism "
                "or fully_shard gets to them"
            )
        if len(inspect.signature(type(module).forward).parameters) != 4:  # with the module itself
            raise ModelError(
                f"the experts of {where} cannot be spread over ranks: its forward does not take hidden states, chosen "
                "experts and their weights. Set strategy.layout.ep: 1"
            )


def _own_experts(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    share = param.shape[0] // mesh.size()
    first = mesh.get_local_rank() * share
    own = param.detach()[first : first + share].clone()  # a view would keep the others' memory
    whole = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(whole, requires_grad=param.requires_grad)
