"""What is said of another framework's name that is not offered here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder


@dataclass(frozen=True)
class Absent(MetaPathFinder):
    """Speaks of names that a front end lacks: of attributes through `not_offered`, of modules when they are imported.

    As a finder it stands behind all others, so that it is asked only for what nobody has found. Without it Python's own
    message would come: a module's `__getattr__` is not asked for modules, and `from … import` drops what it says.
    """

    home: str
    """The package that speaks the framework's words."""
    package: str
    """The framework's own package, as its scripts write it."""
    called: str
    docs: str
    instead: Mapping[str, str]
    """What to use in the place of a name."""

    def not_offered(self, module: str, name: str) -> AttributeError:
        """The error for a name that a module here does not have."""
        return AttributeError(self._words(self._short(module), name))

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise for a name below this package; all others are none of its business."""
        if fullname.startswith(f"{self.home}."):
            module, _, name = self._short(fullname).rpartition(".")
            # Python swallows an error with the very name it asked for, and would then speak itself.
            raise ModuleNotFoundError(self._words(module, name), name=self._short(fullname))

    def explain_modules(self) -> None:
        """Once for a process."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def _short(self, module: str) -> str:
        return module.replace(self.home, self.package, 1)

    def _words(self, module: str, name: str) -> str:
        instead = f": {self.instead[name]}" if name in self.instead else f"; {self.docs} lists what is"
        return f"{module}.{name} is not offered by Plait's {self.called} front end{instead}"
