"""Activations that are computed again in the backward pass rather than kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from plait.config import CustomRecompute, RecomputeConfig, RunConfig
from plait.distributed.dtensor import to_local
from plait.distributed.fake import ShapesOnly
from plait.distributed.wrap import WrapUnit, first_input
from plait.errors import ConfigError, Problem
from plait.plugins import call, find, load
from plait.precision import DTYPES
from plait.torch_internals import (
    AnyBatchNorm,
    TorchDispatchMode,
    aten_cudnn,
    aten_efficient,
    aten_flash,
    aten_flash_cpu,
    aten_scaled_mm,
    storage_key,
    tree_leaves,
    tree_map_only,
)

_SEVERAL = {
    "scaled_dot_product_attention": (aten_flash, aten_flash_cpu, aten_efficient, aten_cudnn),
    "mm": (torch.ops.aten.mm, aten_scaled_mm),
}
"""Words that stand for several operations: attention by any kernel, products in 16 bits or in 8."""

ATTENTION = ("scaled_dot_product_attention",)
PRODUCTS = ("mm", "addmm", "bmm")

Way = Literal["none", "cheap", "attention", "full"]
"""What a unit computes again: nothing; all but products and attention; all but attention; everything.

[Note: the ladder of recomputing] What lies between products, such as norms and gates, takes as much memory as their
results and next to no time. So it goes first, in every unit, before any product is computed twice. After that a byte
costs what the operation did that made it. A product of vectors `n` long takes `n` operations a byte, and causal
attention over `T` tokens about `T`: where sequences are longer than the layers are wide, attention is kept to the end.
"""
Policy: TypeAlias = Callable[[str, nn.Module], Any]
"""Says of a unit, by its name and module, what it computes again; see `_apply`."""
_KEY = "strategy.recompute.mode"
_KEPT: dict[Way, tuple[str, ...]] = {"cheap": (*PRODUCTS, *ATTENTION), "attention": ATTENTION}


def apply_recompute(units: Sequence[WrapUnit], config: RecomputeConfig, *, ways: Sequence[Way] = ()) -> list[str]:
    """Make the chosen units recompute their activations; returns the names of those that do.

    The units' `forward` is replaced, not wrapped in a module, so no parameter changes its name.
    `ways` is what each of the units does, with `mode: auto`; the last one holds for those that come after.
    """
    mode = config.mode
    if isinstance(mode, CustomRecompute):
        policy = load(mode, _KEY)
        return _apply(
            units, str(mode), lambda *unit: call(policy, _KEY, *unit, name=str(mode), arguments=mode.arguments)
        )
    return _apply(units, mode, find("recompute", POLICIES[mode], _KEY)(config, ways))


POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "none": "plait.distributed.activation_checkpointing:keep_all",
        "full": "plait.distributed.activation_checkpointing:keep_nothing",
        "every": "plait.distributed.activation_checkpointing:keep_all_between",
        "selective": "plait.distributed.activation_checkpointing:keep_operations",
        "auto": "plait.distributed.activation_checkpointing:keep_as_chosen",
    }
)
"""What makes the policy of each of Plait's own modes; it comes in, and is asked about units, as one of a user's is."""


def keep_all(config: RecomputeConfig, ways: Sequence[Way]) -> Policy:
    """`none`: nothing is computed again."""
    return lambda name, module: False


def keep_nothing(config: RecomputeConfig, ways: Sequence[Way]) -> Policy:
    """`full`: every unit is computed again whole."""
    return lambda name, module: True


def keep_all_between(config: RecomputeConfig, ways: Sequence[Way]) -> Policy:
    """`every`: one unit in so many is computed again whole."""
    place = count(1)
    return lambda name, module: next(place) % config.every == 0


def keep_operations(config: RecomputeConfig, ways: Sequence[Way]) -> Policy:
    """`selective`: all is computed again but the results of some operations."""
    return lambda name, module: config.save_ops


def keep_as_chosen(config: RecomputeConfig, ways: Sequence[Way]) -> Policy:
    """`auto`: as was chosen for each unit; the last choice holds for those that come after."""
    left, last = iter(ways), ways[-1] if ways else "none"

    def policy(name: str, module: nn.Module) -> bool | Sequence[str]:
        way = next(left, last)
        return _KEPT.get(way, way == "full")

    return policy


def _apply(units: Sequence[WrapUnit], what: str, policy: Policy) -> list[str]:
    """Ask a policy about every unit.

    It answers with False or True (all is computed again), with operations whose results are kept, in the words of
    `save_ops`, or with a policy of `torch.utils.checkpoint` for each operation.
    """
    names = []
    for unit in units:
        answer = policy(unit.name, unit.module)
        if answer is False:
            continue
        if callable(answer):
            _recompute(unit.module, frozenset(), partial(create_selective_checkpoint_contexts, answer))
        elif answer is True or (isinstance(answer, list | tuple) and all(isinstance(each, str) for each in answer)):
            _recompute(unit.module, frozenset() if answer is True else operations(answer))
        else:
            message = f"{what!r} answered {answer!r} for {unit.name!r}"
            remedy = "Return a bool, names of operations, or a policy of torch.utils.checkpoint."
            raise ConfigError(Problem(_KEY, message, remedy))
        names.append(unit.name)
    return names


def kept_operations(module: nn.Module) -> frozenset[Any] | None:
    """The operations whose results a unit that recomputes keeps; None for one that does not recompute."""
    return getattr(module.forward, "kept", None)


def _recompute(module: nn.Module, kept: frozenset[Any], contexts: Callable[[], Any] | None = None) -> None:
    """`contexts` makes those of both passes, where not `kept` alone decides."""
    forward = module.forward
    contexts = contexts or (_selective_context(kept) if kept else None)
    extra: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    counting = [part for part in module.modules() if isinstance(part, AnyBatchNorm)]
    if counting:
        extra = {"context_fn": _counted_once(counting, extra.get("context_fn"))}

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        called, distinct = _each_once(forward, args)
        return checkpoint(called, *distinct, use_reentrant=False, **extra, **kwargs)

    # The compiler knows no second pass that differs from the first.
    made: Any = torch.compiler.disable(recomputed) if counting else recomputed  # type: ignore[no-untyped-call]
    made.kept = kept
    module.forward = made


def _each_once(forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same call with every tensor in one place.

    `nn.MultiheadAttention` looks whether query, key and value are one tensor. Inputs that were offloaded come back one
    by one, and one that was kept three times would be three.
    """
    firsts = [
        next(at for at, other in enumerate(args) if other is arg) if isinstance(arg, Tensor) else place
        for place, arg in enumerate(args)
    ]
    kept = sorted(set(firsts))
    if len(kept) == len(args):
        return forward, args

    def called(*distinct: Any, **kwargs: Any) -> Any:
        return forward(*(distinct[kept.index(first)] for first in firsts), **kwargs)

    return called, tuple(args[first] for first in kept)


