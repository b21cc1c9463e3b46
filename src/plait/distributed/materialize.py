"""Meta-device initialization: from a model without storage to one with initial values, on each rank.

[Note: initial values do not depend on the layout]
The initial values of a module depend only on the seed and the module's name. Each rank computes the full tensors of one
module at a time, from that seed, and keeps its shards. So any layout starts from the same weights, and besides its
shards a rank holds the full tensors of at most one module.
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
from plait.distributed.stacks import Region, StackShard, WholeStackError, fill_shards, find_stacks
from plait.torch_internals import gradient_hooks_of, storage_key

# What the author of a model attached to its parameters: hooks, attributes, references.
#
# Parameters are replaced: meta tensors by real ones, and full tensors by DTensors when they are sharded. Attributes are
# copied to the new parameters. A gradient hook cannot be copied, and a list or closure that holds the old tensor would
# not get the new one. A model with either is built on a real device, and a strategy that replaces its parameters raises
# an error.


Attributes = Mapping[str, Mapping[str, Any]]
"""Parameter name → attribute name → value."""
_OF_A_MODULE = frozenset({"_parameters", "_buffers", "_modules"})


def param_attributes(model: nn.Module) -> Attributes:
    """Return the attributes that were set on the parameters of a model, such as `param.no_weight_decay = True`."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: dict(vars(param)) for name, param in named if not is_lazy(param) and vars(param)}


def restore_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Set the attributes that `param_attributes` returned on the parameters that now have these names."""
    for name, param in model.named_parameters(remove_duplicate=False) if attributes else ():
        for key, value in attributes.get(name, {}).items():
            vars(param).setdefault(key, value)


def gradient_hooks(model: nn.Module) -> dict[str, str]:
    """Return the parameters with gradient hooks: parameter name → name of its first hook."""
    first_hooks: dict[str, str] = {}
    for name, param in model.named_parameters():
        for hook in gradient_hooks_of(param):
            first_hooks.setdefault(name, getattr(hook, "__qualname__", type(hook).__qualname__))
    return first_hooks


def why_not_on_meta(model: nn.Module) -> str | None:
    """Return what a model on the meta device would lose when it is given storage, as a reason; None if nothing."""
    for name, hook in gradient_hooks(model).items():
        return f"the parameter {name!r} has a gradient hook ({hook})"
    shared = find_shared_storage(model)
    if shared is not None:
        return f"{shared[0]!r} and {shared[1]!r} share their storage without being one tensor"
    for path, _ in unregistered_tensors(model):
        return f"{path} holds a tensor that is not registered as a parameter or buffer there"
    return None


def find_shared_storage(model: nn.Module, *, buffers: bool = True) -> tuple[str, str] | None:
    """Return the names of two tensors of a model that are views of one storage; None if there are none.

    Without `buffers`, two buffers that share a storage are not reported.
    """
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter):
            continue
        first, owner = owners.setdefault(storage_key(tensor), (name, tensor))
        if owner is not tensor and (buffers or isinstance(owner, nn.Parameter)):  # `owner` is a buffer only if both are
            return first, name
    return None


def unregistered_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for tensors that a model holds without registering them as parameters or buffers.

    It searches attributes of modules and of parameters, containers, closures, partial functions and modules that are
    not registered, but no other objects.
    """
    registered = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_A_MODULE or (key == "_flat_weights" and isinstance(module, nn.RNNBase)):
                continue  # torch's own RNNs update their list
            path = f"{name}.{key}" if name else key
            yield from ((path, tensor) for tensor in _tensors_in(value, registered, seen))
    for name, param in model.named_parameters():
        for key, value in () if is_lazy(param) else vars(param).items():
            yield from ((f"{name}.{key}", tensor) for tensor in _tensors_in(value, registered, seen))


def _tensors_in(value: Any, registered: AbstractSet[int], seen: set[int]) -> Iterator[Tensor]:
    pending = deque([value])
    while pending:
        item = pending.popleft()
        if isinstance(item, Tensor):
            yield item
        elif id(item) not in registered and id(item) not in seen:
            inner = _inside(item)
            if inner:
                seen.add(id(item))
                pending.extend(inner)


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


# What initializes a model that was built on the meta device.
#
# [Note: when a model may be built without values]
# On the meta device a constructor runs, but the values that it computes are lost. So a model may be built there only if
# an initializer can compute these values later, module by module. The first of these that applies is used:
# - the model's own `init_weights(module)`, if it fills every tensor;
# - the recorded operations of its constructor, repeated ([Note: the constructor is the initializer],
#   `deferred_init.py`), then its `init_weights(module)`, if it has one;
# - for a model that was passed as an object, whose constructor was not recorded: each module's `reset_parameters`, then
#   its `init_weights(module)`, if it has one.
# `init_weights` is not used if it would overwrite values that only the constructor sets: values computed from other
# tensors, or a second initialization by the constructor (many models initialize some weights again at the end, with
# another standard deviation). With a true `initializes_last` it is meant to: the constructors of `transformers` call it
# at their end, except on the meta device. If none of these applies, or the model has a gradient hook, or a tensor that
# is neither a parameter nor a buffer and so would stay on the meta device (`why_not_on_meta`), it is built on a real
# device.


