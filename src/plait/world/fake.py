"""A world of any size in one process: this one plays a rank, and the others are not there.

Under a fake world tensors have shapes, dtypes and devices but no values, and collectives return at once. The code
that runs in it is the code that trains.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.config import RunConfig, resolve_layout
from plait.errors import WorldError
from plait.torch_internals import (
    FakeTensorMode,
    aten_grouped_mm,
    aten_local_scalar_dense,
    module_apply_replaced,
    name_of_truncated_normal,
    overload_of,
    schema_of,
    unset_fake_temporarily,
)
from plait.world.patch import replaced
from plait.world.pretend import pretended_cuda
from plait.world.ranks import Ranks
from plait.world.world import World, make_mesh


@contextmanager
def fake_world(
    config: RunConfig,
    *,
    rank: int = 0,
    size: int = 1,
    per_host: int = 8,
    device: str = "cpu",
    memory: int = 80 * 2**30,
) -> Iterator[World]:
    """Play `rank` of `size`, as `config.strategy` lays them out, until the block ends.

    `device` is `cpu`, or `cuda`, for which no GPU need be there; `memory` is what one of those has.
    """
    if dist.is_initialized():
        raise WorldError("a fake world cannot be opened in a process that has joined a real one")
    local = min(per_host, size)
    ranks = Ranks(rank, size, rank % local, local, launcher="fake")
    layout = resolve_layout(config.strategy, size=size, local_size=local)
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(pretended_cuda(devices=local, memory=memory))
        kind = torch.device(device, 0) if device == "cuda" else torch.device(device)
        mesh = None
        if size > 1 or config.strategy.offload.params != "none":
            from plait.torch_internals import FakeStore

            # Joining a group puts the rank before every later traceback, which will be no rank's.
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            stack.callback(_leave)
            stack.enter_context(_meshes_have_values())
            mesh = make_mesh(layout, kind)
        stack.enter_context(module_apply_replaced(_apply))
        stack.enter_context(replaced(nn.init, name_of_truncated_normal(), _draw_twice))
        stack.enter_context(Valueless(allow_non_fake_inputs=True))
        yield World(ranks, kind, layout, mesh, owns_processes=False, fake=True)


def _leave() -> None:
    """End the group, and let DTensor forget its meshes: it would take one of the next world for the same."""
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from plait.torch_internals import clear_sharding_prop_cache

        clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


class ShapesOnly(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without values, also for an operation that torch knows too little of without them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_grouped_mm.default and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Valueless(ShapesOnly):  # type: ignore[no-untyped-call]
    """And whoever asks for a value gets a 1, or true."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten_local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if schema_of(func).name.startswith("aten::_fused_") and schema_of(func).name.endswith("_"):
            return None  # an optimizer's update in place; torch does not know all of them without values
        if schema_of(func).name == "aten::addmm" and overload_of(func) == "dtype_out":
            return kwargs["out"]  # which torch 2.11 gets wrong
        if not types and _on_meta(args, kwargs or {}):
            # What is built on the meta device is no fake: it turns into one when it is given storage.
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _on_meta(args: Any, kwargs: Any) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    given = [value if isinstance(value, (list, tuple)) else (value,) for value in (*args, *kwargs.values())]
    tensors = [each for values in given for each in values if isinstance(each, torch.Tensor)]
    return bool(tensors) and all(each.is_meta for each in tensors)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """What a product of groups gives: rows of each with a matrix of its own, or a matrix for each from its rows."""
    groups = [len(ends)] if left.ndim == right.ndim == 2 else [len(left)] if left.ndim == right.ndim == 3 else []
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """`Module.to` and its like. torch's own swaps the insides of two tensors, which fake ones do not allow."""
    for child in module.children() if recurse else ():
        _apply(child, change)
    with torch.no_grad():
        for key, param in module._parameters.items():
            if param is not None:
                module._parameters[key] = nn.Parameter(change(param), requires_grad=param.requires_grad)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = change(buffer)
    return module


def _draw_twice(tensor: torch.Tensor, mean: float, std: float, low: float, high: float, **_: Any) -> torch.Tensor:
    """`nn.init.trunc_normal_`. torch's own draws again until no value is outside, and here there always is one."""
    with torch.no_grad():
        outside = (tensor.normal_(mean, std) < low) | (tensor > high)
        return tensor.copy_(torch.where(outside, torch.empty_like(tensor).normal_(mean, std), tensor))


@contextmanager
def _meshes_have_values() -> Iterator[None]:
    """A mesh looks at the numbers of its ranks when it is made, so these must not be fake."""
    make = DeviceMesh.__init__

    def with_values(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            make(self, *args, **kwargs)

    with replaced(DeviceMesh, "__init__", with_values):
        yield
