"""Activation checkpointing (recomputation): the backward pass computes activations again instead of reading them.

A *unit* (`WrapUnit`) is a module, such as a transformer block, that is recomputed as a whole or in part. A *product* is
the result of a matrix multiplication. The *second forward pass* is the recomputation inside the backward pass.
"""

from __future__ import annotations

import inspect
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
from plait.errors import ConfigError, ModelError, Problem
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
    intercept_operations,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from plait.transformers_internals import is_transformers_model

_OPERATOR_SETS = {
    "scaled_dot_product_attention": (aten_flash, aten_flash_cpu, aten_efficient, aten_cudnn),
    "mm": (torch.ops.aten.mm, aten_scaled_mm),
}
"""Names in `save_ops` that mean several operators: attention by any kernel, matrix products in 16 bits or in 8."""

ATTENTION = ("scaled_dot_product_attention",)
PRODUCTS = ("mm", "addmm", "bmm")

RecomputeLevel = Literal["none", "cheap", "attention", "full"]
"""What a unit recomputes: nothing; all but matrix products and attention; all but attention; everything.

[Note: the ladder of recomputing] The operations between products, such as norms and gates, save about as many bytes
as the products, but take almost no time. So they are recomputed first, in every unit (`cheap`), before any product is
computed twice. What it costs to free a byte beyond that depends on the operation that computes it again. A product
whose inner dimension is `n` takes about `n` operations per byte of its result, and causal attention over `T` tokens
about `T`. So where sequences are longer than layers are wide, attention is recomputed last.
"""
RecomputePolicy: TypeAlias = Callable[[str, nn.Module], Any]
"""A function of the name and module of a unit that returns what the unit recomputes; see `_apply`."""
_KEY = "strategy.recompute.mode"
_SAVED: dict[RecomputeLevel, tuple[str, ...]] = {"cheap": (*PRODUCTS, *ATTENTION), "attention": ATTENTION}


def apply_recompute(
    units: Sequence[WrapUnit], config: RecomputeConfig, *, levels: Sequence[RecomputeLevel] = ()
) -> list[str]:
    """Make units recompute their activations, as `config` says; return the names of the units that recompute any.

    The units' `forward` is replaced, so no parameter changes its name. `levels` is read with `mode: auto` only: the
    level of each unit, in order; the last one also holds for all further units.
    """
    mode = config.mode
    if isinstance(mode, CustomRecompute):
        policy = load(mode, _KEY)
        return _apply(
            units, str(mode), lambda *unit: call(policy, _KEY, *unit, name=str(mode), arguments=mode.arguments)
        )
    return _apply(units, mode, find("recompute", POLICIES[mode], _KEY)(config, levels))


POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "none": "plait.distributed.activation_checkpointing:keep_all",
        "full": "plait.distributed.activation_checkpointing:keep_nothing",
        "every": "plait.distributed.activation_checkpointing:keep_all_between",
        "selective": "plait.distributed.activation_checkpointing:keep_operations",
        "auto": "plait.distributed.activation_checkpointing:keep_as_chosen",
    }
)
"""For each of Plait's own modes, the import path of the function that returns its policy."""


def keep_all(config: RecomputeConfig, levels: Sequence[RecomputeLevel]) -> RecomputePolicy:
    """Return the policy of `none`: nothing is recomputed."""
    return lambda name, module: False


def keep_nothing(config: RecomputeConfig, levels: Sequence[RecomputeLevel]) -> RecomputePolicy:
    """Return the policy of `full`: every unit is recomputed as a whole."""
    return lambda name, module: True


def keep_all_between(config: RecomputeConfig, levels: Sequence[RecomputeLevel]) -> RecomputePolicy:
    """Return the policy of `every`: every n-th unit is recomputed as a whole."""
    position = count(1)
    return lambda name, module: next(position) % config.every == 0


def keep_operations(config: RecomputeConfig, levels: Sequence[RecomputeLevel]) -> RecomputePolicy:
    """Return the policy of `selective`: everything but the results of the operators in `save_ops` is recomputed."""
    return lambda name, module: config.save_ops


def keep_as_chosen(config: RecomputeConfig, levels: Sequence[RecomputeLevel]) -> RecomputePolicy:
    """Return the policy of `auto`: each unit has the level that was chosen for it; see `apply_recompute`."""
    remaining, last = iter(levels), levels[-1] if levels else "none"

    def policy(name: str, module: nn.Module) -> bool | Sequence[str]:
        level = next(remaining, last)
        return _SAVED.get(level, level == "full")

    return policy