Initializer = Callable[[nn.Module], None]
Writes = list[tuple[Tensor, list[RecordedOperation]]]
"""Each tensor of a model, with the operations that wrote to it."""


@dataclass(frozen=True, slots=True)
class InitializerChain:
    """An initializer that calls two others, one after the other."""

    first: Initializer
    second: Initializer

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module."""
        self.first(module)
        self.second(module)


def find_initializer(model: nn.Module, built: ConstructionRecord | None = None) -> Initializer | None:
    """Return a function that sets the values of one module; None if the model must be built on a real device.

    `built` is the record of the model's construction, if there is one.
    See [Note: when a model may be built without values].
    """
    if not all(tensor.is_meta for tensor in _all_tensors(model)) or why_not_on_meta(model) is not None:
        return None
    declared = _declared(model)
    if built is None:
        # The `init_weights` of many models sets only some modules, and leaves the others as torch initializes them.
        candidates = (_reset,) if declared is None else (declared, InitializerChain(_reset, declared))
        return next((initializer for initializer in candidates if _fills(_writes(model, initializer))), None)
    # Computed before `init_weights` is tried (`_writes`), which may replace storages.
    replay, before = find_replay(model, built), {id(tensor): built.writes_to(tensor) for tensor in _all_tensors(model)}
    writes = None if declared is None else _writes(model, declared)
    if declared is not None and getattr(model, "initializes_last", False):
        if _fills(writes):
            return declared
        return None if writes is None or replay is None else InitializerChain(replay, declared)
    if declared is None or writes is None or any(_loses(before[id(tensor)], written) for tensor, written in writes):
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
    """Return what an initializer writes to each tensor, called for the first module that has it; None if it fails."""
    writes: Writes = []
    seen: set[int] = set()
    for module in model.modules():
        direct = [tensor for tensor in direct_tensors(module).values() if id(tensor) not in seen]
        if not direct:
            continue
        seen.update(id(tensor) for tensor in direct)
        try:
            with torch.no_grad(), ConstructionRecord() as record:
                initializer(module)
        except Exception:  # it reads values, or expects another argument
            return None
        writes += [(tensor, record.writes_to(tensor)) for tensor in direct]
    return writes


def _fills(writes: Writes | None) -> bool:
    return writes is not None and all(written for _, written in writes)


def _loses(before: list[RecordedOperation], written: list[RecordedOperation]) -> bool:
    """Return whether an initializer's writes to a tensor (`written`) would lose values of the constructor (`before`).

    They do if the constructor computed values from other tensors, or if it did the same writes and then others.
    """
    if not written:
        return False
    from_tensors = any(
        read.storage != target.storage
        for operation in before
        for read in operation.read
        for target in operation.written
    )
    starts = range(len(before) - len(written) + 1)
    same = [all(a.does_as(b) for a, b in zip(before[start:], written, strict=False)) for start in starts]
    return from_tensors or (any(same) and not same[-1])


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def give_storage(model: nn.Module, device: torch.device, *, then: Callable[[nn.Module], None] | None = None) -> None:
    """Allocate every tensor of a model on `device`, uninitialized; tied parameters and shared buffers stay tied.

    In a sharded model, `then` is called for each FSDP module after its tensors are allocated, before those of the next:
    it may free the memory again.
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
            for inner in _modules_of_unit(module):
                inner.to_empty(device=device, recurse=False)
            then(module)
    for (first, first_key), *others in ties.values():
        for tensors, key in others:
            tensors[key] = first[first_key]


def _modules_of_unit(unit: nn.Module) -> list[nn.Module]:
    """Return the modules of an FSDP module that are not in another FSDP module inside it; the module itself is last."""
    inner = [module for child in unit.children() if not hasattr(child, "unshard") for module in _modules_of_unit(child)]
    return [*inner, unit]


Keep = Callable[[nn.Parameter, torch.Tensor], bool]
"""(parameter, this rank's part of its values, in fp32 for 16-bit parameters) → True if it need not be filled."""


