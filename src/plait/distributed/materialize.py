"""From a model without storage to one with values, rank by rank.

[Note: initial values do not depend on the layout]
Every module's values are a pure function of (seed, module name): each rank makes the whole tensors of one
module at a time, from that seed, and keeps its part. So any layout starts from the same weights, and no rank
holds more than one module beyond its own shards.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from gc import get_referents
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.distributed.deferred_init import ConstructionRecord, RecordedOperation, direct_tensors, find_replay
from plait.distributed.dtensor import is_sharded, to_local
from plait.torch_internals import gradient_hooks_of, storage_key

# What the author of a model put on its parameters beside their values: hooks, attributes, references.
#
# Techniques exchange parameters: the meta device for a real one, a whole tensor for a DTensor. An attribute is carried
# over. A gradient hook belongs to autograd and not to Python, and whoever holds the old tensor in a list or a closure
# keeps the old one: such a model is built on a real device, and refused where its parameters would be exchanged.


Attributes = Mapping[str, Mapping[str, Any]]
"""Of each parameter, by name."""
_OF_A_MODULE = frozenset({"_parameters", "_buffers", "_modules"})


def param_attributes(model: nn.Module) -> Attributes:
    """The attributes that somebody set on parameters of a model, such as `param.no_weight_decay = True`."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: dict(vars(param)) for name, param in named if not is_lazy(param) and vars(param)}


def restore_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Set them on the parameters that have taken the places of those."""
    for name, param in model.named_parameters(remove_duplicate=False) if attributes else ():
        for key, value in attributes.get(name, {}).items():
            vars(param).setdefault(key, value)


def gradient_hooks(model: nn.Module) -> dict[str, str]:
    """The parameters with gradient hooks, each with the name of its first hook."""
    found: dict[str, str] = {}
    for name, param in model.named_parameters():
        for hook in gradient_hooks_of(param):
            found.setdefault(name, getattr(hook, "__qualname__", type(hook).__qualname__))
    return found


def why_not_on_meta(model: nn.Module) -> str | None:
    """Why a model on the meta device would lose something once it is given memory; None where it would not."""
    for name, hook in gradient_hooks(model).items():
        return f"the parameter {name!r} has a gradient hook ({hook})"
    shared = find_shared_storage(model)
    if shared is not None:
        return f"{shared[0]!r} and {shared[1]!r} share their memory without being one tensor"
    for place, _ in unregistered_tensors(model):
        return f"{place} holds a tensor that is not registered as a parameter or buffer there"
    return None


def find_shared_storage(model: nn.Module, *, buffers: bool = True) -> tuple[str, str] | None:
    """Two tensors of a model that lie in one storage without being one; with `buffers`, also where both are buffers."""
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter):
            continue
        first, owner = owners.setdefault(storage_key(tensor), (name, tensor))
        if owner is not tensor and (buffers or isinstance(owner, nn.Parameter)):  # parameters come first
            return first, name
    return None


def unregistered_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a model reaches without going through a registered parameter or buffer, and from where.

    Attributes of modules and of parameters, containers, closures, partial functions and modules that are not
    registered are looked through; other objects are not.
    """
    registered = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_A_MODULE or (key == "_flat_weights" and isinstance(module, nn.RNNBase)):
                continue  # torch's own RNNs bring their list up to date
            place = f"{name}.{key}" if name else key
            yield from ((place, tensor) for tensor in _tensors_in(value, registered, seen))
    for name, param in model.named_parameters():
        for key, value in () if is_lazy(param) else vars(param).items():
            yield from ((f"{name}.{key}", tensor) for tensor in _tensors_in(value, registered, seen))


def _tensors_in(value: Any, registered: AbstractSet[int], seen: set[int]) -> Iterator[Tensor]:
    todo = deque([value])
    while todo:
        each = todo.popleft()
        if isinstance(each, Tensor):
            yield each
        elif id(each) not in registered and id(each) not in seen:
            inner = _inside(each)
            if inner:
                seen.add(id(each))
                todo.extend(inner)


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict | MappingProxyType):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, FunctionType):
        return [*(content for cell in value.__closure__ or () for content in get_referents(cell)), value.__defaults__]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):
        return list(vars(value).values())
    return ()


