"""`Config`: configuration files, with overrides from the command line."""

from __future__ import annotations

import ast
import json
import re
import types
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any

from plait.config import choose, load_module, parse_text, text_of
from plait.errors import ConfigError, Problem

# `--cfg-options key=value …`: overrides from the command line.


class DictAction(Action):
    """An argparse action that collects `key=value` in a dict. `a=1,2` and `a=[1,2]` are lists, `a="(1,2)"` a tuple."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        """Add the pairs of one flag to those of earlier ones."""
        pairs = dict(getattr(namespace, self.dest, None) or {})
        for pair in [values] if isinstance(values, str) else values:
            key, equals, text = pair.partition("=")
            if not equals or not key:
                raise ArgumentError(self, f"{pair!r} is not `key=value`")
            pairs[key] = value_of(text)
        setattr(namespace, self.dest, pairs)


def value_of(text: str) -> Any:
    """Return the number, bool, None, list or tuple that a text stands for; else the text."""
    text = text.strip()
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        value = ast.literal_eval(text)
        return list(value) if isinstance(value, tuple) and not text.startswith("(") else value
    except (ValueError, SyntaxError):
        pass
    for opening, closing, sequence in (("[", "]", list), ("(", ")", tuple)):
        if text.startswith(opening) and text.endswith(closing):
            return sequence(value_of(item) for item in _split_items(text[1:-1]))
    items = _split_items(text)
    return [value_of(item) for item in items] if len(items) > 1 else text


def _split_items(text: str) -> list[str]:
    """Return the parts of a text between commas; commas inside brackets do not count."""
    items, depth = [""], 0
    for sign in text:
        depth += (sign in "[(") - (sign in "])")
        if sign == "," and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    return [item for item in items if item.strip()]


# Dicts with attributes, and merging them.


DELETE = "_delete_"
"""A dict with this key replaces the base file's dict, instead of being merged into it."""


class ConfigDict(dict[str, Any]):
    """A dict whose keys are attributes too; nested dicts are ConfigDicts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, wrapped(value))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"unknown key {name!r}; {choose(name, self, 'key') if self else ''}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Set a key if it is missing; return its value."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def copy(self) -> ConfigDict:
        """Return a shallow copy."""
        return ConfigDict(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts."""
        return {key: plain(value) for key, value in self.items()}


