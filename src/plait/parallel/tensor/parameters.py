"""Parameters as DTensors on the tensor-parallel mesh, and as this rank's plain tensor while the model computes.

[Note: DTensors at rest, plain tensors at work]
What a rank holds of a parameter is a DTensor, so that sharding, checkpoints and gradient norms know what it is a
part of. The computation sees its local tensor only. Each operation on a DTensor would work out its placement anew,
cover fewer operations than models use, and refuse parts of unequal size; here one `to_local` a parameter says all
that is needed. Its gradient comes back as a DTensor of the same placement.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plait.errors import ConfigError, ModelError, Problem
from plait.parallel.tensor.moves import spread_parameter

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
        start, length = part_of(whole.shape[placement.dim], mesh.size(), mesh.get_local_rank())
        # A copy of its own, so that the whole can go.
        local = whole.narrow(placement.dim, start, length).clone(memory_format=torch.contiguous_format)
    placed = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(placed, requires_grad=param.requires_grad)


def part_of(length: int, size: int, rank: int) -> tuple[int, int]:
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