# What gives a model its first values, when it was built without any.
#
# [Note: when a model may be built without values]
# On the meta device a constructor runs, but its numbers are lost. So a model may be built there only if something
# else makes such numbers again, module by module. That is, in this order:
# - its own `init_weights(module)`, if it fills every tensor;
# - the operations of its constructor, repeated ([Note: the constructor is the initializer], `deferred_init.py`), then
#   its `init_weights(module)`, if it has one;
# - of a model that came as an object, whose constructor nobody watched: each module's `reset_parameters`.
# `init_weights` is left out where it would lose something: where the constructor wrote tensors into what it fills, or
# wrote over what it had written, as those do that give some weights another deviation at the end. Where nothing of this
# can be done, or the model has something that would stay behind on the meta device (a gradient hook, a tensor that is
# no
# parameter and no buffer: `why_not_on_meta`), the model is built for real.


Initializer = Callable[[nn.Module], None]
Writes = list[tuple[Tensor, list[RecordedOperation]]]
"""Tensors of a model, and what wrote into each."""


@dataclass(frozen=True, slots=True)
class InitializerChain:
    """Two initializers of one model, the second after the first."""

    first: Initializer
    second: Initializer

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module."""
        self.first(module)
        self.second(module)


def find_initializer(model: nn.Module, built: ConstructionRecord | None = None) -> Initializer | None:
    """What sets the values of one module of a model on the meta device, or None where it must be built for real.

    `built` is the record of the model's construction; without it the model's own word has to do.
    See [Note: when a model may be built without values].
    """
    if not all(tensor.is_meta for tensor in _tensors(model)) or why_not_on_meta(model) is not None:
        return None
    declared = _declared(model)
    if built is None:
        # Many write `init_weights` for the modules they care about, and leave the rest as torch makes them.
        possible = (_reset,) if declared is None else (declared, InitializerChain(_reset, declared))
        return next((each for each in possible if _fills(_writes(model, each))), None)
    # Both are asked before `init_weights` is tried, which may exchange storages.
    replay, before = find_replay(model, built), {id(tensor): built.writes_to(tensor) for tensor in _tensors(model)}
    writes = None if declared is None else _writes(model, declared)
    if declared is None or writes is None or any(_loses(before[id(tensor)], made) for tensor, made in writes):
        return replay
    if _fills(writes):
        return declared
    return None if replay is None else InitializerChain(replay, declared)


def _declared(model: nn.Module) -> Initializer | None:
    declared = getattr(model, "init_weights", None)
    if declared is None:
        return None
    required = [p for p in inspect.signature(declared).parameters.values() if p.default is p.empty]
    takes_a_module = len(required) == 1 or "module" in inspect.signature(declared).parameters
    return declared if takes_a_module else None


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _writes(model: nn.Module, initializer: Initializer) -> Writes | None:
    """What an initializer does to each tensor, of the first module that has it; None where it fails."""
    found: Writes = []
    seen: set[int] = set()
    for module in model.modules():
        own = [tensor for tensor in direct_tensors(module).values() if id(tensor) not in seen]
        if not own:
            continue
        seen.update(id(tensor) for tensor in own)
        try:
            with torch.no_grad(), ConstructionRecord() as record:
                initializer(module)
        except Exception:  # it looks at values, or means something else by its argument
            return None
        found += [(tensor, record.writes_to(tensor)) for tensor in own]
    return found


def _fills(writes: Writes | None) -> bool:
    return writes is not None and all(made for _, made in writes)


def _loses(before: list[RecordedOperation], made: list[RecordedOperation]) -> bool:
    """Whether something that a constructor wrote is lost where an initializer writes instead."""
    if not made:
        return False
    from_tensors = any(read.storage != into.storage for step in before for read in step.read for into in step.written)
    starts = range(len(before) - len(made) + 1)
    same = [all(a.does_as(b) for a, b in zip(before[start:], made, strict=False)) for start in starts]
    return from_tensors or (any(same) and not same[-1])


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def give_storage(model: nn.Module, device: torch.device, *, then: Callable[[nn.Module], None] | None = None) -> None:
    """Allocate every tensor that is still on the meta device, keeping tied parameters and shared buffers tied.

    Of a sharded model `then` may take each unit's memory away again, before the next unit gets its own.
    """
    ties: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for key, tensor in tensors.items():
                if tensor is not None:
                    ties.setdefault(id(tensor), []).append((tensors, key))
    if then is None:
        model.to_empty(device=device)
    else:
        for module in [module for module in model.modules() if hasattr(module, "unshard")][::-1]:  # the root is last
            for inner in _own_modules(module):
                inner.to_empty(device=device, recurse=False)
            then(module)
    for (first, first_key), *others in ties.values():
        for tensors, key in others:
            tensors[key] = first[first_key]


def _own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules of a unit that are in no other unit inside; itself last, since it looks at all of them then."""
    inner = [module for child in unit.children() if not hasattr(child, "unshard") for module in _own_modules(child)]
    return [*inner, unit]


