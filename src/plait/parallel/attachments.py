"""What the author of a model put on its parameters beside their values: hooks, attributes, references.

Techniques exchange parameters: the meta device for a real one, a whole tensor for a DTensor. An attribute is carried
over. A gradient hook belongs to autograd and not to Python, and whoever holds the old tensor in a list or a closure
keeps the old one: such a model is built on a real device, and refused where its parameters would be exchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from gc import get_referents
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.torch_internals import gradient_hooks_of, storage_key

Attributes = Mapping[str, Mapping[str, Any]]
"""Of each parameter, by name."""
_OF_A_MODULE = frozenset({"_parameters", "_buffers", "_modules"})


def attributes_of(model: nn.Module) -> Attributes:
    """The attributes that somebody set on parameters of a model, such as `param.no_weight_decay = True`."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: dict(vars(param)) for name, param in named if not is_lazy(param) and vars(param)}


def give_attributes(model: nn.Module, attributes: Attributes) -> None:
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
    shared = memory_in_common(model)
    if shared is not None:
        return f"{shared[0]!r} and {shared[1]!r} share their memory without being one tensor"
    for place, _ in held_elsewhere(model):
        return f"{place} holds a tensor that is not registered as a parameter or buffer there"
    return None


def memory_in_common(model: nn.Module, *, buffers: bool = True) -> tuple[str, str] | None:
    """Two tensors of a model that lie in one storage without being one; with `buffers`, also where both are buffers."""
    owners: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or type(tensor) not in (Tensor, nn.Parameter):
            continue
        first, owner = owners.setdefault(storage_key(tensor), (name, tensor))
        if owner is not tensor and (buffers or isinstance(owner, nn.Parameter)):  # parameters come first
            return first, name
    return None


def held_elsewhere(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
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
