"""Wrap units: the submodules that are sharded, checkpointed (recomputed) and compiled as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from plait.config import WrapConfig
from plait.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class WrapUnit:
    """A submodule and its name in the model."""

    name: str
    module: nn.Module


@runtime_checkable
class HasRootParameters(Protocol):
    """A model whose forward uses parameters of its modules itself, besides calling the modules."""

    def root_parameters(self) -> Sequence[Tensor]:
        """Those parameters."""


def find_wrap_units(model: nn.Module, wrap: WrapConfig) -> list[WrapUnit]:
    """The units of a model: those that `wrap` selects, else the model's own blocks, else repeated layers.

    Units are never nested, and none holds a parameter that is also used outside of it: such a parameter belongs to
    the root, where all its users can see it.
    """
    if wrap.classes or wrap.names:
        chosen = _by_class_or_name(model, wrap)
    elif wrap.min_params is not None:
        chosen = _by_size(model, wrap.min_params)
    else:
        chosen = _by_declaration(model) or _by_repetition(model)
    return _without_shared_parameters(model, _topmost(chosen))


def _by_class_or_name(model: nn.Module, wrap: WrapConfig) -> list[WrapUnit]:
    chosen: list[WrapUnit] = []
    matched: set[str] = set()
    problems: list[Problem] = []
    for name, module in model.named_modules():
        matches = {c for c in wrap.classes if type(module).__name__ == c}
        matches |= {p for p in wrap.names if fnmatchcase(name, p)}
        if not matches or not name:
            continue
        matched |= matches
        if _is_called(module):
            chosen.append(WrapUnit(name, module))
        elif not any(_inside(name, inner, wrap.names) for inner, _ in module.named_modules()):
            # A container is never called itself, so hooks around its call would not run.
            problems.append(
                Problem(
                    f"strategy.wrap.{'names' if matches & set(wrap.names) else 'classes'}",
                    f"{name!r} is a {type(module).__name__}, which holds modules and has no forward of its own",
                    f"Name what it holds: `{name}.*`.",
                )
            )
    for key, patterns in (("classes", wrap.classes), ("names", wrap.names)):
        for pattern in patterns:
            if pattern not in matched:
                known = sorted({type(m).__name__ for m in model.modules()}) if key == "classes" else _examples(model)
                problems.append(
                    Problem(
                        f"strategy.wrap.{key}",
                        f"{pattern!r} matches no module",
                        f"There are: {', '.join(known)}.",
                    )
                )
    if problems:
        raise ConfigError(problems)
    return chosen


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _inside(container: str, inner: str, patterns: Sequence[str]) -> bool:
    return bool(inner) and any(fnmatchcase(f"{container}.{inner}", pattern) for pattern in patterns)


def _examples(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name][:20]


def _by_size(model: nn.Module, min_params: int) -> list[WrapUnit]:
    """Children first: a module becomes a unit when its parameters outside of smaller units are large enough."""
    chosen: list[WrapUnit] = []

    def add_units(name: str, module: nn.Module) -> int:
        direct = sum(p.numel() for p in module.parameters(recurse=False))
        rest = direct + sum(
            add_units(f"{name}.{key}" if name else key, child) for key, child in module.named_children()
        )
        if rest >= min_params and name and _is_called(module):
            chosen.append(WrapUnit(name, module))
            return 0
        return rest

    add_units("", model)
    return chosen


def _by_declaration(model: nn.Module) -> list[WrapUnit]:
    classes = getattr(model, "block_classes", ())
    return [WrapUnit(name, m) for name, m in model.named_modules() if classes and isinstance(m, classes)]


def _by_repetition(model: nn.Module) -> list[WrapUnit]:
    chosen = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        counts = Counter(type(child) for child in module)
        for key, child in module.named_children():
            if counts[type(child)] > 1 and any(True for _ in child.parameters()):
                chosen.append(WrapUnit(f"{name}.{key}" if name else key, child))
    return chosen


def _topmost(units: list[WrapUnit]) -> list[WrapUnit]:
    inside = {id(m) for unit in units for m in unit.module.modules() if m is not unit.module}
    seen: set[int] = set()
    result = []
    for unit in units:
        if id(unit.module) not in inside and id(unit.module) not in seen:
            seen.add(id(unit.module))
            result.append(unit)
    return result


def _without_shared_parameters(model: nn.Module, units: list[WrapUnit]) -> list[WrapUnit]:
    # A parameter that one unit holds under two names is fine; one that two units, or a unit and the root, hold is
    # not. So count owners, not names. They may also share the module that holds it.
    owners: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for parameter in unit.module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    for module in _outside(model, {id(unit.module) for unit in units}):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(-1)
    # What the root passes from one module to another is used outside of both.
    for param in model.root_parameters() if isinstance(model, HasRootParameters) else ():
        owners.setdefault(id(param), set()).add(-1)
    shared = {index for indices in owners.values() if len(indices) > 1 for index in indices}
    return [unit for index, unit in enumerate(units) if index not in shared]


def _outside(model: nn.Module, units: set[int]) -> list[nn.Module]:
    """The modules that can be reached without going through a unit; a unit may hold some of them as well."""
    outside: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in outside and id(module) not in units:
            outside[id(module)] = module
            pending += module.children()
    return list(outside.values())


def first_input(inputs: Any) -> Any:
    """The first value of a mapping or sequence; anything else as it is. With that an `nn.Sequential` is called."""
    if isinstance(inputs, Mapping):
        return next(iter(inputs.values()))
    return inputs[0] if isinstance(inputs, (tuple, list)) else inputs
