"""How long each layer takes, for stages that are balanced by time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.parallel.pipeline.layers import Layer
from plait.parallel.pipeline.outline import Extent, outline_of
from plait.torch_internals import tree_map_only

PASSES = 3
"""The first warms up; of the others the fastest counts."""


def measure_layers(model: nn.Module | Sequence[Layer], example: Any, *, device: torch.device) -> list[float]:
    """Seconds of each layer's forward pass on one micro-batch; what lies around the layers counts to the outer ones.

    A model on the meta device stays there: each layer gets memory for as long as it runs, so no more than one
    layer, and what lies outside of all, is there at a time. The values in it are made up.
    """
    outline = outline_of(model)
    whole = outline.whole()
    if any(tensor.is_meta for tensor in (*whole.parameters(), *whole.buffers())):
        whole = deepcopy(whole)
    call = outline.take(whole, Extent(0, len(outline.layers), len(outline.layers)))
    layers = [_find(whole, name) for name in outline.layers]
    inside = {id(part) for layer in layers if layer is not None for part in layer.modules()}
    for part in whole.modules():
        if id(part) not in inside:
            _allocate(part, device, recurse=False)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    times = [_one_pass(whole, layers, lambda: call(whole, inputs, None), device) for _ in range(PASSES)]
    return [min(column) for column in zip(*times[1:], strict=True)]


def _find(whole: nn.Module, name: str) -> nn.Module | None:
    try:
        return whole.get_submodule(name)
    except AttributeError:  # a function, or a layer that is stored under a shared name
        return None


def _one_pass(
    whole: nn.Module, layers: Sequence[nn.Module | None], call: Callable[[], Any], device: torch.device
) -> list[float]:
    marks: list[float] = []
    gaps = 0.0

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before(layer: nn.Module, _args: Any) -> None:
        nonlocal gaps
        start = now()
        meta = _allocate(layer, device, recurse=True)
        if meta:
            borrowed.append(layer)
        gaps += now() - start
        marks.append(now() - gaps)

    def after(layer: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal gaps
        marks.append(now() - gaps)
        start = now()
        if layer in borrowed:
            borrowed.remove(layer)
            layer.to("meta")
        gaps += now() - start

    borrowed: list[nn.Module] = []
    hooks = []
    for layer in layers:
        if layer is not None:
            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        with torch.no_grad():
            start = now()
            call()
            end = now() - gaps
    finally:
        for hook in hooks:
            hook.remove()
    inner = [later - earlier for earlier, later in zip(marks[::2], marks[1::2], strict=True)]
    called = iter(inner)
    found = [0.0 if layer is None else next(called, 0.0) for layer in layers]
    if marks:
        found[0] += marks[0] - start
        found[-1] += end - marks[-1]
    return found


@torch.no_grad()
def _allocate(module: nn.Module, device: torch.device, *, recurse: bool) -> bool:
    """Give a module's meta tensors memory and some values; whether there were any."""
    found = False
    for part in module.modules() if recurse else (module,):
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in tables:
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    found = True
                    fresh: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                    if fresh.is_floating_point():
                        fresh.normal_(0.0, 0.02)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[key] = nn.Parameter(fresh, requires_grad=False) if is_parameter else fresh
    return found


def agree(costs: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """The measurements of the group's first rank, for all of it: ranks that measured must not cut differently."""
    shared = torch.tensor(list(costs), dtype=torch.float64, device=device)
    dist.broadcast(shared, group=group, group_src=0)
    return [float(cost) for cost in shared.tolist()]
