"""What every style of tensor parallelism has in common."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from plait.distributed.collectives import all_gather_flat, reduce_scatter_flat
from plait.errors import ConfigError, ModelError, Problem
from plait.torch_internals import tree_map

# Random numbers inside tensor-parallel work.
#
# [Note: whose dropout is whose]
# Where all ranks of a tensor-parallel group do the same work on whole activations, they must drop the same elements,
# so torch's default generator has to be in the same state on all of them: the engine seeds it with a number that
# depends on the data a rank sees, not on its place in the group. Where they share the work (heads, hidden features,
# parts of the sequence), each needs numbers of its own. There the generator is seeded for the time being from one
# draw of the common state and the rank. Nothing is kept between steps: recomputation, which restores the common
# state, repeats the same numbers, and a checkpoint needs no more than the default generator's state.


def drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers while training: a dropout layer, or a number above 0 of that name."""
    return any(
        ("drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(part).__name__))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        for part in module.modules()
        for key, value in vars(part).items()
    )


class OwnRandom:
    """Random numbers of this rank's own, from `begin` to `end`. See [Note: whose dropout is whose]."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: tuple[torch.Generator, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """From here on the default generator gives numbers of this rank's own."""
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
            drawn, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)  # so that the next draw is another one; offsets go in fours
        else:
            generator = torch.default_generator
            drawn, offset = int(torch.randint(2**62, (), generator=generator)), 0
        self._common = generator, generator.get_state()
        seeds = np.random.SeedSequence([abs(drawn), offset, self._rank])
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))

    def end(self) -> None:
        """From here on the common numbers go on, wherever that is said first."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None

    @contextmanager
    def within(self, device: torch.device) -> Iterator[None]:
        """From `begin` to `end`, also where something goes wrong in between."""
        self.begin(device)
        try:
            yield
        finally:
            self.end()


# Moving tensors into and out of tensor-parallel work. Each move has its own way back.
#
# | move       | forward                   | backward                  | from → to                                     |
# |------------|---------------------------|---------------------------|-----------------------------------------------|
# | `spread`   | –                         | sum                       | whole → whole, of which each rank uses a part |
# | `total`    | sum                       | –                         | summands → whole                              |
# | `gather`   | gather                    | sum, keep own part        | parts → whole, of which each rank uses a part |
# | `scatter`  | sum, keep own part        | gather                    | summands → parts                              |
# | `cut`      | keep own part             | gather                    | whole → parts                                 |
# | `join`     | gather                    | keep own part             | parts → whole, which all ranks use alike      |
# | `exchange` | all-to-all                | all-to-all                | rows of everyone's part → own part, whole     |
#
# "Whole" is the same on every rank. The difference between `gather` and `join` is what comes back: where the ranks
# share the work that follows, each has a summand of the gradient; where all do the same work, each has all of it.


Way = Callable[[Tensor, int, dist.ProcessGroup], Tensor]


def spread(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand a whole tensor to work that the ranks share."""
    return _moved(x, _keep, _sum, 0, group)


def spread_parameter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`spread` for a parameter: the gradient's summands are added in fp32, whatever their dtype."""
    return _moved(x, _keep, _sum_in_fp32, 0, group)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what every rank has."""
    return _moved(x, _sum, _keep, 0, group)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All parts along `dim`, for work that the ranks share."""
    return _moved(x, _gather, _scatter, dim, group)


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along `dim`, of the sum of what every rank has."""
    return _moved(x, _scatter, _gather, dim, group)


def cut(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part, along `dim`, of a whole tensor."""
    return _moved(x, _cut, _gather, dim, group)


