"""The module layout of another framework's package, as scripts import from it.

Scripts import a name from the module in which the framework keeps it: `from deepspeed.ops.adam import FusedAdam`. A
front end may arrange its own files differently. A table lists the framework's modules that have no file here:

    {"ops.adam": {"optimizers": ["FusedAdam"]}}

makes `plait.frontends.deepspeed.ops.adam` importable, with the name of `plait/frontends/deepspeed/optimizers.py`. A
name or a module that the front end does not offer raises an error that says what to use instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from plait.lazy import offer_names


@dataclass(frozen=True, eq=False)
class MirroredPackage(MetaPathFinder, Loader):
    """Finds the modules of the table, and explains what is not offered.

    It is the last finder, so Python asks it only for modules that have no file. A module's `__getattr__` could not do
    this: Python does not call it for submodules, and `from … import` replaces its message.
    """

    package: str
    """The package of the front end."""
    original: str
    """The framework's own package, as its scripts write it."""
    framework: str
    """The framework's name in messages."""
    docs: str
    replacements: Mapping[str, str] = field(repr=False)
    """What to use instead of a name that is not offered."""
    modules: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict, repr=False)
    """For each module without a file: module that defines names (of this package, or `plait.…`) → these names."""

    def install(self) -> None:
        """Add this finder as the last one of the process."""
        sys.meta_path.append(self)

    def not_offered(self, module: str, name: str) -> AttributeError:
        """Return the error for a name that a module of the front end does not have."""
        return AttributeError(self._message(self._original(module), name))

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of the table; raise `ModuleNotFoundError` for any other below this package."""
        if not fullname.startswith(f"{self.package}."):
            return None
        if fullname.removeprefix(f"{self.package}.") in self.modules:
            return ModuleSpec(fullname, self, is_package=True)
        module, _, name = self._original(fullname).rpartition(".")
        # With the name that Python asked for, Python would replace this error by its own.
        raise ModuleNotFoundError(self._message(module, name), name=self._original(fullname))

    def exec_module(self, module: ModuleType) -> None:
        """Set up a module whose names are loaded when they are first used."""
        path = module.__name__.removeprefix(f"{self.package}.")
        module.__doc__ = f"`{self.original}.{path}`."
        homes = {name: (f"{module.__name__}.{name}", "") for name in self._submodules(path)}
        for home, names in self.modules[path].items():
            home = home if home.startswith("plait.") else f"{self.package}.{home}"
            homes |= {name: (home, name) for name in names}
        offer_names(module, homes, self.not_offered)

    def _submodules(self, path: str) -> list[str]:
        parents = (name.rpartition(".") for name in self.modules)
        return [name for parent, _, name in parents if parent == path]

    def _original(self, module: str) -> str:
        return module.replace(self.package, self.original, 1)

    def _message(self, module: str, name: str) -> str:
        remedy = f": {self.replacements[name]}" if name in self.replacements else f"; {self.docs} lists what is"
        return f"{module}.{name} is not offered by Plait's {self.framework} front end{remedy}"
