"""How much memory activations take, found without taking any: what `recompute: auto` decides from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.config import RunConfig
from plait.parallel.recompute import ATTENTION, PRODUCTS, operations
from plait.parallel.units import Unit
from plait.precision import DTYPES
from plait.spec import first_part
from plait.torch_internals import TorchDispatchMode, storage_key, tree_leaves, tree_map_only
from plait.world import ShapesOnly, local_part


@dataclass(slots=True)
class UnitAccount:
    """What one unit keeps for its backward pass, in bytes, and how much of it is costly to compute again."""

    given: int = 0
    """Its inputs, those aside that the unit before was given too."""
    kept: int = 0
    """All that it keeps where nothing is recomputed."""
    products: int = 0
    """Results of matrix products."""
    attention: int = 0
    """Results of attention."""
    product_flops: float = 0.0
    attention_flops: float = 0.0
    numbers: int = 0
    """Of its parameters that are trained."""


@dataclass(slots=True)
class Activations:
    """What a forward pass leaves behind."""

    units: list[UnitAccount]
    outside: int = 0
    """Bytes kept outside of all units."""
    passing: int = 0
    """Bytes that the forward pass takes for a moment, beyond what it keeps."""


def count_activations(
    module: nn.Module, units: Sequence[Unit], example: Any, config: RunConfig, device: torch.device | None = None
) -> Activations:
    """Run the forward pass on tensors that say they lie on `device`, and have shapes and formats but no storage."""
    device = device or torch.device("cpu")
    compute = DTYPES[config.precision.compute]
    found = Activations([UnitAccount(numbers=_trained(unit.module)) for unit in units])

    def fake(tensor: Tensor) -> Tensor:
        dtype = compute if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device=device, requires_grad=tensor.requires_grad)

    with ShapesOnly():
        state = dict(_once_each(module, fake))
        weights = {storage_key(t) for t in state.values()}
        inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), example)
        if type(module).forward is nn.Sequential.forward:
            inputs = first_part(inputs)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = () if kwargs else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        meter = _Meter(found, weights)
        with (
            meter.inside(units),
            torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda t: t),
            torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32),
            meter,
        ):
            loss = functional_call(module, state, args, kwargs, tie_weights=False)
        found.passing = max(meter.highest - meter.live, 0)
        del loss
    return found


def _once_each(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What stands for each parameter and buffer, under one name for each place that holds it.

    A module may have two names. Exchanged under both, what stood there first would not come back.
    """
    made: dict[int, Tensor] = {}
    for path, part in module.named_modules():
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                yield f"{path}.{key}" if path else key, made[id(tensor)]


@dataclass(slots=True)
class _Seen:
    """Storages that were counted, with what keeps their numbers from being given to others."""

    storages: dict[int, Any] = field(default_factory=dict)

    def first(self, tensor: Tensor) -> int:
        """Bytes of a tensor's storage, the first time that it comes."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self.storages:
            return 0
        self.storages[storage_key(storage)] = storage
        return int(storage.nbytes())


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a forward pass, what autograd keeps, and which unit is at work."""

    def __init__(self, found: Activations, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.highest = 0
        self._found = found
        self._weights = weights
        self._kept, self._given = _Seen(), _Seen()
        self._current: list[UnitAccount] = []
        self._alive: dict[int, Any] = {}
        self._products, self._attention = operations(PRODUCTS), operations(ATTENTION)

    @contextmanager
    def inside(self, units: Sequence[Unit]) -> Iterator[None]:
        """Know which unit is at work, until the block ends."""
        hooks = []
        for unit, account in zip(units, self._found.units, strict=True):
            hooks.append(unit.module.register_forward_pre_hook(self._enter(account), with_kwargs=True))
            hooks.append(unit.module.register_forward_hook(lambda *_: self._leave()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, account: UnitAccount) -> Any:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._current.append(account)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            account.given += sum(self._given.first(tensor) for tensor in tensors)

        return enter

    def _leave(self) -> None:
        self._current.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps for the backward pass."""
        if storage_key(tensor) not in self._weights:
            size = self._kept.first(tensor)
            if self._current:
                self._current[-1].kept += size
            else:
                self._found.outside += size
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self._hold(tensor)
        if self._current and func in self._products:
            account, first = self._current[-1], args[1 if "addmm" in func.name() else 0]
            account.products += results[0].nbytes
            account.product_flops += 2.0 * results[0].numel() * first.shape[-1]
        elif self._current and func in self._attention:
            account, query, keys = self._current[-1], args[0], args[1]
            account.attention += sum(tensor.nbytes for tensor in results)
            # Half of it is masked away, and what is left runs at about half the speed of a product.
            account.attention_flops += 4.0 * query.numel() * keys.shape[-2]
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), int(storage.nbytes())
        if key in self._alive or key in self._weights:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.highest = max(self.highest, self.live)

    def _free(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live -= size


def _trained(module: nn.Module) -> int:
    return sum(local_part(param.detach()).numel() for param in module.parameters() if param.requires_grad)