def initialize(
    model: nn.Module,
    initializer: Initializer,
    *,
    seed: int,
    device: torch.device,
    keep: Keep | None = None,
    buffers_only: bool = False,
) -> None:
    """Set all initial values; see [Note: initial values do not depend on the layout].

    `keep`, if given, gets the values of each parameter; those for which it returns True are not filled. With
    `buffers_only`, parameters keep their values.
    """
    done: set[int] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        for name, module in model.named_modules():
            held = {k: p for k, p in module._parameters.items() if p is not None}
            fresh = set() if buffers_only else {k for k, p in held.items() if id(p) not in done}
            if not fresh and all(b is None for b in module._buffers.values()):
                continue
            done.update(id(p) for p in held.values())
            stacks = find_stacks({key: held[key] for key in fresh}, local_region)
            start = partial(torch.manual_seed, _seed_of(seed, name))
            if not stacks or not _initialize_module(module, held, fresh, initializer, device, keep, start, stacks):
                _initialize_module(module, held, fresh, initializer, device, keep, start)


def _initialize_module(
    module: nn.Module,
    held: dict[str, nn.Parameter],
    fresh: set[str],
    initializer: Initializer,
    device: torch.device,
    keep: Keep | None,
    start: Callable[[], object],
    stacks: Mapping[str, Region] = MappingProxyType({}),
) -> bool:
    """Fill the `fresh` parameters of one module; the others are left, since an earlier module shares them.

    Of `stacks`, only the region of this rank is computed. Return False if the initializer does not allow that.
    """
    start()
    # A parameter that is not sharded is filled in place.
    in_place = {key for key in fresh - stacks.keys() if keep is None and _is_whole(held[key], device)}
    shards = {key: StackShard(held[key], region, _wide(held[key], keep), device) for key, region in stacks.items()}
    full = {
        key: nn.Parameter(
            shards[key].stand_in
            if key in shards
            else p.detach()
            if key in in_place
            else torch.empty(p.shape, dtype=_wide(p, keep), device=device),
            requires_grad=p.requires_grad,
        )
        for key, p in held.items()
    }
    for key, param in held.items():
        vars(full[key]).update(vars(param))  # an initializer may read attributes of a parameter
    module._parameters.update(full)
    try:
        with fill_shards(shards.values()):
            initializer(module)
    except WholeStackError:
        return False
    finally:
        module._parameters.update(held)
    if any(storage_key(full[key]) != storage_key(shard.stand_in) for key, shard in shards.items()):
        return False  # the initializer replaced a storage
    for key in fresh:
        values = shards[key].local if key in shards else full[key].data
        if key in in_place and storage_key(values) == storage_key(held[key]):
            continue  # filled in place, unless the initializer replaced its storage
        local = local_shard_of(held[key], values) if values.shape == held[key].shape else values
        if keep is None or not keep(held[key], local):
            assign_local(held[key], local)
    return True


def _is_whole(param: nn.Parameter, device: torch.device) -> bool:
    return not is_sharded(param) and param.device == device and param.is_contiguous()


def _wide(param: nn.Parameter, keep: Keep | None) -> torch.dtype:
    rounds = keep is not None and param.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if rounds else param.dtype


def assign_full_tensor(param: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor into a parameter; if the parameter is sharded, only this rank's part."""
    with torch.no_grad():
        assign_local(param, local_shard_of(param, full))


def assign_local(param: torch.Tensor, local: torch.Tensor) -> None:
    """Copy this rank's part of a tensor into a parameter."""
    with torch.no_grad():
        to_local(param).copy_(local)


def local_shard_of(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a full tensor, by the placements of `param`. Call it under `torch.no_grad()`."""
    if not is_sharded(param):
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every rank has the full tensor, so nothing is sent.
    device = param.device_mesh.device_type
    sharded = distribute_tensor(full.to(device), param.device_mesh, param.placements, src_data_rank=None)
    return sharded.to_local()


def local_region(param: torch.Tensor) -> Region | None:
    """Return which region of the full tensor this rank holds of a parameter: () for all of it, None for nothing.

    Also () if what it holds is not one region: then it needs the full tensor (`local_shard_of`).
    """
    if not is_sharded(param):
        return ()
    from torch.distributed.tensor import Replicate, distribute_tensor

    region = []
    for dim, size in enumerate(param.shape):
        placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in param.placements]
        if all(isinstance(placement, Replicate) for placement in placements):
            region.append(slice(0, size))
            continue
        # The indices along this dimension are sharded like the tensor, whatever the kind of placement is.
        shape = [size if d == dim else 1 for d in range(param.ndim)]
        indices = torch.arange(size, device=param.device_mesh.device_type).view(shape)
        local = distribute_tensor(indices, param.device_mesh, placements, src_data_rank=None).to_local().flatten()
        if not len(local):
            return None
        first, last = int(local[0]), int(local[-1])
        if last - first + 1 != len(local) or bool((local.diff() != 1).any()):
            return ()
        region.append(slice(first, last + 1))
    return tuple(region)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") % 2**63


def copy_from_main(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to every rank, tensor by tensor; a collective of the group."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(device).contiguous()
            dist.broadcast(staged, src=0, group=group)
            tensor.copy_(staged)
