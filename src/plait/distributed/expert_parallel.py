"""Expert parallelism (EP): experts are sharded over ranks, and tokens are sent to them (dispatch and combine).

[Note: which ranks share which parameters]
Ranks of the axis `ep` read different data. For everything but the experts they are data-parallel ranks; each holds
some of the experts. So the two groups of parameters have different peers:

| parameters           | sharded over ep by | gradients are summed over, and `fully_shard` shards over |
|----------------------|--------------------|----------------------------------------------------------|
| of `expert_modules`  | `Shard(0)`, here   | dp_replicate, dp_shard (and cp), without ep              |
| all others           | nothing            | dp_replicate, dp_shard, ep (and cp)                      |

Over `tp` experts are sharded in the same way, other parameters as the tensor plan says; see
[Note: experts are cut over tp too].

An expert's gradient over the tokens of all ep ranks is complete on its rank, since the tokens were sent there.
`fully_shard` has to be called on each of the `expert_modules` with the mesh without ep (even if that has one rank),
before the block around it is sharded over the mesh with ep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from plait.distributed.collectives import all_reduce, copy_to_region
from plait.distributed.dtensor import is_sharded
from plait.distributed.world import as_one_axis
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import functional_collectives as funcol

# ---- collectives with gradients, as functional collectives: routers run inside compiled blocks


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` rows, in order, to each rank r of the group; get `received[r]` from each, in order.

    The gradient is sent in the opposite direction.
    """
    result: Tensor = _TokenExchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `sent` (ranks, …) to rank r; returns each rank's row for this one."""
    return _all_to_all(sent, [1] * len(sent), [1] * len(sent), group)


def sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, each of which computes its own loss from it: gradients are summed as well."""
    result: Tensor = _Sum.apply(sums, group)  # type: ignore[no-untyped-call]
    return result


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.backward_args = sent, received, group
        result = _all_to_all(rows, received, sent, group)
        # Recomputation stops after the last tensor that was saved. Every rank has to come as far as here, whatever
        # its rows need, so something is saved here.
        ctx.save_for_backward(result.new_empty(0))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.backward_args), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(sums.new_empty(0))  # as in `_TokenExchange`
        return _all_reduce(sums, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_to_all_single(rows.contiguous(), received, sent, group))


def _all_reduce(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_reduce(sums.contiguous(), "sum", group))


def _wait(pending: Tensor) -> Tensor:
    arrived: Tensor = funcol.wait_tensor(pending)  # type: ignore[no-untyped-call]
    return arrived


# ---- router losses of rows that are split over ranks (context parallelism)


def share_router_sums(model: nn.Module, mesh: DeviceMesh) -> None:
    """Have the routers of a model sum their statistics over a 1-D mesh, on which each row of a batch is split.

    Their balance and z loss are then those of the full row, on each of its ranks, and a row's choices count as load
    wherever its targets are. For each loss, and for a balancing bias, that is one small all-reduce per router in the
    forward pass, and one in the backward pass.
    """
    assert mesh.ndim == 1, "rows are split along one axis"
    for module in model.modules():
        if not hasattr(module, "sum_over_row"):
            continue
        if getattr(module, "capacity_factor", None) is not None:
            message = f"an expert's capacity is counted along a row, and rows are split over {mesh.size()} ranks"
            remedy = "leave it out, or set strategy.layout.cp: 1"
            raise ConfigError(Problem("model.capacity_factor", message, remedy))
        router: Any = module
        router.sum_over_row = partial(sum_over_ranks, group=mesh.get_group())


# ---- which rank has which experts
#
# [Note: experts are cut over tp too]
# The ranks of `ep` have different tokens, those of `tp` the same ones. Along `tp` nothing has to be sent to an expert:
# each rank takes the choices that fall on its own experts, and the outputs of all ranks are summed. So a rank of `tp`
# has its share of the experts' memory and work, and of what is sent over `ep`. Experts are not sharded by columns:
# matrix products keep their size, and a shard stays a plain rectangle, however a model packs its matrices.


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The ranks of the experts of one module: evenly and in order over `ep`, and inside a rank of `ep` over `tp`.

    Where they do not divide, the last ranks have fewer, or none.
    """

    experts: int
    mesh: DeviceMesh
    """All ranks, as one axis: that along which the stacked parameters are sharded."""
    ep: dist.ProcessGroup | None
    """Ranks with other tokens and other experts."""
    tp: dist.ProcessGroup | None
    """Ranks with the same tokens and other experts."""

    @classmethod
    def on(cls, mesh: DeviceMesh, experts: int) -> ExpertPlacement:
        """On a mesh of `ep`, of `tp`, or of both in this order."""
        names = mesh.mesh_dim_names or ()
        assert names in (("ep",), ("tp",), ("ep", "tp")), "experts are sharded over ep and tp"
        ep, tp = (mesh.get_group(axis) if axis in names else None for axis in ("ep", "tp"))
        return cls(experts, as_one_axis(mesh), ep, tp)

    @property
    def ep_size(self) -> int:
        """The number of ranks that exchange tokens."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def tp_size(self) -> int:
        """The number of ranks with the same tokens."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def experts_per_rank(self) -> int:
        """The most experts that one rank has."""
        return -(-self.experts // self.mesh.size())

    def local_experts(self) -> slice:
        """The experts of this rank."""
        first = self.mesh.get_local_rank() * self.experts_per_rank
        return slice(min(first, self.experts), min(first + self.experts_per_rank, self.experts))

    def local_choices(self, index: Tensor) -> Tensor:
        """Choices of experts, renumbered without the experts of other ranks of `tp`.

        Each rank of `ep` has `experts_per_rank` numbers in order; a choice of an expert elsewhere, or of none, becomes
        the number after the last.
        """
        if self.tp is None:
            return index
        rank = index // self.experts_per_rank
        is_local = (rank % self.tp_size == self.tp.rank()) & (index < self.experts)
        return (rank // self.tp_size * self.experts_per_rank + index % self.experts_per_rank).where(
            is_local, self.ep_size * self.experts_per_rank
        )


# ---- dispatch and combine


def make_forward(
    module: nn.Module, compute: Callable[..., Tensor], placement: ExpertPlacement
) -> Callable[..., Tensor]:
    """A forward for `module` whose experts are placed so; `compute` is the forward of its class.

    [Note: every rank makes the whole journey]
    Ranks route differently, and still all of them take part in every all-to-all, forward and backward: a rank without
    rows sends none, and one whose experts were not chosen receives none, and its experts get a gradient of zeros.
    Nothing is skipped, so no rank waits for one that had nothing to do.
    """
    signature = inspect.signature(compute)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _, hidden, index, weights = signature.bind(module, *args, **kwargs).args
        if placement.tp is not None:
            hidden, weights = copy_to_region(hidden, placement.tp), copy_to_region(weights, placement.tp)
        routed = _TokenDispatch(index, placement)
        rows = routed.dispatch(_in_compute_dtype(hidden))
        outputs = routed.combine(_expert_outputs(module, compute, rows, routed))
        weighted: Tensor = outputs * weights[..., None]
        output = weighted.sum(1).to(hidden.dtype)
        return output if placement.tp is None else all_reduce(output, placement.tp)

    # The sizes of an all-to-all are data, so a compiled block has a graph break here.
    interrupting: Callable[..., Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return interrupting


class _TokenDispatch:
    """One forward's routing: each choice of each token is a row, which is sent to its expert and returned."""

    def __init__(self, index: Tensor, placement: ExpertPlacement) -> None:
        """`index` (tokens, top_k) are the chosen experts; the number of experts stands for a dropped choice."""
        self._group = placement.ep
        self._shape = index.shape
        ranks, per_rank = placement.ep_size, placement.experts_per_rank
        chosen, self._order = placement.local_choices(index).flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(ranks * per_rank + 1, device=index.device))
        sent = bounds.diff().view(ranks, per_rank)
        received = sent if self._group is None else exchange_counts(sent, self._group)
        self._sent, self._received = _on_host(sent, received, index.numel() // placement.tp_size)
        local = torch.arange(per_rank, device=index.device).repeat(ranks)
        self.experts = local.repeat_interleave(received.flatten(), output_size=sum(self._received))
        """For each received row, which of this rank's experts it is for."""

    def dispatch(self, hidden: Tensor) -> Tensor:
        """Send rows to their experts; returns the received rows, ordered by source rank."""
        tokens, top_k = self._shape
        # Repeated, then reordered: the gradients of both are summed in a fixed order.
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, hidden.shape[1])
        rows = rows.index_select(0, self._order[: sum(self._sent)])
        return rows if self._group is None else exchange(rows, self._received, self._sent, self._group)

    def combine(self, outputs: Tensor) -> Tensor:
        """Return outputs to the ranks of their tokens (tokens, top_k, dim); zeros for choices dropped or not sent."""
        tokens, top_k = self._shape
        if self._group is not None:
            outputs = exchange(outputs, self._sent, self._received, self._group)
        if dropped := len(self._order) - len(outputs):
            outputs = F.pad(outputs, (0, 0, 0, dropped))
        positions = torch.arange(len(self._order), device=outputs.device)
        inverse = torch.empty_like(self._order).scatter(0, self._order, positions)
        return outputs.index_select(0, inverse).reshape(tokens, top_k, outputs.shape[1])


def _expert_outputs(module: nn.Module, compute: Callable[..., Tensor], rows: Tensor, routed: _TokenDispatch) -> Tensor:
    """The outputs of this rank's experts for the rows that were sent to them."""
    local = _LocalExperts(module)
    if len(rows) == 0:
        # No row: the experts still take part; see [Note: every rank makes the whole journey].
        for stack in local.stacks:
            rows = rows + stack.flatten()[:1].sum() * 0.0
        return rows
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=rows.device)
    return compute(local, rows, routed.experts[:, None], ones)


