"""Expert parallelism (EP): experts are sharded over ranks, and tokens are sent to them (dispatch and combine).

A *choice* is one expert that the router chose for one token; a token has `top_k` choices. A *stack* is a parameter with
a slice per expert. "Ranks of `ep`" are the ranks along this axis of the mesh.

[Note: which ranks share which parameters]
Ranks of `ep` have different data, and each holds some of the experts. For all other parameters they are data-parallel
ranks. So gradients are summed, and ZeRO shards parameters, over different ranks:

| parameters           | sharded over ep by | gradients are summed over, and `fully_shard` shards over |
|----------------------|--------------------|----------------------------------------------------------|
| of `expert_modules`  | `Shard(0)`, here   | dp_replicate, dp_shard (and cp), without ep              |
| all others           | nothing            | dp_replicate, dp_shard, ep (and cp)                      |

Over `tp` experts are sharded in the same way, and other parameters as tensor parallelism shards them; see
[Note: experts are cut over tp too].

The gradient of an expert is not summed over ep: its rank has received the tokens of all ep ranks. `fully_shard` has to
be called on each of the `expert_modules` with the mesh without ep (even if that has one rank), before the block around
it is sharded over the mesh with ep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from plait.distributed.collectives import all_gather_replicated, all_reduce, copy_to_region, split
from plait.distributed.dtensor import is_sharded
from plait.distributed.world import as_one_axis
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import disable_current_modes
from plait.torch_internals import functional_collectives as funcol

# ---- collectives with gradients; functional ones, which torch.compile can trace, as blocks with routers are compiled


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` rows to each rank r of the group, in rank order; return the `received[r]` rows from each rank r.

    The gradient is sent in the opposite direction.
    """
    result: Tensor = _TokenExchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of `sent` (ranks, …) to rank r; return the rows that were received, row r from rank r."""
    return _all_to_all(sent, [1] * len(sent), [1] * len(sent), group)


def sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks. Each rank computes its own loss from it, so gradients are summed over ranks too."""
    result: Tensor = _Sum.apply(sums, group)  # type: ignore[no-untyped-call]
    return result


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.backward_args = sent, received, group
        result = _all_to_all(rows, received, sent, group)
        # Activation checkpointing recomputes up to the last saved tensor. Every rank has to run this all-to-all again,
        # also one without rows, so a tensor is saved here.
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


# ---- router losses with context parallelism, which splits rows over ranks


