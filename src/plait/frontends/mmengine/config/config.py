"""A configuration: what a file says, with changes from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

from plait.config import load_module
from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.config.files import read_file
from plait.frontends.mmengine.config.tree import ConfigDict, merge, plain


class Config:
    """A tree of keys that are attributes as well."""

    _tree: ConfigDict

    def __init__(self, cfg_dict: Mapping[str, Any] | None = None, filename: str | Path | None = None) -> None:
        vars(self)["_tree"] = ConfigDict(cfg_dict or {})
        vars(self)["_filename"] = None if filename is None else str(filename)

    @classmethod
    def fromfile(cls, filename: str | Path, import_custom_modules: bool = True) -> Config:
        """Read a file of Python, YAML or JSON, and those that it is based on."""
        tree = read_file(Path(filename))
        wanted = tree.get("custom_imports")
        if import_custom_modules and wanted:
            _import(**wanted)
        return cls(tree, filename)

    @property
    def filename(self) -> str | None:
        """The file that it was read from."""
        return vars(self)["_filename"]  # type: ignore[no-any-return]

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Put changes over it; the keys are dotted paths (`optim_wrapper.optimizer.lr`)."""
        nested: dict[str, Any] = {}
        for path, value in options.items():
            *way, last = path.split(".")
            place = nested
            for key in way:
                place = place.setdefault(key, {})
            place[last] = value
        if not allow_list_keys and any(key.isdigit() for path in options for key in path.split(".")):
            raise ConfigError(Problem("cfg-options", "a list is changed by index", "Say `allow_list_keys=True`."))
        vars(self)["_tree"] = ConfigDict(merge(nested, self._tree))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts."""
        return self._tree.to_dict()

    @property
    def pretty_text(self) -> str:
        """The configuration as a file of Python would say it."""
        return "".join(f"{key} = {pformat(plain(value), width=100)}\n" for key, value in self._tree.items())

    def dump(self, file: str | Path | None = None) -> str | None:
        """Write it as Python, YAML or JSON, as the name ends; without a name, return it."""
        if file is None:
            return self.pretty_text
        path = Path(file)
        if path.suffix == ".json":
            text = json.dumps(self.to_dict(), default=str, indent=2)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            text = yaml.safe_dump(json.loads(json.dumps(self.to_dict(), default=str)))
        else:
            text = self.pretty_text
        path.write_text(text, encoding="utf-8")
        return None

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self._tree.get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """As of a dict."""
        return self._tree.pop(key, *default)

    def keys(self) -> Any:
        """As of a dict."""
        return self._tree.keys()

    def items(self) -> Any:
        """As of a dict."""
        return self._tree.items()

    def copy(self) -> Config:
        """Another one with the same content."""
        return Config(self._tree, self.filename)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self)["_tree"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._tree[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._tree[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._tree[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._tree

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return f"Config (path: {self.filename}): {self._tree!r}"


def as_config(given: Any) -> Config:
    """A configuration from a dict, or from MMEngine's own class."""
    if isinstance(given, Config):
        return given
    tree = given.to_dict() if hasattr(given, "to_dict") else given
    return Config(tree, getattr(given, "filename", None))


def _import(imports: str | list[str], allow_failed_imports: bool = False) -> None:
    """Load the modules whose classes the configuration names."""
    for name in [imports] if isinstance(imports, str) else imports:
        try:
            load_module(name, key="custom_imports")
        except ConfigError as error:
            if not (allow_failed_imports and isinstance(error.__cause__, ImportError)):
                raise