class _LocalExperts:
    """Stands in for the module in its own forward, with this rank's experts only."""

    def __init__(self, module: nn.Module) -> None:
        stacks = {name: _local(param) for name, param in module.named_parameters(recurse=False)}
        self.__dict__.update(stacks)
        self.stacks = list(stacks.values())
        self.num_experts = len(self.stacks[0])
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _local(param: Tensor) -> Tensor:
    assert is_sharded(param)
    return param.to_local()


def _in_compute_dtype(hidden: Tensor) -> Tensor:
    """Cast as autocast would at the first matrix product: cast before, half as much is sent."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def _balanced(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    ranks = sent.shape[0]
    even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return even, even


@on_fake_tensors(_balanced)
def _on_host(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows are sent to and received from each rank. Waits for the device."""
    sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return sizes[0], sizes[1]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts, by name: those whose parameters are stacks with a slice for each expert.

    Modules of Plait and of `transformers` are recognized by their shape: `num_experts`, direct parameters that all
    have that many slices, and at least one of them a stack of matrices.
    """
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, replicated: Callable[[str], bool] | None = None, stage: bool = False
) -> dict[str, nn.Module]:
    """Shard the experts of a model over the ranks of a mesh, in place; returns the sharded modules.

    The mesh has the axis `ep`, whose ranks have different tokens, or `tp`, whose ranks have the same, or both. Experts'
    parameters become `DTensor`s, `Shard(0)` on all of its ranks as one axis, and keep their names. The modules' forward
    dispatches tokens to their experts and combines the outputs; what an expert computes is the module's own code. Input
    and output are the same on all ranks of `tp`. `replicated` selects modules that these ranks replicate.

    Works on the meta device and on real ones, where the parameters must be equal on all ranks already. A pipeline
    `stage` of a model that passed `check_experts` may have no experts.
    """
    axes = mesh.mesh_dim_names or ()
    if not stage and "ep" in axes:
        check_experts(model, mesh.size(axes.index("ep")))
    sharded = {}
    for name, module in expert_modules(model).items():
        expert_mesh: DeviceMesh | None = mesh
        if "tp" in axes and (
            not _takes_routed_tokens(module) or _is_placed(module) or (replicated is not None and replicated(name))
        ):
            expert_mesh = mesh["ep"] if "ep" in axes else None
        if expert_mesh is None:
            continue  # replicated, or sharded by the tensor plan
        placement = ExpertPlacement.on(expert_mesh, int(module.num_experts))  # type: ignore[arg-type]
        compute = type(module).forward
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, _shard_experts(param, placement))
        module.forward = make_forward(module, compute, placement)
        sharded[name] = module
    return sharded


def expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """How `fully_shard` shards the parameters of `expert_modules` over `ranks`: its `shard_placement_fn`.

    Along the rows or columns of each expert's matrix where they divide, so that a shard is a plain rectangle; along the
    experts, which are sharded already, where they do not.
    """

    def shard_dim(param: nn.Parameter) -> Shard | None:
        dim = next((dim for dim in range(1, param.ndim) if param.shape[dim] % ranks == 0), None)
        if isinstance(param, DTensor):
            _check_shards(param.shape, param.device_mesh.size(), ranks, even=dim is not None)
        return None if dim is None else Shard(dim)

    return shard_dim


def _check_shards(shape: torch.Size, over: int, ranks: int, *, even: bool) -> None:
    """Refuse stacks over `over` ranks that `fully_shard` cannot shard over `ranks` more; `even`: by rows or columns."""
    experts = shape[0]
    if not _reaches_all(experts, over):
        *fewer, most = (str(n) for n in range(1, over) if _reaches_all(experts, n))
        fit = f"{', '.join(fewer)} or {most}" if fewer else most
        message = f"{experts} experts over {over} ranks (ep × tp) leave some without any, which ZeRO cannot shard"
        raise ConfigError(Problem("strategy.layout.tp", message, f"Use {fit} ranks for ep × tp, or zero: 0."))
    if experts % over and not even:
        # A DTensor that is sharded twice along one dim is described correctly only where the first sharding is even.
        message = (
            f"{experts} experts are sharded unevenly over {over} ranks (ep × tp), so ZeRO has to shard inside of each, "
        )
        message += f"and no dim of {tuple(shape[1:])} divides by {ranks}"
        remedy = f"Make model.expert_dim a multiple of {ranks}, or model.experts one of {over}."
        raise ConfigError(Problem("strategy.layout.dp_shard", message, remedy))


def _reaches_all(experts: int, ranks: int) -> bool:
    """Whether equal shares, in order, leave something for the last rank."""
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
    """Refuse a model whose experts cannot be sharded over so many ranks, or which has none."""
    modules = expert_modules(model)
    if not modules:
        message = f"no experts that could be sharded over {ranks} ranks were found in a {type(model).__name__}"
        raise ConfigError(Problem("strategy.layout.ep", message, "Leave it out, or use a mixture of experts."))
    for name, module in modules.items():
        experts = int(module.num_experts)  # type: ignore[arg-type]
        if experts % ranks:
            fit = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            message = f"{experts} experts ÷ {ranks} ranks = {experts / ranks:g}, not a whole number (in {name})"
            raise ConfigError(Problem("strategy.layout.ep", message, f"What divides {experts}: {fit}."))
        where = f"{name or 'the model'} ({type(module).__name__})"
        if _is_placed(module):
            raise ModelError(
                f"the experts of {where} are sharded already: apply expert parallelism (ep) once, before tensor "
                "parallelism and fully_shard"
            )
        if not _takes_routed_tokens(module):
            raise ModelError(
                f"the experts of {where} cannot be sharded over ranks: its forward does not take hidden states, chosen "
                "experts and their weights. Set strategy.layout.ep: 1"
            )


def _takes_routed_tokens(module: nn.Module) -> bool:
    """Whether a module's forward takes hidden states, chosen experts and their weights."""
    return len(inspect.signature(type(module).forward).parameters) == 4  # with the module itself


def _is_placed(module: nn.Module) -> bool:
    """Whether its parameters are DTensors already."""
    return any(isinstance(param, DTensor) for param in module.parameters(recurse=False))


def _shard_experts(param: nn.Parameter, placement: ExpertPlacement) -> nn.Parameter:
    local = param.detach()[placement.local_experts()].clone()  # a view would keep the memory of the others
    dtensor = DTensor.from_local(
        local, placement.mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
    )
    return nn.Parameter(dtensor, requires_grad=param.requires_grad)