def share_router_sums(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the routers of a model sum their statistics over a 1-D mesh, over whose ranks each row of a batch is split.

    Then every rank computes the balance loss and the z loss of full rows, and the load of an expert includes the
    choices of all tokens of a row, even if the row's targets are on other ranks. For each loss, and for a balancing
    bias, this takes one small all-reduce per router in the forward pass, and one in the backward pass. Routers with a
    `capacity_factor` are a `ConfigError`.
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
# Ranks of `ep` have different tokens, ranks of `tp` the same ones. So along `tp` no token has to be sent: each rank
# computes the choices of its own experts, and the outputs of all ranks are summed. So each rank of `tp` has 1/tp of the
# experts' memory and of their computation, and of the tokens that are sent over `ep`. Experts are sharded as wholes,
# not by the columns of their matrices: so matrix products keep their size, and it does not matter how a model packs
# several matrices into one parameter.


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which rank has which experts of a module: consecutive ones, first divided over `ep`, then over `tp`.

    If the experts do not divide by the ranks, the last ranks have fewer, or none.
    """

    experts: int
    mesh: DeviceMesh
    """All ranks as one axis, over which the stacks are sharded."""
    ep: dist.ProcessGroup | None
    """The ranks with other tokens and other experts; None without the axis."""
    tp: dist.ProcessGroup | None
    """The ranks with the same tokens and other experts; None without the axis."""

    @classmethod
    def on(cls, mesh: DeviceMesh, experts: int) -> ExpertPlacement:
        """Return the placement of `experts` experts on a mesh of `ep`, of `tp`, or of both in this order."""
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
        """Return which experts this rank has."""
        first = self.mesh.get_local_rank() * self.experts_per_rank
        return slice(min(first, self.experts), min(first + self.experts_per_rank, self.experts))

    def local_choices(self, index: Tensor) -> Tensor:
        """Return the choices with new expert numbers, which only the experts of this rank of `tp` have.

        Each rank of `ep` has `experts_per_rank` consecutive numbers. A choice of an expert on another rank of `tp`, or
        a dropped choice, becomes the number after the last. Without `tp`, `index` is returned as it is.
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
    """Return a forward for `module` that sends tokens to experts placed like this; `compute` is its class's forward.

    [Note: every rank makes the whole journey]
    Every rank takes part in every all-to-all, in the forward and the backward pass, also a rank that has no rows to
    send, or whose experts were not chosen; those experts get a gradient of zeros. If such a rank skipped a collective,
    the others would wait for it for ever.
    """
    signature = inspect.signature(compute)
    if not _takes_routed_tokens(module):
        return _make_batched_forward(module, compute, placement)

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

    # The sizes of the all-to-all depend on the data, so a compiled block has a graph break here.
    interrupting: Callable[..., Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return interrupting


class _TokenDispatch:
    """The routing of one forward: each choice becomes a row, which is sent to its expert; its output is sent back."""

    def __init__(self, index: Tensor, placement: ExpertPlacement) -> None:
        """`index` (tokens, top_k) has the chosen experts; a dropped choice has the number of experts as its value."""
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
        """Send a row for each choice to its expert; return the rows that this rank receives, ordered by source rank."""
        tokens, top_k = self._shape
        # Repeated, then reordered: indexing `hidden` directly would sum gradients in an order that varies.
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, hidden.shape[1])
        rows = rows.index_select(0, self._order[: sum(self._sent)])
        return rows if self._group is None else exchange(rows, self._received, self._sent, self._group)

    def combine(self, outputs: Tensor) -> Tensor:
        """Send outputs back; return those of this rank's choices (tokens, top_k, dim), zeros for choices not sent."""
        tokens, top_k = self._shape
        if self._group is not None:
            outputs = exchange(outputs, self._sent, self._received, self._group)
        if dropped := len(self._order) - len(outputs):
            outputs = F.pad(outputs, (0, 0, 0, dropped))
        positions = torch.arange(len(self._order), device=outputs.device)
        inverse = torch.empty_like(self._order).scatter(0, self._order, positions)
        return outputs.index_select(0, inverse).reshape(tokens, top_k, outputs.shape[1])


def _expert_outputs(module: nn.Module, compute: Callable[..., Tensor], rows: Tensor, routed: _TokenDispatch) -> Tensor:
    """Return the outputs of this rank's experts for the rows that it received."""
    local = _local_experts(module)
    if len(rows) == 0:
        # No rows: give the experts a gradient of zeros; see [Note: every rank makes the whole journey].
        for stack in local.stacks:
            rows = rows + stack.flatten()[:1].sum() * 0.0
        return rows
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=rows.device)
    return compute(local, rows, routed.experts[:, None], ones)


class _Experts:
    """Replaces `self` in the forward of a module: the same attributes, but other parameters, of fewer experts."""

    def __init__(self, module: nn.Module, stacks: dict[str, Tensor]) -> None:
        self.__dict__.update(stacks)
        self.stacks = list(stacks.values())
        self.num_experts = len(self.stacks[0])
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _local_experts(module: nn.Module) -> _Experts:
    """Return a module's stand-in with this rank's experts only."""
    return _Experts(module, {name: _local(param) for name, param in module.named_parameters(recurse=False)})