def _apply(units: Sequence[WrapUnit], name: str, policy: RecomputePolicy) -> list[str]:
    """Apply a policy to every unit; return the names of the units that recompute anything.

    For a unit a policy returns False (nothing is recomputed), True (everything is), names of operators whose results
    are saved, as in `save_ops`, or a function that `create_selective_checkpoint_contexts` of torch takes, which decides
    for each operator. `name` is the policy's, for error messages.
    """
    names = []
    for unit in units:
        answer = policy(unit.name, unit.module)
        if answer is False:
            continue
        if callable(answer):
            _recompute(unit.module, frozenset(), partial(create_selective_checkpoint_contexts, answer))
        elif answer is True or (isinstance(answer, list | tuple) and all(isinstance(item, str) for item in answer)):
            _recompute(unit.module, frozenset() if answer is True else aten_operators(answer))
        else:
            message = f"{name!r} returned {answer!r} for {unit.name!r}"
            remedy = "Return a bool, names of operators, or a policy of torch.utils.checkpoint."
            raise ConfigError(Problem(_KEY, message, remedy))
        names.append(unit.name)
    return names


def kept_operations(module: nn.Module) -> frozenset[Any] | None:
    """Return the operators whose results a unit saves while it recomputes the rest; None if it does not recompute."""
    return getattr(module.forward, "kept", None)


def _recompute(module: nn.Module, kept: frozenset[Any], contexts: Callable[[], Any] | None = None) -> None:
    """Make a module recompute everything but the results of the operators in `kept`.

    `contexts`, if there is one, decides instead of `kept`: it returns the contexts of both forward passes.
    """
    forward = module.forward
    contexts = contexts or (_selective_context(kept) if kept else None)
    extra: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    norms = [submodule for submodule in module.modules() if isinstance(submodule, AnyBatchNorm)]
    if norms:
        extra = {"context_fn": _with_frozen_statistics(norms, extra.get("context_fn"))}

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        called, distinct = _deduplicate(forward, args)
        return checkpoint(called, *distinct, use_reentrant=False, **extra, **kwargs)

    # torch.compile expects the second forward pass to be equal to the first.
    replacement: Any = torch.compiler.disable(recomputed) if norms else recomputed  # type: ignore[no-untyped-call]
    replacement.kept = kept
    module.forward = replacement


def _deduplicate(forward: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and arguments without repeated tensors, which together are the same call as `forward(*args)`.

    `nn.MultiheadAttention` checks whether query, key and value are one tensor. If that tensor were passed three times,
    it would be saved three times, and where inputs are offloaded it would come back as three different tensors.
    """
    firsts = [
        next(index for index, other in enumerate(args) if other is arg) if isinstance(arg, Tensor) else position
        for position, arg in enumerate(args)
    ]
    distinct_positions = sorted(set(firsts))
    if len(distinct_positions) == len(args):
        return forward, args

    def called(*distinct: Any, **kwargs: Any) -> Any:
        return forward(*(distinct[distinct_positions.index(first)] for first in firsts), **kwargs)

    return called, tuple(args[first] for first in distinct_positions)


class _SecondForward:
    """A context for the second forward pass: running statistics are replaced by copies until it ends.

    Norms update only the copies: the first forward pass has updated the statistics already.
    """

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


def _with_frozen_statistics(norms: Sequence[AnyBatchNorm], inner: Callable[[], Any] | None) -> Callable[[], Any]:
    """Return `inner` with a `_SecondForward` around its second context."""

    def contexts() -> tuple[Any, Any]:
        first, second = (nullcontext(), nullcontext()) if inner is None else inner()
        return first, _SecondForward(norms, second)

    return contexts


def aten_operators(names: Sequence[str]) -> frozenset[Any]:
    """Return the aten operators, with all overloads, for names of `save_ops`; a `ConfigError` for an unknown name."""
    operators: set[Any] = set()
    for name in names:
        for packet in _OPERATOR_SETS.get(name, (getattr(torch.ops.aten, name, None),)):
            if packet is None:
                raise ConfigError(
                    Problem(
                        "strategy.recompute.save_ops",
                        f"torch has no operation {name!r}",
                        "Use names of torch.ops.aten, such as mm, addmm, bmm, or scaled_dot_product_attention.",
                    )
                )
            operators.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(operators)


def _selective_context(kept: frozenset[Any]) -> Callable[[], Any]:
    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        first, second = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return first, _SelectiveRecompute(second, kept)

    return contexts


class _SelectiveRecompute(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of the second forward pass: it reads the results that were saved, and computes everything else.

    torch's own mode requires the two passes to run the same operators. But where a module inside a unit is sharded by
    itself, as experts are, its weights may be unsharded already in one pass and all-gathered in the other. And a unit
    may be differentiated twice, for a gradient penalty: torch has freed the saved results after the first time, so from
    the second time on everything is recomputed.
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
        """Return True, as torch's own mode does."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._kept:
            return self._stored.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# The memory of activations, counted in a forward pass on fake tensors; `recompute: auto` chooses levels by it.


@dataclass(slots=True)
class UnitMemory:
    """What one unit saves for its backward pass, in bytes, and what the costly part of it takes to recompute."""

    inputs: int = 0
    """Its inputs, without those that were inputs of an earlier unit too."""
    saved: int = 0
    """All that it saves if nothing is recomputed."""
    products: int = 0
    """Results of matrix products."""
    attention: int = 0
    """Results of attention."""
    product_flops: float = 0.0
    attention_flops: float = 0.0
    trained_params: int = 0
    """Elements of its parameters that are trained."""


@dataclass(slots=True)
class Activations:
    """The activation memory of a forward pass."""

    units: list[UnitMemory]
    outside: int = 0
    """Bytes saved outside of all units."""
    transient: int = 0
    """The peak memory of the forward pass minus what is still allocated at its end."""


def count_activations(
    module: nn.Module, units: Sequence[WrapUnit], example: Any, config: RunConfig, device: torch.device | None = None
) -> Activations:
    """Return the activation memory of a forward pass with the batch `example`, counted on fake tensors on `device`."""
    device = device or torch.device("cpu")
    compute = DTYPES[config.precision.compute]
    activations = Activations([UnitMemory(trained_params=_trained(unit.module)) for unit in units])

    def fake(tensor: Tensor) -> Tensor:
        dtype = compute if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device=device, requires_grad=tensor.requires_grad)

    with ShapesOnly():
        state = dict(_replacements(module, fake))
        weights = {storage_key(t) for t in state.values()}
        inputs = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), example)
        if type(module).forward is nn.Sequential.forward:
            inputs = first_input(inputs)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        args = () if kwargs else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        counter = _ActivationCounter(activations, weights)
        with (
            counter.tracking(units),
            torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda t: t),
            torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32),
            intercept_operations(counter.run),
        ):
            loss = functional_call(module, state, args, kwargs, tie_weights=False)
        activations.transient = max(counter.peak - counter.live, 0)
        del loss
    return activations


