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
    """A submodule that is wrapped as one, and its name in the model."""

    name: str
    module: nn.Module


@runtime_checkable
class HasRootParameters(Protocol):
    """A model whose forward itself reads parameters of its submodules, besides calling the submodules."""

    def root_parameters(self) -> Sequence[Tensor]:
        """Return the parameters of submodules that the model's own forward reads."""


def find_wrap_units(model: nn.Module, wrap: WrapConfig) -> list[WrapUnit]:
    """Return the wrap units of a model: those that `wrap` selects, else its `block_classes`, else repeated layers.

    Units are never nested. A module with a parameter that is also used outside of it does not become a unit: the root
    unshards that parameter, so that all its users can read it.
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
            # A container such as `nn.ModuleList` is never called itself, so FSDP's forward hooks on it would not run.
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
    """Return the modules with at least `min_params` parameters, not counting those of units inside them."""
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
    # A unit may hold a parameter under two names. Units are dropped if they share a parameter with another unit or with
    # the root, directly or through a shared module. So count the owners of each parameter: units by index, -1 the root.
    owners: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for parameter in unit.module.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    for module in _outside(model, {id(unit.module) for unit in units}):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(-1)
    # Parameters that the root's own forward reads are used outside of the unit that holds them.
    for param in model.root_parameters() if isinstance(model, HasRootParameters) else ():
        owners.setdefault(id(param), set()).add(-1)
    shared = {index for indices in owners.values() if len(indices) > 1 for index in indices}
    return [unit for index, unit in enumerate(units) if index not in shared]


def _outside(model: nn.Module, units: set[int]) -> list[nn.Module]:
    """Return the modules that can be reached from the model without passing a unit; units may hold them as well."""
    outside: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in outside and id(module) not in units:
            outside[id(module)] = module
            pending += module.children()
    return list(outside.values())


def first_input(inputs: Any) -> Any:
    """Return the first value of a mapping, list or tuple, anything else unchanged: the input of an `nn.Sequential`."""
    if isinstance(inputs, Mapping):
        return next(iter(inputs.values()))
    return inputs[0] if isinstance(inputs, (tuple, list)) else inputs
