"""Packages whose names are loaded on first use: a package's `__init__` says what it offers, and loads none of it.

Type checkers read the imports under `TYPE_CHECKING`; at run time `attach` gives the package the same names:

    if TYPE_CHECKING:
        from plait.spec.loss import LossTerm as LossTerm
    else:
        attach(__name__, {"loss": ["LossTerm"]})

[Note: a name and a file of one spelling] Importing a submodule binds it in its package: once `plait.prove.prove` is
loaded, `plait.prove.prove` would be the module, and the function of that name hidden or not, as the order of imports
has it. So a package with attached names lets no submodule take the place of a name that it offers.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


def attach(
    package: str, offers: Mapping[str, Sequence[str]], *, unknown: Callable[[str, str], AttributeError] | None = None
) -> None:
    """Let `package` offer the names of its submodules, each loaded when it is first asked for.

    `offers` has the names by submodule (`"loss"`, `"native.engine"`); under `"."` stand submodules that are offered
    themselves. `unknown(package, name)` makes the error for a name that is not there.
    """
    module = sys.modules[package]
    homes = {name: home for home, names in offers.items() for name in names}
    vars(module).update(__all__=sorted(homes), __homes__=homes, __unknown__=unknown or _unknown)
    module.__class__ = _Package


class _Package(ModuleType):
    __homes__: Mapping[str, str]
    __unknown__: Callable[[str, str], AttributeError]

    def __getattr__(self, name: str) -> Any:
        home = self.__homes__.get(name)
        if home is None:
            raise self.__unknown__(self.__name__, name)
        try:
            if home == ".":
                value = import_module(f"{self.__name__}.{name}")
            else:  # `from home import name`, where the name may be a submodule too
                value = getattr(__import__(f"{self.__name__}.{home}", fromlist=[name]), name)
        except AttributeError as error:  # which `from … import` would take for a name that is not offered, and drop
            raise ImportError(f"{self.__name__}.{name}: {error}", name=self.__name__) from error
        vars(self)[name] = value  # so that it is asked for once
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        hidden = isinstance(value, ModuleType) and self.__homes__.get(name, ".") != "."
        if not hidden:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__homes__})


def _unknown(package: str, name: str) -> AttributeError:
    nearest: list[str] = []
    if not name.startswith("__"):  # those are asked for by programs, not by people
        from difflib import get_close_matches

        nearest = get_close_matches(name, sys.modules[package].__all__, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
