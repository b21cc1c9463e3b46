"""Packages whose names are loaded on first use: a package's `__init__` lists what it offers, and imports none of it.

The list is the imports under `TYPE_CHECKING`. Type checkers read them; at run time `attach_names` reads them from the
source, and gives the package the same names:

    if TYPE_CHECKING:
        from plait.data.steps import MicroBatch as MicroBatch
    else:
        from plait.lazy import attach_names

        attach_names(__name__)

[Note: a name and a file of one spelling] Importing a submodule binds it in its package: once the file
`prove/prove.py` is loaded, `plait.prove.prove` would be the module and the function of that name hidden, or not, as the
order of imports has it. So no submodule takes the place of a name that its package offers.
"""

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^    from ([\w.]+) import \(?\s*(\w+) as (\w+)", re.MULTILINE)
"""An import that offers a name. One per line, with `as` also for a name that stays, as type checkers want it."""


def attach_names(package: str, *, unknown: Callable[[str, str], AttributeError] | None = None) -> None:
    """Let `package` offer the names that its source imports under `TYPE_CHECKING`, each imported on first use.

    `unknown(package, name)` returns the error for a name that is not offered.
    """
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    block = source.partition("\nif TYPE_CHECKING:\n")[2].partition("\nelse:\n")[0]
    homes = {
        name: (f"{package}.{inside}", "") if home == package else (home, inside)
        for home, inside, name in _IMPORT.findall(block)
    }
    offer_names(module, homes, unknown or _unknown)


def offer_names(
    module: ModuleType, homes: Mapping[str, tuple[str, str]], unknown: Callable[[str, str], AttributeError]
) -> None:
    """Let `module` offer names: each is the module in `homes`, or that module's attribute under the second name."""
    vars(module).update(__all__=sorted(homes), __homes__=homes, __unknown__=unknown)
    module.__class__ = _Package


class _Package(ModuleType):
    __homes__: Mapping[str, tuple[str, str]]
    """The module of each name, and its name there; empty if the module itself is offered."""
    __unknown__: Callable[[str, str], AttributeError]

    def __getattr__(self, name: str) -> Any:
        if name not in self.__homes__:
            raise self.__unknown__(self.__name__, name)
        home, inside = self.__homes__[name]
        try:
            value = import_module(home)
            if inside and hasattr(value, "__path__") and not hasattr(value, inside):
                value = import_module(f"{home}.{inside}")  # a submodule
            elif inside:
                value = getattr(value, inside)
        except AttributeError as error:  # `from … import` would report an AttributeError as a name that is not offered
            raise ImportError(f"{self.__name__}.{name}: {error}", name=home) from error
        vars(self)[name] = value  # so that it is looked up once
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        hides = isinstance(value, ModuleType) and bool(self.__homes__.get(name, ("", ""))[1])
        if not hides:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__homes__})


def _unknown(package: str, name: str) -> AttributeError:
    # With `obj`, so that Python suggests the nearest name when it prints the error.
    return AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