def wrapped(value: Any) -> Any:
    """Return a value with nested dicts as ConfigDicts."""
    if type(value) is dict:
        return ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(wrapped(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """Return a value with nested ConfigDicts as plain dicts: the opposite of `wrapped`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def merge(over: Mapping[str, Any], below: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """Return `below` with `over` merged into it: dicts key by key, everything else replaced."""
    result = dict(below)
    for key, value in over.items():
        key_path = f"{path}.{key}" if path else str(key)
        old = result.get(key)
        if not isinstance(value, Mapping):
            result[key] = value
        elif isinstance(old, list | tuple) and value and all(str(k).isdigit() for k in value):
            result[key] = _merge_items(value, old, key_path)
        elif isinstance(old, Mapping) and not value.get(DELETE, False):
            result[key] = merge(value, old, path=key_path)
        elif old is None or isinstance(old, Mapping) or value.get(DELETE, False):
            result[key] = _without_delete_keys(value)
        else:
            message = f"a dict cannot be merged into {old!r}"
            raise ConfigError(Problem(key_path, message, f"Add `{DELETE}=True` to the dict to replace the value."))
    return result


def _merge_items(over: Mapping[str, Any], below: list[Any] | tuple[Any, ...], path: str) -> Any:
    """Return a list with items replaced or merged by index, as `{'0': …}` says."""
    items = list(below)
    for key, value in over.items():
        if int(key) >= len(items):
            problem = f"there are {len(items)} items"
            raise ConfigError(Problem(f"{path}.{key}", problem, f"Count from 0 to {len(items) - 1}."))
        old = items[int(key)]
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        items[int(key)] = merge(value, old, path=f"{path}.{key}") if both else value
    return type(below)(items)


def _without_delete_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_delete_keys(item) for key, item in value.items() if key != DELETE}
    return value


# Reading a configuration file and its base files.
#
# A Python file is run; its variables are the configuration. `_base_` names the base files, whose values may be
# referred to as `_base_.model.depth`, or in the older form `{{_base_.model.depth}}`.


BASE = "_base_"
_BASE_REFERENCE = re.compile(r"""(["']?)\{\{\s*(_base_(?:\.\w+)+)\s*\}\}\1""")
_FILE_REFERENCE = re.compile(r"\{\{\s*(file\w+)\s*\}\}")
_ENVIRONMENT_REFERENCE = re.compile(r"\{\{\s*\$(\w+)")


def read_file(path: Path) -> dict[str, Any]:
    """Return the variables of a file, merged into those of its base files."""
    return _read(path.expanduser().resolve(), ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        cycle = " → ".join(file.name for file in (*above, path))
        raise ConfigError(Problem(BASE, f"circular base files: {cycle}", "Leave one of them out."))
    if not path.is_file():
        by = f"the base of {above[-1].name}, " if above else ""
        raise ConfigError(Problem(BASE if above else "config", f"{by}{str(path)!r} is not a file", "Check the name."))
    text = _substituted(path)
    tree, bases = _parse(path, text)
    below: dict[str, Any] = {}
    for base in bases:
        variables = _read((path.parent / base).resolve(), (*above, path))
        both = sorted(below.keys() & variables.keys())
        if both:
            names = ", ".join(f"`{name}`" for name in both)
            message = f"{names} of {Path(base).name} is also in another base file of {path.name}"
            raise ConfigError(Problem(BASE, message, "Leave one of them out."))
        below.update(variables)
    variables_here = _variables(path, tree, below) if tree is not None else _data(path, text)
    return merge({key: value for key, value in variables_here.items() if key != BASE}, below)


def _substituted(path: Path) -> str:
    text = text_of(path)
    if match := _ENVIRONMENT_REFERENCE.search(text):
        message = f"{path.name} reads the environment variable {match[1]!r}, which is not supported"
        raise ConfigError(Problem("config", message, "Pass it on the command line: --cfg-options key=value."))
    values = {
        "fileDirname": path.parent.as_posix(),
        "fileBasename": path.name,
        "fileBasenameNoExtension": path.stem,
        "fileExtname": path.suffix,
    }
    return _FILE_REFERENCE.sub(lambda match: values.get(match[1], match[0]), text)


def _parse(path: Path, text: str) -> tuple[ast.Module | None, list[str]]:
    """Return a Python file's syntax tree without `_base_` (None for other files), and the names of the base files."""
    if path.suffix != ".py":
        named = _data(path, text).get(BASE, [])
        return None, [named] if isinstance(named, str) else list(named)
    if "read_base" in text:
        message = f"{path.name} uses `read_base`, which is not supported"
        raise ConfigError(Problem(BASE, message, f"Write `{BASE} = ['base.py']`."))
    try:
        tree = ast.parse(_BASE_REFERENCE.sub(lambda match: match[2], text), str(path))
    except SyntaxError as error:
        message = f"{path.name}, line {error.lineno}: {error.msg}"
        raise ConfigError(Problem("config", message, "Correct the Python file.")) from None
    bases: list[str] = []
    kept: list[ast.stmt] = []
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == BASE for target in targets):
            assert isinstance(statement, ast.Assign)
            bases = _literal(path, statement.value)
        else:
            kept.append(statement)
    tree.body = kept
    return tree, bases


def _literal(path: Path, node: ast.expr) -> list[str]:
    try:
        named = ast.literal_eval(node)
    except ValueError:
        message = f"{path.name} computes it, but it is read before the file is run"
        raise ConfigError(Problem(BASE, message, "Write a string, or a list of strings.")) from None
    return [named] if isinstance(named, str) else [str(name) for name in named]


def _variables(path: Path, tree: ast.Module, below: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = {"__file__": str(path), "__name__": path.stem, BASE: ConfigDict(below)}
    try:
        exec(compile(tree, str(path), "exec"), space)  # noqa: S102  # the user's own file
    except Exception as error:
        message = f"{path.name} failed: {type(error).__name__}: {error}"
        raise ConfigError(Problem("config", message, "Correct the Python file.")) from error
    unwanted = types.ModuleType | types.FunctionType | type
    return {key: value for key, value in space.items() if not key.startswith("_") and not isinstance(value, unwanted)}


def _data(path: Path, text: str) -> dict[str, Any]:
    if path.suffix in (".json", ".yaml", ".yml"):
        content = parse_text(path, text)
        content = {} if content is None else content
    else:
        message = f"{path.name} has the suffix {path.suffix!r}"
        raise ConfigError(Problem("config", message, "Use .py, .yaml, .yml or .json."))
    if not isinstance(content, dict):
        raise ConfigError(Problem("config", f"{path.name} is not a mapping", "Write `key: value`."))
    return content


class Config:
    """A configuration: its keys are attributes too, and it has the methods of a dict."""

    _tree: ConfigDict

    def __init__(self, cfg_dict: Mapping[str, Any] | None = None, filename: str | Path | None = None) -> None:
        vars(self)["_tree"] = ConfigDict(cfg_dict or {})
        vars(self)["_filename"] = None if filename is None else str(filename)

    @classmethod
    def fromfile(cls, filename: str | Path, import_custom_modules: bool = True) -> Config:
        """Return the configuration of a Python, YAML or JSON file and its base files."""
        tree = read_file(Path(filename))
        wanted = tree.get("custom_imports")
        if import_custom_modules and wanted:
            _import(**wanted)
        return cls(tree, filename)

    @property
    def filename(self) -> str | None:
        """The file that the configuration was read from."""
        return vars(self)["_filename"]  # type: ignore[no-any-return]

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Merge changes into the configuration; the keys are dotted paths (`optim_wrapper.optimizer.lr`)."""
        nested: dict[str, Any] = {}
        for path, value in options.items():
            *names, last = path.split(".")
            node = nested
            for key in names:
                node = node.setdefault(key, {})
            node[last] = value
        if not allow_list_keys and any(key.isdigit() for path in options for key in path.split(".")):
            raise ConfigError(Problem("cfg-options", "changes a list by index", "Set `allow_list_keys=True`."))
        vars(self)["_tree"] = ConfigDict(merge(nested, self._tree))

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts."""
        return self._tree.to_dict()

    @property
    def pretty_text(self) -> str:
        """The configuration as a Python file."""
        return "".join(f"{key} = {pformat(plain(value), width=100)}\n" for key, value in self._tree.items())

    def dump(self, file: str | Path | None = None) -> str | None:
        """Write it as Python, YAML or JSON, by the suffix of `file`; without a file, return it as Python."""
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

    def copy(self) -> Config:
        """Return a shallow copy."""
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
    """Return a dict, or a configuration of MMEngine's own class, as a `Config`."""
    if isinstance(given, Config):
        return given
    tree = given.to_dict() if hasattr(given, "to_dict") else given
    return Config(tree, getattr(given, "filename", None))


def _import(imports: str | list[str], allow_failed_imports: bool = False) -> None:
    """Import the modules of `custom_imports`, which register classes that the configuration names."""
    for name in [imports] if isinstance(imports, str) else imports:
        try:
            load_module(name, key="custom_imports")
        except ConfigError as error:
            if not (allow_failed_imports and isinstance(error.__cause__, ImportError)):
                raise
