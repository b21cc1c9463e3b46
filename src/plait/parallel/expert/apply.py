"""Experts become shards, and their forward a journey.

[Note: which ranks share which parameters]
Ranks of the axis `ep` see different data. For everything but the experts they are data-parallel ranks like
any others; of the experts each holds its own. So the two kinds of parameters have different peers:

| parameters           | are spread over ep by | gradients are summed over, and `fully_shard` shards over |
|----------------------|-----------------------|-----------------------------------------------------------|
| of `expert_modules`  | `Shard(0)`, here      | dp_replicate, dp_shard (and cp), without ep               |
| all others           | nothing               | dp_replicate, dp_shard, ep (and cp)                       |

Over `tp` experts are spread in the same way, where other parameters are as a tensor plan says; see
[Note: experts are cut over tp too].

An expert's gradient over the tokens of all ep ranks is complete where the expert is, since the tokens came to
it. `fully_shard` has to be called on each of the `expert_modules` with the mesh without ep (even if that has
one rank), before the block around it is sharded over the mesh with ep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait.errors import ConfigError, ModelError, Problem
from plait.parallel.expert.dispatch import spread_forward
from plait.parallel.expert.seats import Seats


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts, by name: those whose parameters are stacks with a slice for each expert.

    They are known by their shape, ours and those of `transformers` alike: `num_experts`, direct parameters
    that all have that many slices, and at least one of them a stack of matrices.
    """
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, alike: Callable[[str], bool] | None = None, stage: bool = False
) -> dict[str, nn.Module]:
    """Spread the experts of a model over the ranks of a mesh, in place; returns the modules of which ranks have parts.

    The mesh has the axis `ep`, whose ranks see different tokens, or `tp`, whose ranks see the same, or both. Experts'
    parameters become `DTensor`s, `Shard(0)` on all of its ranks as one axis, and keep their names. The modules' forward
    sends rows to the experts they chose and brings the answers back; what an expert computes is the module's own code.
    Input and answer are the same on all ranks of `tp`. `alike` names modules whose work these ranks do alike.

    Works on the meta device and on real ones, where the parameters must be equal on all ranks already. A `stage` is
    a part of a model that `check_experts` has seen whole; it may have no experts.
    """
    axes = mesh.mesh_dim_names or ()
    if not stage and "ep" in axes:
        check_experts(model, mesh.size(axes.index("ep")))
    found = {}
    for name, module in expert_modules(model).items():
        over: DeviceMesh | None = mesh
        if "tp" in axes and (not _can_be_spread(module) or _is_placed(module) or (alike is not None and alike(name))):
            over = mesh["ep"] if "ep" in axes else None
        if over is None:
            continue  # all ranks do its work, or share it as a tensor plan says
        seats = Seats.on(over, int(module.num_experts))  # type: ignore[arg-type]
        compute = type(module).forward
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, _own_experts(param, seats))
        module.forward = spread_forward(module, compute, seats)
        found[name] = module
    return found


def expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """How `fully_shard` should cut the parameters of `expert_modules` over `ranks`: its `shard_placement_fn`.

    Along the rows or columns of each expert's matrix where they divide, so that a shard is a plain rectangle of the
    whole; along the experts, which are cut already, where they do not.
    """

    def place(param: nn.Parameter) -> Shard | None:
        dim = next((dim for dim in range(1, param.ndim) if param.shape[dim] % ranks == 0), None)
        if isinstance(param, DTensor):
            _check_shards(param.shape, param.device_mesh.size(), ranks, even=dim is not None)
        return None if dim is None else Shard(dim)

    return place


def _check_shards(shape: torch.Size, over: int, ranks: int, *, even: bool) -> None:
    """Refuse stacks over `over` ranks that `fully_shard` cannot cut over `ranks` more; `even`: by rows or columns."""
    experts = shape[0]
    if not _reaches_all(experts, over):
        *fewer, most = (str(n) for n in range(1, over) if _reaches_all(experts, n))
        fit = f"{', '.join(fewer)} or {most}" if fewer else most
        message = f"{experts} experts over {over} ranks (ep × tp) leave some without any, which ZeRO cannot shard"
        raise ConfigError(Problem("strategy.layout.tp", message, f"Use {fit} ranks for ep × tp, or zero: 0."))
    if experts % over and not even:
        # Torch describes what is cut twice along one dim rightly only where the first cut was even.
        message = f"{experts} experts are cut unevenly over {over} ranks (ep × tp), so ZeRO has to cut inside of each, "
        message += f"and no dim of {tuple(shape[1:])} divides by {ranks}"
        remedy = f"Make model.expert_dim a multiple of {ranks}, or model.experts one of {over}."
        raise ConfigError(Problem("strategy.layout.dp_shard", message, remedy))


def _reaches_all(experts: int, ranks: int) -> bool:
    """Whether even shares, one after the other, leave something for the last rank."""
    return (ranks - 1) * -(-experts // ranks) < experts


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
        raise ConfigError(Problem("strategy.layout.ep", message, "Leave it out, or use a mixture of experts."))
    for name, module in found.items():
        experts = int(module.num_experts)  # type: ignore[arg-type]
        if experts % ranks:
            fit = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            message = f"{experts} experts ÷ {ranks} ranks = {experts / ranks:g}, not a whole number (in {name})"
            raise ConfigError(Problem("strategy.layout.ep", message, f"What divides {experts}: {fit}."))
        where = f"{name or 'the model'} ({type(module).__name__})"
        if _is_placed(module):
            raise ModelError(
                f"the experts of {where} are sharded already: spread them over ep once, and before tensor parallelism "
                "or fully_shard gets to them"
            )
        if not _can_be_spread(module):
            raise ModelError(
                f"the experts of {where} cannot be spread over ranks: its forward does not take hidden states, chosen "
                "experts and their weights. Set strategy.layout.ep: 1"
            )


def _can_be_spread(module: nn.Module) -> bool:
    """Whether a module's forward takes hidden states, chosen experts and their weights."""
    return len(inspect.signature(type(module).forward).parameters) == 4  # with the module itself


def _is_placed(module: nn.Module) -> bool:
    """Whether its parameters are on a mesh already."""
    return any(isinstance(param, DTensor) for param in module.parameters(recurse=False))


def _own_experts(param: nn.Parameter, seats: Seats) -> nn.Parameter:
    own = param.detach()[seats.of_rank()].clone()  # a view would keep the others' memory
    whole = DTensor.from_local(own, seats.mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride())
    return nn.Parameter(whole, requires_grad=param.requires_grad)
