"""Tensor-parallel styles: how one module is sharded, column-wise, row-wise, by heads or along the vocabulary."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
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

from plait.distributed.collectives import (
    all_gather,
    all_gather_replicated,
    all_reduce,
    all_to_all,
    copy_param_to_region,
    copy_to_region,
    reduce_scatter,
    split,
)
from plait.errors import ConfigError, ModelError, Problem
from plait.torch_internals import disable_current_modes, tree_map

# ---- random numbers inside tensor-parallel regions
#
# [Note: whose dropout is whose]
# All ranks of a tensor-parallel group compute the same on replicated activations, so dropout there must be the same on
# all of them. Torch's default generator has the same state on all of them (the *common state*): the engine seeds it by
# the data that a rank reads, not by its rank in the group. On sharded activations (heads, hidden features, parts of the
# sequence) each rank needs other random numbers. While these are computed, the default generator is seeded with one
# number drawn from the common state, and the rank. Afterwards the common state is restored. So recomputation, which
# restores the common state, draws the same numbers, and a checkpoint needs only the default generator's state.


def draws_random(module: nn.Module) -> bool:
    """Return whether a module draws random numbers while training.

    That is judged by attributes: a number above 0 with `drop` or `jitter` in its name, or the `p` of a dropout layer.
    """
    return any(
        ("drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(submodule).__name__))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        for submodule in module.modules()
        for key, value in vars(submodule).items()
    )


class RankRng:
    """Makes torch's default generator draw numbers of this rank, from `begin` to `end`.

    See [Note: whose dropout is whose].
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: tuple[torch.Generator, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """Keep the common state, and seed the default generator for this rank."""
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
            drawn, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)  # so that the next draw differs; offsets are multiples of four
        else:
            generator = torch.default_generator
            drawn, offset = int(torch.randint(2**62, (), generator=generator)), 0
        self._common = generator, generator.get_state()
        seeds = np.random.SeedSequence([abs(drawn), offset, self._rank])
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))

    def end(self) -> None:
        """Restore the common state; does nothing if `begin` was not called since the last `end`."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None

    @contextmanager
    def fork(self, device: torch.device) -> Iterator[None]:
        """Return a context that calls `begin` and `end`."""
        self.begin(device)
        try:
            yield
        finally:
            self.end()


# ---- parameters: DTensors on the tensor-parallel mesh, plain local tensors while the model computes
#
# [Note: DTensors at rest, plain tensors at work]
# A parameter is a DTensor, so that sharding, checkpoints and gradient norms know its global shape. The model computes
# with its local tensor (`to_local`). Computing with DTensors would propagate placements in every operation, and would
# raise for uneven shards and for operations that DTensor does not support. The gradient is a DTensor with the same
# placement.


SIZE_KEY = "strategy.layout.tp"
"""The config key of the number of tensor-parallel ranks."""


class DTensorParams:
    """Turns parameters of one model into DTensors; a tied parameter becomes one DTensor, tied as before."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def shard(self, module: nn.Module, key: str, dim: int) -> None:
        """Shard a parameter along `dim`, in chunks as even as those of `torch.chunk`."""
        self._convert(module, key, Shard(dim))

    def replicate(self, module: nn.Module, key: str) -> None:
        """Replicate a parameter."""
        self._convert(module, key, Replicate())

    def unplaced(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of parameters that are tied to one that has become a DTensor, but are still plain tensors."""
        for name, module in model.named_modules():
            for key, param in module._parameters.items():
                if param is not None and id(param) in self._placed:
                    yield f"{name}.{key}" if name else key

    def _convert(self, module: nn.Module, key: str, placement: Placement) -> None:
        param = module._parameters.get(key)
        if param is None:
            return
        if id(param) not in self._placed:
            self._placed[id(param)] = param, _make_dtensor(param, self._mesh, placement)
        placed = self._placed[id(param)][1]
        if placed.data.placements != (placement,):  # type: ignore[attr-defined]
            raise ModelError(
                f"{key!r} of a {type(module).__name__} is shared with another module, and the tensor plan places it "
                f"once as {placed.data.placements[0]} and once as {placement}"  # type: ignore[attr-defined]
            )
        module._parameters[key] = placed


def _make_dtensor(param: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    if isinstance(param, DTensor):
        raise ModelError("tensor parallelism was applied to a parameter that is already a DTensor; apply it first")
    full = param.detach()
    local = full
    if isinstance(placement, Shard):
        start, length = chunk_of(full.shape[placement.dim], mesh.size(), mesh.get_local_rank())
        # A copy, so that the full tensor can be freed.
        local = full.narrow(placement.dim, start, length).clone(memory_format=torch.contiguous_format)
    dtensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())
    return nn.Parameter(dtensor, requires_grad=param.requires_grad)


def chunk_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """Return start and length of one rank's chunk, as in `torch.chunk`: the last ones may be shorter, or empty."""
    share = -(-length // size)
    start = min(rank * share, length)
    return start, min(share, length - start)


def sharding_dim(param: Tensor, shards: int) -> int:
    """Return the dimension along which `fully_shard` shards a parameter over `shards` ranks; for `shard_placement_fn`.

    DTensor describes rows that are sharded twice, by tensor parallelism and by `fully_shard`, correctly only if the
    tensor-parallel shards are of equal size. So a vocabulary that does not divide by the tensor-parallel ranks is
    sharded along features (dimension 1), anything else by rows (0). Features that do not divide raise a `ConfigError`.
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
            f"a parameter of shape {tuple(param.shape)} is sharded unevenly over {size} ranks, so its rows cannot be "
            f"sharded further, and its other dimension does not divide by {shards}",
            f"Make the vocabulary {-(-rows // size) * size} tokens large, or use another dp_shard.",
        )
    )


def local_param(module: nn.Module, key: str) -> Tensor | None:
    """Return the local tensor of a parameter that is sharded, or that all ranks use for the same computation."""
    param = module._parameters.get(key)
    return param.to_local() if isinstance(param, DTensor) else param


def replicated_param(module: nn.Module, key: str, group: dist.ProcessGroup) -> Tensor | None:
    """Return the local tensor of a replicated parameter that ranks use for different activations.

    In the backward pass the gradients of all ranks are summed.
    """
    param = module._parameters.get(key)
    return copy_param_to_region(param.to_local(), group) if isinstance(param, DTensor) else param


def read_replicated(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the module's own code read `replicated_param` for each of its direct parameters."""
    _read(module, lambda param: copy_param_to_region(param.to_local(), group))


def read_local(module: nn.Module) -> None:
    """Make the module's own code read this rank's part of each of its direct parameters."""
    _read(module, lambda param: param.to_local())


def read_full(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make code that reads a sharded parameter, which runs on every rank alike, get all of it."""

    def gathered(param: DTensor) -> Tensor:
        (placement,) = param.placements
        local = param.to_local()
        if not isinstance(placement, Shard):
            return local
        return gather_uneven(local, placement.dim, param.shape[placement.dim], group)

    _read(module, gathered)


def _read(module: nn.Module, compute: Callable[[DTensor], Tensor]) -> None:
    """Make an attribute of a parameter that is a DTensor return what `compute` returns for it.

    The module gets a subclass of its class, with a property for each parameter, as torch's parametrizations do it. So
    the code of a norm or a router works on plain tensors, and the parameters keep their names and registration.
    """
    original = type(module)
    members = {key: _property(key, compute) for key, param in module._parameters.items() if param is not None}
    if members:
        module.__class__ = type(original.__name__, (original,), {"__module__": original.__module__, **members})


def _property(key: str, compute: Callable[[DTensor], Tensor]) -> property:
    def read(module: nn.Module) -> Tensor | None:
        param = module._parameters[key]
        # While the parameter is sharded by `fully_shard`, it has placements on FSDP's mesh axes too. It is returned as
        # it is, since nothing may compute with it then.
        is_placed = isinstance(param, DTensor) and len(param.placements) == 1
        return compute(param) if is_placed else param  # type: ignore[arg-type]

    return property(read)


def gather_uneven(shard: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor of `length` from its chunks (see `chunk_of`), for work that is the same on every rank."""
    dim %= shard.ndim
    missing = -(-length // group.size()) - shard.shape[dim]
    padded = F.pad(shard, (0, 0) * (shard.ndim - 1 - dim) + (0, missing)) if missing else shard
    return all_gather_replicated(padded, dim, group).narrow(dim, 0, length)


PLAN_KEY = "strategy.tensor.plan"
"""The config key of a user's own plan."""
SEQUENCE_KEY = "strategy.tensor.sequence_parallel"
"""The config key of sequence parallelism."""


@dataclass(frozen=True, slots=True)
class Site:
    """A module that has a style in the plan, and what the style needs to know."""

    name: str
    module: nn.Module
    parent: nn.Module
    styles: dict[str, str]
    """The whole plan: module name → style name."""
    mesh: DeviceMesh
    group: dist.ProcessGroup
    """The process group of the tensor-parallel ranks."""
    size: int
    rank: int
    """This rank in the group."""
    params: DTensorParams
    sequence: bool
    """Whether sequence parallelism is on."""
    split: bool
    """Whether activations are sharded along the sequence here."""
    region: str | None
    """Name of the region around this module, which applies `enter_region` to the input; None if there is none."""
    random: dict[str, RankRng]
    """Name of a region → its `RankRng`, for regions that draw random numbers on sharded activations."""
    gathers_logits: Callable[[], bool]
    """Whether the model needs full logits, to compute its loss from them itself."""
    root: nn.Module
    """The model."""

    def tied_elsewhere(self, key: str) -> bool:
        """Return whether a parameter of the module is one of another module too."""
        param = self.module._parameters.get(key)
        others = (module for module in self.root.modules() if module is not self.module)
        return param is not None and any(param is other for module in others for other in module._parameters.values())

    def siblings(self, style: str) -> list[nn.Module]:
        """Return the parent's direct children that have this style in the plan."""
        prefix = self.name.rpartition(".")[0]
        names = [name for name, child in self.parent.named_children()]
        return [
            self.parent.get_submodule(name)
            for name in names
            if self.styles.get(f"{prefix}.{name}" if prefix else name) == style
        ]


class Style(ParallelStyle):
    """A style of the plan, applied to one module."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def problems(self) -> list[Problem]:
        """Return why the style cannot be applied; empty if it can. Called before anything is changed."""
        return []

    @abstractmethod
    def parallelize(self) -> None:
        """Turn the module's parameters into DTensors and replace its forward."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply the style; torch's `parallelize_module` calls this."""
        assert module is self.site.module
        assert device_mesh == self.site.mesh
        self.parallelize()
        return module

    def wrong_module(self, wanted: str) -> list[Problem]:
        """Return the problem of a style that does not fit its module; `wanted` describes the modules that it fits."""
        style = self.site.styles[self.site.name]
        class_name = type(self.site.module).__name__
        return [Problem(PLAN_KEY, f"`{style}` applies to {wanted}, but {self.site.name!r} is a {class_name}")]

    def indivisible(self, what: str, count: int) -> list[Problem]:
        """Return the problem if `count` does not divide by the ranks, else none; `what` names what is counted."""
        if count % self.site.size == 0:
            return []
        sizes = [str(n) for n in range(1, min(count, 64) + 1) if count % n == 0]
        message = f"{count} {what} of {self.site.name!r} do not divide by {self.site.size} ranks"
        return [Problem(SIZE_KEY, message, f"Use one of {', '.join(sizes)} ranks.")]


def wrap_forward(
    module: nn.Module,
    *,
    enter: Callable[[Tensor], Tensor] | None = None,
    leave: Callable[[Tensor], Tensor] | None = None,
    leave_others: Callable[[Any], Any] = lambda output: output,
    context: Callable[[Tensor], AbstractContextManager[Any]] | None = None,
) -> None:
    """Replace a module's forward: `enter` changes its main input, `leave` its main output, `leave_others` the others.

    The forward runs inside of `context(main input)`. The main input is the first argument of forward, by position or by
    name. The main output is what forward returns, or the first element if that is a tuple. `forward` is replaced on
    this one module, so no parameter changes its name.
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
            return (leave(output[0]), *map(leave_others, output[1:]))
        return leave(output)

    module.forward = forward


def training_rng(site: Site, random: RankRng) -> Callable[[Tensor], AbstractContextManager[Any]]:
    """Return a `context` for `wrap_forward` in which random numbers are those of this rank, if the module trains."""

    def context(given: Tensor) -> AbstractContextManager[Any]:
        return random.fork(given.device) if site.module.training else nullcontext()

    return context


# ---- linear layers, also `Conv1D` of `transformers`, whose weight is transposed


class LinearStyle(Style):
    """A style for a linear layer."""

    def problems(self) -> list[Problem]:
        """Return a problem if the module is not a plain linear layer."""
        return [] if is_linear(self.site.module) else self.wrong_module("a linear layer")

    def enter(self, x: Tensor) -> Tensor:
        """Return the input after `enter_region`, unless the region around this module has applied it."""
        return enter_region(self.site, x) if self.site.region is None else x


class Colwise(LinearStyle):
    """Column-wise: each rank has some of the output features."""

    def problems(self) -> list[Problem]:
        """Return a problem if output features do not divide: later layers expect the same number on every rank."""
        wrong = super().problems()
        return wrong or self.indivisible("output features", out_features(self.site.module))

    def parallelize(self) -> None:
        """Shard the weight by output features, and the bias."""
        module = self.site.module
        self.site.params.shard(module, "weight", 0 if _out_first(module) else 1)
        self.site.params.shard(module, "bias", 0)
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        return _multiply(module, self.enter(x), local_param(module, "weight"), local_param(module, "bias"))


class ColwiseGather(Colwise):
    """Column-wise, with all-gathered outputs: for code that needs all features at once."""

    def _forward(self, x: Tensor) -> Tensor:
        return all_gather_replicated(super()._forward(x), -1, self.site.group)


class Gathered(ColwiseGather):
    """Column-wise, for a layer on its own: its input and output are as they would be without tensor parallelism."""

    def _forward(self, x: Tensor) -> Tensor:
        gathered = super()._forward(x)
        return split(gathered, 1, self.site.group) if self.site.split else gathered


class LatentKv(LinearStyle):
    """The replicated projection to the latent keys and values of MLA, and to the keys' rotary part.

    The column-wise layer behind the latent part sums its gradient over ranks. The rotary part goes to all heads as it
    is, so its gradient is summed here.
    """

    def problems(self) -> list[Problem]:
        """Return a problem if the attention does not say how many features the rotary part has."""
        parent = self.site.parent
        if super().problems() or not isinstance(getattr(parent, "qk_rope_head_dim", None), int):
            return self.wrong_module("a linear layer inside a module with an attribute `qk_rope_head_dim`")
        return []

    def parallelize(self) -> None:
        """Sum the gradient of the rotary part over ranks; the parameters stay as they are."""
        inner, rotary = self.site.module.forward, int(self.site.parent.qk_rope_head_dim)  # type: ignore[arg-type]

        def forward(x: Tensor) -> Tensor:
            latent, rope = inner(x).tensor_split([-rotary], -1)
            return torch.cat((latent, copy_to_region(rope, self.site.group)), -1)

        self.site.module.forward = forward


class Rowwise(LinearStyle):
    """Row-wise: each rank has some of the input features, and the output is the sum over ranks."""

    def problems(self) -> list[Problem]:
        """Return a problem if input features do not divide, as the output features of the layer before must."""
        wrong = super().problems()
        return wrong or self.indivisible("input features", in_features(self.site.module))

    def parallelize(self) -> None:
        """Shard the weight by input features. The bias is not sharded: it is added to the sum over ranks."""
        module = self.site.module
        self.site.params.shard(module, "weight", 1 if _out_first(module) else 0)
        if self.site.split:
            self.site.params.replicate(module, "bias")
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        module = self.site.module
        random = self.site.random.get(self.site.region or "")
        if random is not None:
            random.end()
        y = leave_region(self.site, _multiply(module, x, local_param(module, "weight"), None))
        # If the output is split along the sequence, each rank has a partial gradient of the bias, which is summed over
        # ranks. Otherwise the bias is a plain tensor, with the full gradient on each rank.
        bias = replicated_param(module, "bias", self.site.group)
        return y if bias is None else y + bias.to(y.dtype)


class RowwiseSplit(Rowwise):
    """Row-wise, for a replicated input, of which each rank uses the features that its part of the weight needs."""

    def _forward(self, x: Tensor) -> Tensor:
        return super()._forward(split(x, -1, self.site.group))


class HeadParallel(Colwise):
    """The projection to queries: each rank has whole attention heads."""

    def problems(self) -> list[Problem]:
        """Return a problem if the number of heads does not divide by the ranks."""
        wrong = LinearStyle.problems(self) or _no_head_dim(self)
        return wrong or self.indivisible("attention heads", head_count(self.site, self.site.module))


class KvHeads(LinearStyle):
    """The projection to keys or values, which may have fewer heads than there are ranks.

    If the number of key/value heads divides by the ranks, they are sharded. If not, each rank keeps the whole (small)
    weight, computes the heads that its queries attend to, and the weight's gradients are summed over ranks.
    """

    def problems(self) -> list[Problem]:
        """Return a problem if there is not exactly one sibling with the style `heads`."""
        wrong = super().problems() or _no_head_dim(self)
        if not wrong and len(self.site.siblings("heads")) != 1:
            wrong = self.wrong_module("a layer with one sibling of style `heads`")
        return wrong

    def parallelize(self) -> None:
        """Shard the heads, or replicate them."""
        site, module = self.site, self.site.module
        queries = head_count(site, site.siblings("heads")[0])
        heads = head_count(site, module)
        mine = kv_heads_of(site.rank, site.size, queries=queries, heads=heads)
        if hasattr(site.parent, "num_key_value_groups"):  # of `transformers`: queries per key/value head
            setattr(site.parent, "num_key_value_groups", queries // site.size // len(mine))  # noqa: B010
        if heads % site.size == 0:
            Colwise(site).parallelize()
            return
        for key in ("weight", "bias"):
            site.params.replicate(module, key)
        module.forward = partial(self._forward, mine)

    def _forward(self, mine: list[int], x: Tensor) -> Tensor:
        module, head_dim = self.site.module, _head_dim(self.site)
        weight = replicated_param(module, "weight", self.site.group)
        bias = replicated_param(module, "bias", self.site.group)
        assert weight is not None
        weight = _select_heads(weight, 0 if _out_first(module) else 1, mine, head_dim)
        bias = None if bias is None else _select_heads(bias, 0, mine, head_dim)
        return _multiply(module, self.enter(x), weight, bias)


class QkvHeads(LinearStyle):
    """One fused projection to queries, keys and values, whose output is three parts of equal size.

    [Note: a fused projection is stored by input features]
    A rank needs its heads of queries, keys and values: three separate ranges of output features. Checkpoints and
    sharding require that a shard is one contiguous range. So the weight is sharded by *input* features, and before each
    matrix multiplication an all-to-all gives each rank its output features. It sends 1/ranks of the weight, little
    compared to the activations.
    """

    def problems(self) -> list[Problem]:
        """Return problems unless the output is three equal parts of whole heads, and all divides by the ranks."""
        wrong = super().problems() or _no_head_dim(self)
        if wrong:
            return wrong
        if out_features(self.site.module) % (3 * _head_dim(self.site)):
            return self.wrong_module("a layer whose output is queries, keys and values of equal size")
        heads = self.indivisible("attention heads", head_count(self.site, self.site.module) // 3)
        return heads or self.indivisible("input features", in_features(self.site.module))

    def parallelize(self) -> None:
        """Shard the weight by input features; replicate the bias."""
        site, module = self.site, self.site.module
        site.params.shard(module, "weight", 1 if _out_first(module) else 0)
        site.params.replicate(module, "bias")
        if hasattr(site.parent, "split_size"):  # where GPT-2 of `transformers` splits the output
            setattr(site.parent, "split_size", out_features(module) // 3 // site.size)  # noqa: B010
        module.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = local_param(module, "weight")
        assert weight is not None
        inputs = weight.t() if _out_first(module) else weight
        chunks = inputs.view(len(inputs), 3, site.size, -1).movedim(2, 0)  # (ranks, own inputs, 3, features)
        columns = all_to_all(chunks, site.group).flatten(0, 1).flatten(1)
        bias = replicated_param(module, "bias", self.site.group)
        if bias is not None:
            bias = bias.view(3, site.size, -1)[:, site.rank].flatten()
        return F.linear(self.enter(x), columns.t(), bias)


def enter_region(site: Site, x: Tensor) -> Tensor:
    """Return the input of a region with all tokens: `x` itself, or all-gathered if it is split along the sequence."""
    return all_gather(x, 1, site.group) if site.split else copy_to_region(x, site.group)


def leave_region(site: Site, x: Tensor) -> Tensor:
    """Return the output of a region from partial sums: all-reduced, or reduce-scattered along the sequence."""
    return reduce_scatter(x, 1, site.group) if site.split else all_reduce(x, site.group)


def kv_heads_of(rank: int, size: int, *, queries: int, heads: int) -> list[int]:
    """Return the key/value heads that one rank's query heads attend to, in the order in which it must compute them.

    `queries` and `heads` are the numbers of query and key/value heads of the model. Grouped-query attention pairs each
    key/value head with the same number of consecutive query heads. If that does not hold for this rank's query heads,
    the list has one entry per query head, with repetitions.
    """
    count = queries // size
    wanted = [query // (queries // heads) for query in range(rank * count, (rank + 1) * count)]
    distinct = list(dict.fromkeys(wanted))
    even = all(wanted.count(head) * len(distinct) == count for head in distinct)
    return distinct if even else wanted


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes x · W + b and nothing else: an `nn.Linear`, or a `Conv1D` of `transformers`.

    A subclass of `nn.Linear` in a model of `transformers` is one if its forward, tested with a small matrix, is.
    """
    if type(module).forward is nn.Linear.forward or _is_conv1d(module):
        return True
    return type(module).__module__.startswith("transformers.models.") and _multiplies(type(module))  # type: ignore[arg-type]


@cache
def _multiplies(cls: type[nn.Module]) -> bool:
    """Return whether the forward of a subclass of `nn.Linear` is that of `nn.Linear`."""
    if not issubclass(cls, nn.Linear):
        return False
    try:
        with disable_current_modes(), torch.no_grad(), torch.device("cpu"):
            for bias in (True, False):
                layer, x = cls.__new__(cls), torch.linspace(-1, 1, 24, dtype=torch.float32).view(2, 4, 3)
                nn.Linear.__init__(layer, 3, 5, bias=bias, device="meta")
                for key, param in list(layer._parameters.items()):
                    if param is not None:
                        values = torch.linspace(-2, 3, param.numel(), dtype=torch.float32).view(param.shape)
                        setattr(layer, key, nn.Parameter(values.sin()))
                if not torch.allclose(cls.forward(layer, x), nn.Linear.forward(layer, x)):
                    return False
    except Exception:  # it needs what its own constructor makes, or returns something else
        return False
    return True


def in_features(module: nn.Module) -> int:
    """Return the number of input features of a linear layer."""
    return int(_weight(module).shape[1 if _out_first(module) else 0])


def out_features(module: nn.Module) -> int:
    """Return the number of output features of a linear layer."""
    return int(_weight(module).shape[0 if _out_first(module) else 1])


def head_count(site: Site, module: nn.Module) -> int:
    """Return the number of heads that a projection computes."""
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


def _select_heads(param: Tensor, dim: int, heads: list[int], head_dim: int) -> Tensor:
    picked = [param.narrow(dim, head * head_dim, head_dim) for head in heads]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim)


def _head_dim(site: Site) -> int:
    head_dim = site.parent.head_dim
    assert isinstance(head_dim, int)
    return head_dim


def _no_head_dim(style: Style) -> list[Problem]:
    """Return a problem if the projection's parent has no `head_dim` that divides its output; else none."""
    parent, module = style.site.parent, style.site.module
    head_dim = getattr(parent, "head_dim", None)
    if isinstance(head_dim, int) and out_features(module) % head_dim == 0:
        return []
    return style.wrong_module("a layer inside a module with an attribute `head_dim` that divides its output")


# ---- vocabulary parallelism: embedding and output head
#
# The vocabulary need not divide by the number of ranks: the last rank then has fewer rows. Nothing is padded, so the
# stored shape does not change.


class VocabEmbedding(Style):
    """An embedding whose table is sharded by rows.

    Each rank looks up the tokens whose rows it has; vectors of other tokens are zero. An all-reduce sums over ranks.
    """

    def problems(self) -> list[Problem]:
        """Return a problem for options of `nn.Embedding` that need the full table, and for ranks without a row."""
        module = self.site.module
        if not isinstance(module, nn.Embedding):
            return self.wrong_module("an nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return self.wrong_module("an nn.Embedding without max_norm, scale_grad_by_freq and sparse")
        return _too_few_rows(self, module.num_embeddings)

    def parallelize(self) -> None:
        """Shard the table by rows."""
        module = self.site.module
        assert isinstance(module, nn.Embedding)
        start, count = chunk_of(module.num_embeddings, self.site.size, self.site.rank)
        self.site.params.shard(module, "weight", 0)
        padding = module.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < start + count else None

        def forward(input: Tensor) -> Tensor:
            row = input - start
            is_local = (row >= 0) & (row < count)
            vectors = _look_up(module, row.where(is_local, 0), local_padding)
            # For tokens of other ranks, row 0 was looked up: set these vectors to zero.
            return all_reduce(vectors.masked_fill(~is_local[..., None], 0.0), self.site.group)

        setattr(module, "forward", forward)  # noqa: B010


def _look_up(module: nn.Embedding, rows: Tensor, padding: int | None) -> Tensor:
    """Return vectors from this rank's rows of the table.

    For a subclass of `nn.Embedding` (such as one that scales its output), its own forward runs on these rows.
    """
    table = local_param(module, "weight")
    assert table is not None
    if type(module).forward is nn.Embedding.forward:
        return F.embedding(rows, table, padding)
    original = module._parameters["weight"], module.padding_idx
    module._parameters["weight"], module.padding_idx = table, padding  # type: ignore[assignment]
    try:
        return type(module).forward(module, rows)
    finally:
        module._parameters["weight"], module.padding_idx = original


class VocabHead(Style):
    """An output head of which each rank computes the logits of its part of the vocabulary.

    A plain linear layer returns a DTensor that is sharded along the vocabulary, from which
    `models.common.loss.cross_entropy` computes the loss without gathering; or full logits, for a model that computes
    its own loss from them. In any other module the weight becomes a DTensor, and the module's forward must support
    that, as `models.common.head.LMHead` does.
    """

    def problems(self) -> list[Problem]:
        """Return a problem if the weight is not a matrix, or a rank would have no row."""
        module = self.site.module
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim != 2:
            return self.wrong_module("a head with a weight of shape (vocabulary, features)")
        return [] if weight is None else _too_few_rows(self, weight.shape[0])

    def parallelize(self) -> None:
        """Shard the weight by rows. A head without a weight of its own is called with the embedding's."""
        site, module = self.site, self.site.module
        site.params.shard(module, "weight", 0)
        if is_linear(module):
            if not site.tied_elsewhere("bias"):
                site.params.shard(module, "bias", 0)
            module.forward = self._linear
            return
        inner = module.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            weights = (module._parameters.get("weight"), *args, *kwargs.values())
            # A head that is tied to an embedding without a style is replicated.
            is_sharded = any(isinstance(weight, DTensor) for weight in weights)
            return inner(copy_to_region(hidden, site.group) if is_sharded else hidden, *args, **kwargs)

        module.forward = forward

    def _linear(self, hidden: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = local_param(module, "weight")
        assert weight is not None
        bias = local_param(module, "bias")
        if bias is not None and len(bias) != len(weight):  # a replicated one
            bias = copy_param_to_region(bias, site.group).narrow(0, *chunk_of(len(bias), site.size, site.rank))
        logits = F.linear(copy_to_region(hidden, site.group), weight, bias)
        if site.gathers_logits():
            return gather_uneven(logits, -1, out_features(module), site.group)
        shape = (*logits.shape[:-1], out_features(module))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, site.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )


def return_full_tensors(model: nn.Module) -> None:
    """Make a model's forward return full tensors in place of DTensors, such as logits when no labels are given."""
    inner = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, inner(*args, **kwargs))

    model.forward = forward


def _too_few_rows(style: Style, rows: int) -> list[Problem]:
    size = style.site.size
    if chunk_of(rows, size, size - 1)[1] > 0:
        return []
    message = f"the {rows} rows of {style.site.name!r} do not suffice for {size} ranks: some would have none"
    return [Problem(SIZE_KEY, message, "Use fewer ranks for it.")]
