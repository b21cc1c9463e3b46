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
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from plait.distributed.dtensor import is_sharded
from plait.distributed.world import as_one_axis
from plait.errors import ConfigError, ModelError, Problem
from plait.fake_tensors import on_fake_tensors
from plait.torch_internals import functional_collectives as funcol

# Collectives that gradients go through.


def exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent[r]` rows, in order, to each rank r of the group; get `received[r]` from each, in order.

    The gradient goes the way back.
    """
    result: Tensor = _TokenExchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return result


def exchange_counts(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row r of `sent` (ranks, …) goes to rank r; what comes back has each rank's row for this one."""
    return _all_to_all(sent, [1] * len(sent), [1] * len(sent), group)


def sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, each of which goes on computing with it: so gradients are summed as well."""
    result: Tensor = _Sum.apply(sums, group)  # type: ignore[no-untyped-call]
    return result


def for_own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor that all ranks have alike, and of which each uses some: gradients are summed."""
    result: Tensor = _Spread.apply(whole, group)  # type: ignore[no-untyped-call]
    return result


def total(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, which all of them use alike: the gradient is every rank's own."""
    result: Tensor = _Total.apply(part, group)  # type: ignore[no-untyped-call]
    return result


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = sent, received, group
        result = _all_to_all(rows, received, sent, group)
        # Recomputation stops after the last tensor that was kept. Every rank has to come as far as here, whatever
        # its rows ask for, so something is kept here.
        ctx.save_for_backward(result.new_empty(0))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.way_back), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(sums.new_empty(0))  # as in `_Exchange`
        return _all_reduce(sums, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_to_all_single(rows.contiguous(), received, sent, group))


def _all_reduce(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(funcol.all_reduce(sums.contiguous(), "sum", group))


def _wait(on_its_way: Tensor) -> Tensor:
    arrived: Tensor = funcol.wait_tensor(on_its_way)  # type: ignore[no-untyped-call]
    return arrived


# Rows of a batch that several ranks share: what routers sum up over a row.


def share_router_sums(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tell the routers of a model that each row of a batch lies in parts on the ranks of a 1-D mesh, in place.

    Their balance and z loss are then those of the whole row, on each of its ranks, and a row's choices count as load
    wherever its targets are. For each of the two, where there is such a loss or a bias that balances, it takes one
    small sum a router and forward, and one backward.
    """
    assert mesh.ndim == 1, "rows are cut along one axis"
    for module in model.modules():
        if not hasattr(module, "sum_over_row"):
            continue
        if getattr(module, "capacity_factor", None) is not None:
            message = f"an expert's capacity is counted along a row, and here rows are cut over {mesh.size()} ranks"
            remedy = "leave it out, or set strategy.layout.cp: 1"
            raise ConfigError(Problem("model.capacity_factor", message, remedy))
        router: Any = module
        router.sum_over_row = partial(sum_over_ranks, group=mesh.get_group())


# Which rank has which experts.
#
# [Note: experts are cut over tp too]
# The ranks of `ep` see different tokens, those of `tp` the same ones. Along `tp` nothing has to be sent to an expert:
# each rank takes the choices that fall on its own experts, and the answers of all ranks are added up. So a rank of `tp`
# has its share of the experts' memory and work, and of what goes over `ep`. Whole experts, not columns of each: their
# products stay as large as they were, and a stack stays a plain rectangle, however a model packs its matrices.


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts of one module, evenly in their order over `ep`, and inside a rank of `ep` over `tp`.

    Where they do not divide, the last ranks have fewer, or none.
    """

    experts: int
    mesh: DeviceMesh
    """All ranks that have some, as one axis: that along which stacks are cut."""
    ep: dist.ProcessGroup | None
    """Ranks that see other tokens and have other experts."""
    tp: dist.ProcessGroup | None
    """Ranks that see the same tokens and have other experts."""

    @classmethod
    def on(cls, mesh: DeviceMesh, experts: int) -> ExpertPlacement:
        """On a mesh of `ep`, of `tp`, or of both in this order."""
        names = mesh.mesh_dim_names or ()
        assert names in (("ep",), ("tp",), ("ep", "tp")), "experts are spread over ep and tp"
        ep, tp = (mesh.get_group(axis) if axis in names else None for axis in ("ep", "tp"))
        return cls(experts, as_one_axis(mesh), ep, tp)

    @property
    def senders(self) -> int:
        """How many ranks exchange rows."""
        return 1 if self.ep is None else self.ep.size()

    @property
    def sharers(self) -> int:
        """How many ranks see the same tokens."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def share(self) -> int:
        """The most experts that one rank has."""
        return -(-self.experts // self.mesh.size())

    def of_rank(self) -> slice:
        """The experts of this rank."""
        first = self.mesh.get_local_rank() * self.share
        return slice(min(first, self.experts), min(first + self.share, self.experts))

    def own(self, index: Tensor) -> Tensor:
        """Choices of experts, counted anew without those that other ranks of `tp` have.

        Each rank of `ep` counts `share`, one after the other; a choice that falls elsewhere, or on no expert, becomes
        the number behind the last.
        """
        if self.tp is None:
            return index
        rank = index // self.share
        here = (rank % self.sharers == self.tp.rank()) & (index < self.experts)
        return (rank // self.sharers * self.share + index % self.share).where(here, self.senders * self.share)


# Rows to their experts and back, over the ranks that hold them.


def spread_forward(module: nn.Module, compute: Callable[..., Tensor], seats: ExpertPlacement) -> Callable[..., Tensor]:
    """A forward for `module` whose experts have these `seats`; `compute` is the forward of its class.

    [Note: every rank makes the whole journey]
    Ranks choose differently, and still all of them take part in every exchange, forward and backward: a rank
    that has no rows sends none, and one whose experts nobody chose receives none, and its experts get a gradient
    of zeros. Nothing is skipped, so nobody waits for a rank that had nothing to do.
    """
    signature = inspect.signature(compute)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _, hidden, index, weights = signature.bind(module, *args, **kwargs).args
        if seats.tp is not None:
            hidden, weights = for_own_part(hidden, seats.tp), for_own_part(weights, seats.tp)
        journey = _Journey(index, seats)
        rows = journey.there(_in_compute_dtype(hidden))
        answers = journey.back(_answers(module, compute, rows, journey))
        weighted: Tensor = answers * weights[..., None]
        answer = weighted.sum(1).to(hidden.dtype)
        return answer if seats.tp is None else total(answer, seats.tp)

    # The sizes of an exchange are data, so a compiled block is interrupted here.
    interrupting: Callable[..., Tensor] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return interrupting


class _Journey:
    """The way of one forward's rows: each choice of each token is a row, which goes to its expert and returns."""

    def __init__(self, index: Tensor, seats: ExpertPlacement) -> None:
        """`index` (tokens, top_k) are the chosen experts; their number itself stands for a choice that was dropped."""
        self._group = seats.ep
        self._shape = index.shape
        ranks, share = seats.senders, seats.share
        chosen, self._order = seats.own(index).flatten().sort(stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(ranks * share + 1, device=index.device))
        sent = bounds.diff().view(ranks, share)
        received = sent if self._group is None else exchange_counts(sent, self._group)
        self._sent, self._received = _on_host(sent, received, index.numel() // seats.sharers)
        own = torch.arange(share, device=index.device).repeat(ranks)
        self.experts = own.repeat_interleave(received.flatten(), output_size=sum(self._received))
        """For each row that arrives, which of this rank's experts it is for."""

    def there(self, hidden: Tensor) -> Tensor:
        """The rows that arrive here, by where they come from."""
        tokens, top_k = self._shape
        # Repeated, then reordered: both have a gradient that adds up in a fixed order.
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, hidden.shape[1])
        rows = rows.index_select(0, self._order[: sum(self._sent)])
        return rows if self._group is None else exchange(rows, self._received, self._sent, self._group)

    def back(self, answers: Tensor) -> Tensor:
        """The answers to this rank's tokens (tokens, top_k, dim); zeros for choices that were dropped or not sent."""
        tokens, top_k = self._shape
        if self._group is not None:
            answers = exchange(answers, self._sent, self._received, self._group)
        if dropped := len(self._order) - len(answers):
            answers = F.pad(answers, (0, 0, 0, dropped))
        places = torch.arange(len(self._order), device=answers.device)
        back = torch.empty_like(self._order).scatter(0, self._order, places)
        return answers.index_select(0, back).reshape(tokens, top_k, answers.shape[1])


def _answers(module: nn.Module, compute: Callable[..., Tensor], rows: Tensor, journey: _Journey) -> Tensor:
    """What this rank's experts say to rows that are theirs."""
    local = _Local(module)
    if len(rows) == 0:
        # Not one row: the experts still take part; see [Note: every rank makes the whole journey].
        for stack in local.stacks:
            rows = rows + stack.flatten()[:1].sum() * 0.0
        return rows
    ones = torch.ones(len(rows), 1, dtype=torch.float32, device=rows.device)
    return compute(local, rows, journey.experts[:, None], ones)


class _Local:
    """A module as its own forward sees it, with no experts but this rank's."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: _local(param) for name, param in module.named_parameters(recurse=False)}
        self.__dict__.update(own)
        self.stacks = list(own.values())
        self.num_experts = len(self.stacks[0])
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _local(param: Tensor) -> Tensor:
    assert is_sharded(param)
    return param.to_local()


def _in_compute_dtype(hidden: Tensor) -> Tensor:
    """Autocast would round at the first product; rounded before, only half as much is sent."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def _evenly(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    ranks = sent.shape[0]
    even = [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    return even, even


@on_fake_tensors(_evenly)
def _on_host(sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many rows go to and come from each rank. Waits for the device."""
    sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return sizes[0], sizes[1]


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
        seats = ExpertPlacement.on(over, int(module.num_experts))  # type: ignore[arg-type]
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


def _own_experts(param: nn.Parameter, seats: ExpertPlacement) -> nn.Parameter:
    own = param.detach()[seats.of_rank()].clone()  # a view would keep the others' memory
    whole = DTensor.from_local(own, seats.mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride())
    return nn.Parameter(whole, requires_grad=param.requires_grad)