Keep = Callable[[nn.Parameter, torch.Tensor], bool]
"""Is given a parameter and its whole values in fp32, and says whether the parameter itself need not have them."""


def initialize(
    model: nn.Module, initializer: Initializer, *, seed: int, device: torch.device, keep: Keep | None = None
) -> None:
    """Set all values; see [Note: initial values do not depend on the layout]."""
    done: set[int] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            held = {k: p for k, p in module._parameters.items() if p is not None}
            fresh = {k for k, p in held.items() if id(p) not in done}
            if not fresh and all(b is None for b in module._buffers.values()):
                continue
            done.update(id(p) for p in held.values())
            torch.manual_seed(_seed_of(seed, name))
            _initialize_module(module, held, fresh, initializer, device, keep)


def initialize_buffers(model: nn.Module, initializer: Initializer, *, seed: int, device: torch.device) -> None:
    """Set what is no parameter, such as tables that are made from the configuration."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            if any(buffer is not None for buffer in module._buffers.values()):
                held = {key: param for key, param in module._parameters.items() if param is not None}
                torch.manual_seed(_seed_of(seed, name))
                _initialize_module(module, held, set(), initializer, device, None)


def _initialize_module(
    module: nn.Module,
    held: dict[str, nn.Parameter],
    fresh: set[str],
    initializer: Initializer,
    device: torch.device,
    keep: Keep | None,
) -> None:
    """Fill the `fresh` parameters of one module; the others it shares with a module that came before."""
    # A parameter that is whole here already is filled where it is.
    there = {key for key in fresh if keep is None and _is_whole(held[key], device)}
    whole = {
        key: nn.Parameter(
            p.detach() if key in there else torch.empty(p.shape, dtype=_wide(p, keep), device=device),
            requires_grad=p.requires_grad,
        )
        for key, p in held.items()
    }
    for key, param in held.items():
        vars(whole[key]).update(vars(param))  # an initializer may ask for what was set on a parameter
    module._parameters.update(whole)
    try:
        initializer(module)
    finally:
        module._parameters.update(held)
    for key in fresh:
        values = whole[key].data
        if key in there and _storage(values) == _storage(held[key]):
            continue  # unless the initializer gave it another one
        if keep is None or not keep(held[key], values):
            assign_full_tensor(held[key], values)


def _storage(tensor: torch.Tensor) -> int:
    return storage_key(tensor)


def _is_whole(param: nn.Parameter, device: torch.device) -> bool:
    return not is_sharded(param) and param.device == device and param.is_contiguous()


def _wide(param: nn.Parameter, keep: Keep | None) -> torch.dtype:
    rounds = keep is not None and param.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if rounds else param.dtype


def assign_full_tensor(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, of which this rank may hold only a part."""
    with torch.no_grad():
        to_local(param).copy_(local_shard_of(param, whole))


def local_shard_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor that is spread as a parameter is. Call it without gradients enabled."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every rank has the whole tensor, so nothing is sent.
    device = param.device_mesh.device_type
    part = distribute_tensor(whole.to(device), param.device_mesh, param.placements, src_data_rank=None)
    return part.to_local()


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") % 2**63


def copy_from_main(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Make every rank's parameters and buffers those of rank 0, tensor by tensor."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(device).contiguous()
            dist.broadcast(staged, src=0, group=group)
            tensor.copy_(staged)