def join(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All parts along `dim`, for work that every rank does alike."""
    return _moved(x, _gather, _cut, dim, group)


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of (ranks, …), row r goes to rank r; what comes from rank r becomes row r."""
    return _moved(x, _exchange, _exchange, 0, group)


def _moved(x: Tensor, forward: Way, backward: Way, dim: int, group: dist.ProcessGroup) -> Tensor:
    moved: Tensor = _Move.apply(x, forward, backward, dim % max(x.ndim, 1), group)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Way, backward: Way, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.backward_way, ctx.dim, ctx.group = backward, dim, group
        return forward(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.backward_way(grad, ctx.dim, ctx.group), None, None, None, None


def _keep(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _sum_in_fp32(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return _sum(x.float(), dim, group).to(x.dtype)


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_flat(parts, x.contiguous(), group=group)
    if dim == 0:
        return parts
    if x.shape[0] == 1 and dim == 1:
        return parts.flatten(0, 1)[None]  # in the right order already
    return torch.cat(parts.chunk(group.size()), dim)


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim))
    own = parts.new_empty((parts.shape[0] // group.size(), *parts.shape[1:]))
    reduce_scatter_flat(own, parts, group=group)
    return own


def _cut(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    share = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * share, share).clone(memory_format=torch.contiguous_format)


def _exchange(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


# Parameters as DTensors on the tensor-parallel mesh, and as this rank's plain tensor while the model computes.
#
# [Note: DTensors at rest, plain tensors at work]
# What a rank holds of a parameter is a DTensor, so that sharding, checkpoints and gradient norms know what it is a
# part of. The computation sees its local tensor only. Each operation on a DTensor would work out its placement anew,
# cover fewer operations than models use, and refuse parts of unequal size; here one `to_local` a parameter says all
# that is needed. Its gradient comes back as a DTensor of the same placement.


SIZE_KEY = "strategy.layout.tp"
"""The setting that says how many ranks share a tensor."""


class Placed:
    """Turns parameters of one model into DTensors; a shared parameter becomes one, shared as before."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def split(self, module: nn.Module, key: str, dim: int) -> None:
        """This rank keeps its part along `dim`. Parts are as even as `torch.chunk` makes them."""
        self._place(module, key, Shard(dim))

    def repeat(self, module: nn.Module, key: str) -> None:
        """This rank keeps all of it."""
        self._place(module, key, Replicate())

    def left_behind(self, model: nn.Module) -> Iterator[str]:
        """Names under which a parameter is still held that was placed under another name."""
        for name, module in model.named_modules():
            for key, param in module._parameters.items():
                if param is not None and id(param) in self._made:
                    yield f"{name}.{key}" if name else key

    def _place(self, module: nn.Module, key: str, placement: Placement) -> None:
        param = module._parameters.get(key)
        if param is None:
            return
        if id(param) not in self._made:
            self._made[id(param)] = param, _dtensor(param, self._mesh, placement)
        made = self._made[id(param)][1]
        if made.data.placements != (placement,):  # type: ignore[attr-defined]
            raise ModelError(
                f"{key!r} of a {type(module).__name__} is shared with another module, and the tensor plan places it "
                f"once as {made.data.placements[0]} and once as {placement}"  # type: ignore[attr-defined]
            )
        module._parameters[key] = made


def _dtensor(param: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    if isinstance(param, DTensor):
        raise ModelError("tensor parallelism was applied to a parameter that is a DTensor already; apply it first")
    whole = param.detach()
    local = whole
    if isinstance(placement, Shard):
        start, length = chunk_of(whole.shape[placement.dim], mesh.size(), mesh.get_local_rank())
        # A copy of its own, so that the whole can go.
        local = whole.narrow(placement.dim, start, length).clone(memory_format=torch.contiguous_format)
    placed = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(placed, requires_grad=param.requires_grad)


def chunk_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """Start and length of one rank's part, as `torch.chunk` cuts: the last parts may be shorter, or empty."""
    share = -(-length // size)
    start = min(rank * share, length)
    return start, min(share, length - start)


def sharding_dim(param: Tensor, shards: int) -> int:
    """The dim along which `fully_shard` is to cut a parameter further, over `shards` ranks; for `shard_placement_fn`.

    Torch describes rows that are cut twice rightly only where the first cut was even. A vocabulary that does not
    divide by the tensor-parallel ranks is therefore cut along its features. Anything else is cut by rows.
    """
    if not isinstance(param, DTensor) or shards == 1:
        return 0
    rows, size = param.shape[0], param.device_mesh.size()
    if param.placements != (Shard(0),) or rows % size == 0:
        return 0
    if param.ndim > 1 and param.shape[1] % shards == 0:
        return 1
    raise ConfigError(
        Problem(
            SIZE_KEY,
            f"a parameter of shape {tuple(param.shape)} is shared unevenly by {size} ranks, so it cannot be sharded "
            f"further by rows, and its other dim does not divide by {shards}",
            f"Make the vocabulary {-(-rows // size) * size} words large, or use another dp_shard.",
        )
    )


def own(module: nn.Module, key: str) -> Tensor | None:
    """This rank's tensor of a parameter that is split, or that all ranks use alike."""
    param = module._parameters.get(key)
    return param.to_local() if isinstance(param, DTensor) else param


def shared(module: nn.Module, key: str, group: dist.ProcessGroup) -> Tensor | None:
    """This rank's tensor of a repeated parameter that each rank uses for other work: gradients are summed."""
    param = module._parameters.get(key)
    return spread_parameter(param.to_local(), group) if isinstance(param, DTensor) else param


def read_shared(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the module's own code see its `shared` tensor where it reads one of its direct parameters.

    The class of this one module is extended by properties of the parameters' names, as torch's parametrizations
    do it. So any code of a norm or a router works on plain tensors, and names and registration stay.
    """
    original = type(module)
    members = {key: _reader(key, group) for key, param in module._parameters.items() if param is not None}
    if members:
        module.__class__ = type(original.__name__, (original,), {"__module__": original.__module__, **members})


def _reader(key: str, group: dist.ProcessGroup) -> property:
    def read(module: nn.Module) -> Tensor | None:
        param = module._parameters[key]
        # What `fully_shard` keeps between uses lies on its own axes too, and is for nobody else to compute with.
        at_rest = isinstance(param, DTensor) and len(param.placements) > 1
        return param if at_rest else shared(module, key, group)

    return property(read)


PLAN_KEY = "strategy.tensor.plan"
"""The setting that holds a user's own plan."""
SEQUENCE_KEY = "strategy.tensor.sequence_parallel"
"""The setting that asks for sequence parallelism."""


@dataclass(frozen=True, slots=True)
class Site:
    """One module of the plan, and what is known of its surroundings."""

    name: str
    module: nn.Module
    parent: nn.Module
    words: dict[str, str]
    """The whole plan: the word of each module name."""
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """The ranks that share the work."""
    size: int
    """How many they are."""
    rank: int
    """This rank's place among them."""
    placed: Placed
    sequence: bool
    """Whether sequence parallelism was asked for."""
    split: bool
    """Whether activations are split along the sequence here."""
    region: str | None
    """The outer module that has brought the input into tensor-parallel work already, if any."""
    random: dict[str, OwnRandom]
    """The random numbers of regions that need their own, by name."""

    def siblings(self, word: str) -> list[nn.Module]:
        """The parent's direct children that the plan gives a word to."""
        prefix = self.name.rpartition(".")[0]
        names = [name for name, child in self.parent.named_children()]
        return [
            self.parent.get_submodule(name)
            for name in names
            if self.words.get(f"{prefix}.{name}" if prefix else name) == word
        ]


class Style(ParallelStyle):
    """One word of a plan at one site."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def problems(self) -> list[Problem]:
        """What makes it impossible here; asked before anything is changed."""
        return []

    @abstractmethod
    def place(self) -> None:
        """Place the module's parameters and change its forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """What `parallelize_module` calls."""
        assert module is self.site.module
        assert device_mesh == self.site.mesh
        self.place()
        return module

    def wrong_module(self, wanted: str) -> list[Problem]:
        """The problem of a word that does not suit its module."""
        word = self.site.words[self.site.name]
        found = type(self.site.module).__name__
        return [Problem(PLAN_KEY, f"`{word}` works on {wanted}, but {self.site.name!r} is a {found}")]

    def indivisible(self, what: str, count: int) -> list[Problem]:
        """The problem of a count that the ranks cannot share evenly; none where they can."""
        if count % self.site.size == 0:
            return []
        sizes = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        message = f"{self.site.size} ranks cannot share {count} {what} of {self.site.name!r}"
        return [Problem(SIZE_KEY, message, f"sizes that can: {', '.join(sizes)}")]


def around(
    module: nn.Module,
    *,
    enter: Callable[[Tensor], Tensor] | None = None,
    leave: Callable[[Tensor], Tensor] | None = None,
    context: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
) -> None:
    """Change a module's main input and main output, and run it within a context.

    The main input is the first argument of its forward, by place or by name; the main output is what it returns,
    or the first element of that. `forward` is replaced on this one module, so no name changes.
    """
    inner = module.forward
    names = list(inspect.signature(inner).parameters)
    first = names[0] if names else ""

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get(first)
        assert isinstance(given, Tensor), f"{type(module).__name__} was called without its first input, {first!r}"
        if enter is not None:
            entered = enter(given)
            if args:
                args = (entered, *args[1:])
            else:
                kwargs[first] = entered
        with nullcontext() if context is None else context(given):
            output = inner(*args, **kwargs)
        if leave is None:
            return output
        if isinstance(output, tuple):
            return (leave(output[0]), *output[1:])
        return leave(output)

    module.forward = forward


def while_training(site: Site, random: OwnRandom) -> Callable[[Tensor], AbstractContextManager[Any]]:
    """The context of a rank's own random numbers for a module of the plan, while it trains."""

    def context(given: Tensor) -> AbstractContextManager[Any]:
        return random.within(given.device) if site.module.training else nullcontext()

    return context


# Linear layers whose columns or rows are shared by the ranks.
#
# Also for `transformers`' `Conv1D`, a linear layer with its weight the other way round.


class LinearStyle(Style):
    """A word for a linear layer."""

    def problems(self) -> list[Problem]:
        """Only a module that is a linear layer and nothing more can be computed in parts."""
        return [] if is_linear(self.site.module) else self.wrong_module("a linear layer")

    def enter(self, x: Tensor) -> Tensor:
        """Bring a layer's input into tensor-parallel work, unless an outer module has done so."""
        return enter_region(self.site, x) if self.site.region is None else x


class Colwise(LinearStyle):
    """Each rank has some of the output features."""

    def problems(self) -> list[Problem]:
        """Features are shared evenly: what follows expects the same number everywhere."""
        wrong = super().problems()
        return wrong or self.indivisible("output features", out_features(self.site.module))

    def place(self) -> None:
        """Split the weight by output features, and the bias."""
        module = self.site.module
        self.site.placed.split(module, "weight", 0 if _out_first(module) else 1)
        self.site.placed.split(module, "bias", 0)
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        return _multiply(module, self.enter(x), own(module, "weight"), own(module, "bias"))


class ColwiseGather(Colwise):
    """The same, but the output is put together again: for code that needs all features at once."""

    def _forward(self, x: Tensor) -> Tensor:
        return join(super()._forward(x), -1, self.site.group)


class Rowwise(LinearStyle):
    """Each rank has some of the input features, and the output is the sum over ranks."""

    def problems(self) -> list[Problem]:
        """Features are shared evenly, as by the layer before."""
        wrong = super().problems()
        return wrong or self.indivisible("input features", in_features(self.site.module))

    def place(self) -> None:
        """Split the weight by input features. The bias is added once, to the sum."""
        module = self.site.module
        self.site.placed.split(module, "weight", 1 if _out_first(module) else 0)
        if self.site.split:
            self.site.placed.repeat(module, "bias")
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        random = self.site.random.get(self.site.region or "")
        if random is not None:
            random.end()
        y = leave_region(self.site, _multiply(module, x, own(module, "weight"), None))
        # On a part of the sequence each rank has a summand of the bias's gradient; on the whole, all of it.
        bias = shared(module, "bias", self.site.group)
        return y if bias is None else y + bias.to(y.dtype)


class RowwiseSplit(Rowwise):
    """The same, for an input that every rank has whole: each takes its features of it."""

    def _forward(self, x: Tensor) -> Tensor:
        return super()._forward(cut(x, -1, self.site.group))


class HeadParallel(Colwise):
    """The projection to queries: each rank has whole attention heads."""

    def problems(self) -> list[Problem]:
        """There must be as many heads for every rank."""
        wrong = LinearStyle.problems(self) or _no_head_dim(self)
        return wrong or self.indivisible("attention heads", head_count(self.site, self.site.module))


class KvHeads(LinearStyle):
    """The projection to keys or values, which may have fewer heads than there are ranks.

    Where the ranks can share the heads evenly, each has its own. Where not, each rank keeps all of the (small)
    weight, computes the heads that its queries attend to, and the gradients are summed.
    """

    def problems(self) -> list[Problem]:
        """It goes with the one `heads` beside it."""
        wrong = super().problems() or _no_head_dim(self)
        if not wrong and len(self.site.siblings("heads")) != 1:
            wrong = self.wrong_module("a layer that has one `heads` beside it")
        return wrong

    def place(self) -> None:
        """Split the heads, or repeat them."""
        site, module = self.site, self.site.module
        queries = head_count(site, site.siblings("heads")[0])
        heads = head_count(site, module)
        mine = kv_heads_of(site.rank, site.size, queries=queries, heads=heads)
        if hasattr(site.parent, "num_key_value_groups"):  # how `transformers` pairs keys with queries
            setattr(site.parent, "num_key_value_groups", queries // site.size // len(mine))  # noqa: B010
        if heads % site.size == 0:
            Colwise(site).place()
            return
        for key in ("weight", "bias"):
            site.placed.repeat(module, key)
        module.forward = partial(self._forward, mine)

    def _forward(self, mine: list[int], x: Tensor) -> Tensor:
        module, head_dim = self.site.module, _head_dim(self.site)
        weight = shared(module, "weight", self.site.group)
        bias = shared(module, "bias", self.site.group)
        assert weight is not None
        weight = _pick(weight, 0 if _out_first(module) else 1, mine, head_dim)
        bias = None if bias is None else _pick(bias, 0, mine, head_dim)
        return _multiply(module, self.enter(x), weight, bias)


class QkvHeads(LinearStyle):
    """One projection to queries, keys and values beside each other, in equal thirds.

    [Note: a fused projection is stored by input features]
    A rank needs its heads of each third: three separate strips of output features. Checkpoints and sharding know
    parameters as rectangles, so the weight is split by *input* features, and the ranks exchange their pieces before
    the product. That moves 1/ranks of the weight, little beside the activations, and nothing has to know about it.
    """

    def problems(self) -> list[Problem]:
        """Three equal parts of whole heads, and input features that can be split too."""
        wrong = super().problems() or _no_head_dim(self)
        if wrong:
            return wrong
        if out_features(self.site.module) % (3 * _head_dim(self.site)):
            return self.wrong_module("a layer whose output is queries, keys and values of equal size")
        heads = self.indivisible("attention heads", head_count(self.site, self.site.module) // 3)
        return heads or self.indivisible("input features", in_features(self.site.module))

    def place(self) -> None:
        """Split the weight by input features; repeat the bias."""
        site, module = self.site, self.site.module
        site.placed.split(module, "weight", 1 if _out_first(module) else 0)
        site.placed.repeat(module, "bias")
        if hasattr(site.parent, "split_size"):  # where GPT-2 of `transformers` cuts the output
            setattr(site.parent, "split_size", out_features(module) // 3 // site.size)  # noqa: B010
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = own(module, "weight")
        assert weight is not None
        inputs = weight.t() if _out_first(module) else weight
        pieces = inputs.view(len(inputs), 3, site.size, -1).movedim(2, 0)  # (ranks, own inputs, 3, features)
        columns = exchange(pieces, site.group).flatten(0, 1).flatten(1)
        bias = shared(module, "bias", self.site.group)
        if bias is not None:
            bias = bias.view(3, site.size, -1)[:, site.rank].flatten()
        return F.linear(self.enter(x), columns.t(), bias)


def enter_region(site: Site, x: Tensor) -> Tensor:
    """From what the ranks have in common to work that they share."""
    return gather(x, 1, site.group) if site.split else spread(x, site.group)


def leave_region(site: Site, x: Tensor) -> Tensor:
    """From each rank's summand back to what they have in common."""
    return scatter(x, 1, site.group) if site.split else total(x, site.group)


def kv_heads_of(rank: int, size: int, *, queries: int, heads: int) -> list[int]:
    """The key/value heads that one rank's queries attend to, in the order in which it must compute them.

    Attention pairs each key/value head with the same number of queries. Where the rank's queries do not fall so,
    each of them gets a copy of its own.
    """
    count = queries // size
    wanted = [query // (queries // heads) for query in range(rank * count, (rank + 1) * count)]
    distinct = list(dict.fromkeys(wanted))
    even = all(wanted.count(head) * len(distinct) == count for head in distinct)
    return distinct if even else wanted


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes x · W + b and nothing else."""
    return type(module).forward is nn.Linear.forward or _is_conv1d(module)


def in_features(module: nn.Module) -> int:
    """How many numbers a token has before the layer."""
    return int(_weight(module).shape[1 if _out_first(module) else 0])


def out_features(module: nn.Module) -> int:
    """How many numbers a token has after the layer."""
    return int(_weight(module).shape[0 if _out_first(module) else 1])


def head_count(site: Site, module: nn.Module) -> int:
    """How many heads a projection computes."""
    return out_features(module) // _head_dim(site)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _out_first(module: nn.Module) -> bool:
    return not _is_conv1d(module)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _multiply(module: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    return F.linear(x, weight if _out_first(module) else weight.t(), bias)


def _pick(param: Tensor, dim: int, heads: list[int], head_dim: int) -> Tensor:
    picked = [param.narrow(dim, head * head_dim, head_dim) for head in heads]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim)


def _head_dim(site: Site) -> int:
    head_dim = site.parent.head_dim
    assert isinstance(head_dim, int)
    return head_dim


def _no_head_dim(style: Style) -> list[Problem]:
    """A problem, where the module around a projection does not say how wide a head is."""
    parent, module = style.site.parent, style.site.module
    head_dim = getattr(parent, "head_dim", None)
    if isinstance(head_dim, int) and out_features(module) % head_dim == 0:
        return []
    return style.wrong_module("a layer inside a module with an attribute `head_dim` that divides its output")


# The vocabulary, shared by the ranks: embedding and output head.
#
# The vocabulary need not divide by the number of ranks: the last rank then has fewer words. Nothing is padded, so the
# stored shape stays what it is.


class VocabEmbedding(Style):
    """Each rank looks up the words it has; a word that it has not is zero, and the ranks' results are added."""

    def problems(self) -> list[Problem]:
        """Options of `nn.Embedding` that look at the whole table cannot be had in parts."""
        module = self.site.module
        if not isinstance(module, nn.Embedding):
            return self.wrong_module("an nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return self.wrong_module("an nn.Embedding without max_norm, scale_grad_by_freq and sparse")
        return _too_few_words(self, module.num_embeddings)

    def place(self) -> None:
        """Split the table by words."""
        module = self.site.module
        assert isinstance(module, nn.Embedding)
        start, count = chunk_of(module.num_embeddings, self.site.size, self.site.rank)
        self.site.placed.split(module, "weight", 0)
        padding = module.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < start + count else None

        def forward(input: Tensor) -> Tensor:
            place = input - start
            mine = (place >= 0) & (place < count)
            found = _look_up(module, place.where(mine, 0), own_padding)
            # A word of another rank has found the first row here.
            return total(found.masked_fill(~mine[..., None], 0.0), self.site.group)

        setattr(module, "forward", forward)  # noqa: B010


def _look_up(module: nn.Embedding, rows: Tensor, padding: int | None) -> Tensor:
    """Vectors from this rank's part of the table, and what a subclass does to each of them."""
    table = own(module, "weight")
    assert table is not None
    if type(module).forward is nn.Embedding.forward:
        return F.embedding(rows, table, padding)
    whole = module._parameters["weight"], module.padding_idx
    module._parameters["weight"], module.padding_idx = table, padding  # type: ignore[assignment]
    try:
        return type(module).forward(module, rows)
    finally:
        module._parameters["weight"], module.padding_idx = whole


class VocabHead(Style):
    """Each rank computes the logits of the words it has.

    A plain linear layer answers with a DTensor that is split along the vocabulary, from which
    `models.common.loss.cross_entropy` computes the loss without gathering. Another module gets its weight as a
    DTensor and is expected to know what to do with it, as `models.common.head.LMHead` does.
    """

    def problems(self) -> list[Problem]:
        """Every rank needs at least one word."""
        module = self.site.module
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim != 2:
            return self.wrong_module("a head with a weight of (words, features)")
        return [] if weight is None else _too_few_words(self, weight.shape[0])

    def place(self) -> None:
        """Split the weight by words; a tied head has none, and is called with the embedding's."""
        site, module = self.site, self.site.module
        site.placed.split(module, "weight", 0)
        if is_linear(module):
            site.placed.split(module, "bias", 0)
            module.forward = self._linear
            return
        inner = module.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            weights = (module._parameters.get("weight"), *args, *kwargs.values())
            # A head that is tied to an embedding which no rank has a part of does whole work.
            shared = any(isinstance(weight, DTensor) for weight in weights)
            return inner(spread(hidden, site.group) if shared else hidden, *args, **kwargs)

        module.forward = forward

    def _linear(self, hidden: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = own(module, "weight")
        assert weight is not None
        logits = F.linear(spread(hidden, site.group), weight, own(module, "bias"))
        shape = (*logits.shape[:-1], out_features(module))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, site.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )


def answer_whole(model: nn.Module) -> None:
    """Have the model's callers see whole tensors where it would answer with DTensors (logits, without labels)."""
    inner = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, inner(*args, **kwargs))

    model.forward = forward


def _too_few_words(style: Style, words: int) -> list[Problem]:
    size = style.site.size
    if chunk_of(words, size, size - 1)[1] > 0:
        return []
    message = f"{size} ranks cannot share the {words} words of {style.site.name!r}: some would have none"
    return [Problem(SIZE_KEY, message, "Use fewer ranks for it.")]