class _SecondForward:
    """The second forward pass, which moves copies of running statistics: the first has moved them already."""

    def __init__(self, norms: Sequence[AnyBatchNorm], around: AbstractContextManager[Any]) -> None:
        self._norms = norms
        self._around = around
        self._moved: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._moved = [norm._buffers for norm in self._norms]
        for norm, moved in zip(self._norms, self._moved, strict=True):
            norm._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in moved.items()}
        self._around.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._around.__exit__(*failure)
        for norm, moved in zip(self._norms, self._moved, strict=True):
            norm._buffers = moved


def _counted_once(norms: Sequence[AnyBatchNorm], inner: Callable[[], Any] | None) -> Callable[[], Any]:
    def contexts() -> tuple[Any, Any]:
        first, second = (nullcontext(), nullcontext()) if inner is None else inner()
        return first, _SecondForward(norms, second)

    return contexts


def operations(words: Sequence[str]) -> frozenset[Any]:
    """torch's own operations for words of `save_ops`."""
    found: set[Any] = set()
    for word in words:
        for packet in _SEVERAL.get(word, (getattr(torch.ops.aten, word, None),)):
            if packet is None:
                raise ConfigError(
                    Problem(
                        "strategy.recompute.save_ops",
                        f"torch has no operation {word!r}",
                        "Use names of torch.ops.aten, such as mm, addmm, bmm, or scaled_dot_product_attention.",
                    )
                )
            found.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(found)


def _selective_context(kept: frozenset[Any]) -> Callable[[], Any]:
    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return first, _Restoring(second, kept)

    return contexts


class _Restoring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The second forward pass, which gets the results that were kept, and computes all else.

    torch's own would want the two passes to be alike in everything. But where a part of a unit is sharded by itself, as
    experts are, its weights may be there in the one pass and have to be gathered in the other. And a unit may be gone
    through backwards twice, for a penalty on gradients. torch has let go of what was kept by then: all is computed.
    """

    def __init__(self, stored: Any, kept: frozenset[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stored = stored
        self._kept = kept
        self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            self._kept = frozenset()
        self._entered = True
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own says."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._kept:
            return self._stored.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# How much memory activations take, found without taking any: what `recompute: auto` decides from.


@dataclass(slots=True)
class UnitMemory:
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

    units: list[UnitMemory]
    outside: int = 0
    """Bytes kept outside of all units."""
    passing: int = 0
    """Bytes that the forward pass takes for a moment, beyond what it keeps."""


def count_activations(
    module: nn.Module, units: Sequence[WrapUnit], example: Any, config: RunConfig, device: torch.device | None = None
) -> Activations:
    """Run the forward pass on tensors that say they lie on `device`, and have shapes and formats but no storage."""
    device = device or torch.device("cpu")
    compute = DTYPES[config.precision.compute]
    found = Activations([UnitMemory(numbers=_trained(unit.module)) for unit in units])

    def fake(tensor: Tensor) -> Tensor:
        dtype = compute if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device=device, requires_grad=tensor.requires_grad)

    with ShapesOnly():
        state = dict(_once_each(module, fake))
        weights = {storage_key(t) for t in state.values()}
        inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), example)
        if type(module).forward is nn.Sequential.forward:
            inputs = first_input(inputs)
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
class _CountedStorages:
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
        self._kept, self._given = _CountedStorages(), _CountedStorages()
        self._current: list[UnitMemory] = []
        self._alive: dict[int, Any] = {}
        self._products, self._attention = operations(PRODUCTS), operations(ATTENTION)

    @contextmanager
    def inside(self, units: Sequence[WrapUnit]) -> Iterator[None]:
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

    def _enter(self, account: UnitMemory) -> Any:
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
    return sum(to_local(param.detach()).numel() for param in module.parameters() if param.requires_grad)