def _replacements(module: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, replacement) of each parameter and buffer; a tensor that two modules share has one replacement.

    A module that has two names is listed under the first only: if a tensor were replaced under both names,
    `functional_call` would not restore the original.
    """
    replaced: dict[int, Tensor] = {}
    for path, submodule in module.named_modules():
        for key, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if tensor is not None:
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = make(tensor)
                yield f"{path}.{key}" if path else key, replaced[id(tensor)]


@dataclass(slots=True)
class _CountedStorages:
    """Storages that were counted; kept alive, so that their keys are not reused."""

    storages: dict[int, Any] = field(default_factory=dict)

    def first(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's storage if it is counted for the first time, else 0."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self.storages:
            return 0
        self.storages[storage_key(storage)] = storage
        return int(storage.nbytes())


class _ActivationCounter:
    """Counts, for each unit, what autograd saves, and the memory and operations of its products and attention."""

    def __init__(self, activations: Activations, weights: set[int]) -> None:
        self.live = self.peak = 0
        self._activations = activations
        self._weights = weights
        self._saved_storages, self._input_storages = _CountedStorages(), _CountedStorages()
        self._current: list[UnitMemory] = []
        self._alive: dict[int, Any] = {}
        self._products, self._attention = aten_operators(PRODUCTS), aten_operators(ATTENTION)

    @contextmanager
    def tracking(self, units: Sequence[WrapUnit]) -> Iterator[None]:
        """Record, until the block ends, which unit runs."""
        hooks = []
        for wrapped, unit in zip(units, self._activations.units, strict=True):
            hooks.append(wrapped.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True))
            hooks.append(wrapped.module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, unit: UnitMemory) -> Any:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._current.append(unit)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            unit.inputs += sum(self._input_storages.first(tensor) for tensor in tensors)

        return enter

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._current.pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves for the backward pass; return it."""
        if storage_key(tensor) not in self._weights:
            size = self._saved_storages.first(tensor)
            if self._current:
                self._current[-1].saved += size
            else:
                self._activations.outside += size
        return tensor

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result; count the tensors that it allocates."""
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self._track(tensor)
        if self._current and func in self._products:
            unit, first = self._current[-1], args[1 if "addmm" in func.name() else 0]
            unit.products += results[0].nbytes
            unit.product_flops += 2.0 * results[0].numel() * first.shape[-1]
        elif self._current and func in self._attention:
            unit, query, keys = self._current[-1], args[0], args[1]
            unit.attention += sum(tensor.nbytes for tensor in results)
            # Causal attention does half of these operations, at about half the speed of a product: the factor stays.
            unit.attention_flops += 4.0 * query.numel() * keys.shape[-2]
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), int(storage.nbytes())
        if key in self._alive or key in self._weights:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.live -= size


def _trained(module: nn.Module) -> int:
    return sum(to_local(param.detach()).numel() for param in module.parameters() if param.requires_grad)


def train_without_caches(model: nn.Module) -> None:
    """Set `use_cache=False` in training calls of `transformers` models; raise a `ModelError` if a call passes a cache.

    Most of these models fill a KV cache by default. A layer that is recomputed would append its keys and values twice.
    """
    for module in model.modules():
        if is_transformers_model(module) and "use_cache" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("past_key_values") is not None:
        raise ModelError(
            f"{type(module).__name__} got past_key_values, which layers that are recomputed would write to "
            "twice; set strategy.recompute: none, or leave them out"
        )
    return args, {**kwargs, "use_cache": False}
