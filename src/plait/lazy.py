"""Packages whose names are loaded on first use: a package's `__init__` says what it offers, and loads none of it.

Type checkers read the imports under `TYPE_CHECKING`; at run time `attach_names` gives the package the same names:

    if TYPE_CHECKING:
        from plait.models import LossTerm as LossTerm
    else:
        attach_names(__name__, {"loss": ["LossTerm"]})

[Note: a name and a file of one spelling] Importing a submodule binds it in its package: once the file
`prove/prove.py` is loaded, `plait.prove.prove` would be the module and the function of that name hidden, or not, as the
order of imports has it. So no submodule takes the place of a name that its package offers.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


def attach_names(
    package: str, offers: Mapping[str, Sequence[str]], *, unknown: Callable[[str, str], AttributeError] | None = None
) -> None:
    """Let `package` offer names of its submodules, each loaded when it is first asked for.

    `offers` has the names by submodule (`"loss"`, `"native.engine"`) or by a module elsewhere (`"plait.…"`),
    `Offered=Inside` where a name is another one there; under `"."` stand submodules that are offered themselves.
    `unknown(package, name)` makes the error for a name that is not there.
    """
    homes: dict[str, tuple[str, str]] = {}
    for home, names in offers.items():
        for name in names:
            if home == ".":
                homes[name.rpartition(".")[2]] = f"{package}.{name}", ""
            else:
                offered, _, inside = name.partition("=")
                homes[offered] = home if home.startswith("plait.") else f"{package}.{home}", inside or offered
    offer_names(sys.modules[package], homes, unknown or _unknown)


def offer_names(
    module: ModuleType, homes: Mapping[str, tuple[str, str]], unknown: Callable[[str, str], AttributeError]
) -> None:
    """Let `module` offer names: each is the module in `homes`, or what that has under the second name, if any."""
    vars(module).update(__all__=sorted(homes), __homes__=homes, __unknown__=unknown)
    module.__class__ = _Package


class _Package(ModuleType):
    __homes__: Mapping[str, tuple[str, str]]
    """Where each name lies: a module, and its name there; none if the module itself is offered."""
    __unknown__: Callable[[str, str], AttributeError]

    def __getattr__(self, name: str) -> Any:
        if name not in self.__homes__:
            raise self.__unknown__(self.__name__, name)
        home, inside = self.__homes__[name]
        try:
            value = import_module(home)
            if inside:
                value = getattr(value, inside)
        except AttributeError as error:  # which `from … import` would take for a name that is not offered, and drop
            raise ImportError(f"{self.__name__}.{name}: {error}", name=home) from error
        vars(self)[name] = value  # so that it is asked for once
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        hides = isinstance(value, ModuleType) and bool(self.__homes__.get(name, ("", ""))[1])
        if not hides:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__homes__})


def _unknown(package: str, name: str) -> AttributeError:
    # With the package, so that Python itself names the nearest name where the error is shown.
    return AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