def _make_batched_forward(
    module: nn.Module, compute: Callable[..., Tensor], placement: ExpertPlacement
) -> Callable[..., Tensor]:
    """Return the forward of a module whose input has the rows of all experts, one expert's after the other's.

    Every expert has the same number of rows, as in Llama 4. Each rank of `ep` may have another number of them.
    """
    ep, tp, group = placement.ep_size, placement.tp_size, placement.ep
    local = placement.experts // (ep * tp)

    def forward(hidden: Tensor) -> Tensor:
        dim = hidden.shape[-1]
        rows = hidden.view(ep, tp, local, -1, dim).transpose(0, 1)
        tokens = rows.shape[3]
        rows = rows[0] if placement.tp is None else split(rows, 0, placement.tp)[0]
        counts, flat = [tokens], rows.reshape(-1, dim)
        if group is not None:
            sent = torch.full((ep, local), tokens, device=hidden.device)
            sizes, received = _on_host(sent, exchange_counts(sent, group), ep * local * tokens)
            counts, flat = [size // local for size in received], exchange(flat, received, sizes, group)
            pieces = torch.split(flat, received)
            flat = torch.cat([piece.view(local, -1, dim) for piece in pieces], 1).reshape(-1, dim)
        outputs = compute(_local_experts(module), flat).view(local, -1, dim)
        if group is not None:
            flat = torch.cat([piece.reshape(-1, dim) for piece in torch.split(outputs, counts, 1)])
            outputs = exchange(flat, sizes, received, group)
        outputs = outputs.reshape(1, ep, local, -1, dim)
        if placement.tp is not None:
            outputs = all_gather_replicated(outputs, 0, placement.tp)
        return outputs.transpose(0, 1).reshape(-1, dim)

    interrupting: Callable[..., Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return interrupting


def _local(param: Tensor) -> Tensor:
    assert is_sharded(param)
    return param.to_local()


def _in_compute_dtype(hidden: Tensor) -> Tensor:
    """Return `hidden` as autocast would cast it for the first matrix product: this halves the bytes to send."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def _balanced(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return what `_on_host` would if choices were spread evenly."""
    ranks = sent.shape[0]
    even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return even, even


@on_fake_tensors(_balanced)
def _on_host(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return how many rows are sent to and received from each rank, as numbers. Waits for the device."""
    sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return sizes[0], sizes[1]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold experts, by name.

    They are recognized by direct parameters that all have a slice per expert, at least one of them with three
    dimensions (a stack of matrices), and by an attribute `num_experts` that says so, or a forward that takes hidden
    states, chosen experts and their weights.
    """
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def apply_expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, replicated: Callable[[str], bool] | None = None, stage: bool = False
) -> dict[str, nn.Module]:
    """Shard the experts of a model over the ranks of a mesh, in place; return the sharded modules by name.

    The mesh has the axis `ep`, whose ranks have different tokens, or `tp`, whose ranks have the same, or both. The
    parameters of experts become `DTensor`s with `Shard(0)` over all ranks of the mesh as one axis; their names stay.
    The forward of the modules is replaced: it sends tokens to their experts, calls the module's own forward with this
    rank's experts, and combines the outputs. Input and output are the same on all ranks of `tp`. Modules for whose name
    `replicated` returns true are not sharded over `tp`.

    The model may be on the meta device; otherwise the parameters must be equal on all ranks already. With `ep`, a model
    that `check_experts` refuses is an error; it is not checked for a pipeline `stage`, which may have no experts.
    """
    axes = mesh.mesh_dim_names or ()
    if not stage and "ep" in axes:
        check_experts(model, mesh.size(axes.index("ep")))
    sharded = {}
    for name, module in expert_modules(model).items():
        expert_mesh: DeviceMesh | None = mesh
        if "tp" in axes and (
            not _is_shardable(module, mesh.size())
            or _is_placed(module)
            or (replicated is not None and replicated(name))
        ):
            expert_mesh = mesh["ep"] if "ep" in axes else None
        if expert_mesh is None:
            continue  # replicated, or sharded by the tensor plan
        placement = ExpertPlacement.on(expert_mesh, _expert_count(module))
        compute = type(module).forward
        for key, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, _shard_experts(param, placement))
        module.forward = make_forward(module, compute, placement)
        sharded[name] = module
    return sharded


def expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return the `shard_placement_fn` of `fully_shard` for the parameters of `expert_modules`, over `ranks`.

    It shards the rows or columns of each expert's matrix, whichever divide by `ranks` first, so that a shard has
    a rectangle of every matrix. If neither do, it shards dimension 0, the experts, which are sharded already.
    """

    def shard_dim(param: nn.Parameter) -> Shard | None:
        dim = next((dim for dim in range(1, param.ndim) if param.shape[dim] % ranks == 0), None)
        if isinstance(param, DTensor):
            _check_shards(param.shape, param.device_mesh.size(), ranks, even=dim is not None)
        return None if dim is None else Shard(dim)

    return shard_dim


def _check_shards(shape: torch.Size, over: int, ranks: int, *, even: bool) -> None:
    """Raise a `ConfigError` for stacks, sharded over `over` ranks, that `fully_shard` cannot shard again over `ranks`.

    `even`: it would shard rows or columns, not experts.
    """
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
    """Return whether every rank has an expert if each has equally many, rounded up, in order."""
    return (ranks - 1) * -(-experts // ranks) < experts


def _holds_experts(module: nn.Module) -> bool:
    stacks = list(module.parameters(recurse=False))
    if not any(stack.ndim == 3 for stack in stacks) or any(stack.ndim < 2 for stack in stacks):
        return False
    declared = getattr(module, "num_experts", None)
    experts = declared if isinstance(declared, int) else _expert_count(module) if _takes_routed_tokens(module) else 0
    return all(stack.shape[0] == experts for stack in stacks)


def _has_stacks(module: nn.Module) -> bool:
    return "expert" in type(module).__name__.lower() and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _expert_count(module: nn.Module) -> int:
    return len(next(module.parameters(recurse=False)))


def check_experts(model: nn.Module, ranks: int) -> None:
    """Raise an error for a model without experts, or whose experts cannot be sharded over `ranks` ranks."""
    modules = expert_modules(model)
    if not modules:
        message = f"no experts that could be sharded over {ranks} ranks were found in a {type(model).__name__}"
        stacks = (name for name, module in model.named_modules() if _has_stacks(module))
        if (nearest := next(stacks, None)) is not None:
            message += f": the 3-D parameters of {nearest!r} do not have one slice per expert each"
        raise ConfigError(Problem("strategy.layout.ep", message, "Leave it out, or use a mixture of experts."))
    for name, module in modules.items():
        experts = _expert_count(module)
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
        if not _is_shardable(module, ranks):
            raise ModelError(
                f"the experts of {where} cannot be sharded over ranks: its forward takes neither hidden states, chosen "
                "experts and their weights, nor the same number of rows for every expert. Set strategy.layout.ep: 1"
            )


def _takes_routed_tokens(module: nn.Module) -> bool:
    """Return whether a module's forward takes hidden states, chosen experts and their weights."""
    return len(inspect.signature(type(module).forward).parameters) == 4  # these three and `self`


def _is_shardable(module: nn.Module, ranks: int) -> bool:
    """Return whether the experts of a module can be computed on different ranks."""
    return _takes_routed_tokens(module) or (_expert_count(module) % ranks == 0 and _takes_equal_batches(module))


def _takes_equal_batches(module: nn.Module) -> bool:
    """Return whether a module's forward takes the rows of all experts, one expert's after the other's.

    That is tested with small matrices: the outputs of two experts are those that each one has on its own.
    """
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    stacks = {key: param.shape[1:] for key, param in module.named_parameters(recurse=False)}
    hidden = getattr(module, "hidden_size", None)
    least = min((size for shape in stacks.values() for size in shape if size != hidden), default=1)
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    try:
        with disable_current_modes(), torch.no_grad(), torch.device("cpu"):
            small = {key: [size if size == hidden else 4 * (size // least) for size in stacks[key]] for key in stacks}
            values = {key: normal(2, *shape) for key, shape in small.items()}
            rows = normal(2 * 3, int(hidden))  # type: ignore[arg-type]
            compute: Any = type(module).forward
            both = compute(_Experts(module, values), rows)
            ones = [{key: value[i : i + 1] for key, value in values.items()} for i in range(2)]
            outputs = [compute(_Experts(module, ones[i]), rows[3 * i : 3 * i + 3]) for i in range(2)]
            return both.shape == rows.shape and torch.allclose(both, torch.cat(outputs), rtol=1e-3, atol=1e-4)
    except Exception:  # its input is something else
        return False


def _is_placed(module: nn.Module) -> bool:
    """Return whether parameters of a module are DTensors already."""
    return any(isinstance(param, DTensor) for param in module.parameters(recurse=False))


def _shard_experts(param: nn.Parameter, placement: ExpertPlacement) -> nn.Parameter:
    local = param.detach()[placement.local_experts()].clone()  # a view would keep the memory of all experts
    dtensor = DTensor.from_local(
        local, placement.mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
    )
    return nn.Parameter(dtensor, requires_grad=param.requires_grad)
