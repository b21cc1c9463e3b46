"""A configuration: what a file says, with changes from the command line."""

from __future__ import annotations

import ast
import json
import re
import types
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from pprint import pformat
from typing import Any, NoReturn

from plait.config import choose, load_module, parse_text, text_of
from plait.errors import ConfigError, Problem

# `--cfg-options key=value …`: changes of a configuration, from the command line.


class DictAction(Action):
    """For argparse: gathers `key=value` pairs in a dict. `a=1,2` and `a=[1,2]` are lists, `a="(1,2)"` a tuple."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        """Take the pairs of one flag; those of several flags add up."""
        pairs = dict(getattr(namespace, self.dest, None) or {})
        for pair in [values] if isinstance(values, str) else values:
            key, equals, text = pair.partition("=")
            if not equals or not key:
                raise ArgumentError(self, f"{pair!r} is no `key=value`")
            pairs[key] = value_of(text)
        setattr(namespace, self.dest, pairs)


def value_of(text: str) -> Any:
    """A number, truth value, None, list or tuple where the text is one; the text otherwise."""
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
    """Cut at commas that are in no bracket."""
    items, depth = [""], 0
    for sign in text:
        depth += (sign in "[(") - (sign in "])")
        if sign == "," and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    return [item for item in items if item.strip()]


# Dicts with attributes, and how one is put over another.


DELETE = "_delete_"
"""A dict with this key replaces the one below it, rather than being put over it."""


class ConfigDict(dict[str, Any]):
    """A dict whose keys are attributes too, as are those of the dicts in it."""

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
            raise AttributeError(f"there is no key {name!r}; {choose(name, self, 'key') if self else ''}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As of a dict."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def copy(self) -> ConfigDict:
        """As of a dict: what lies in it is shared."""
        return ConfigDict(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts."""
        return {key: plain(value) for key, value in self.items()}


def wrapped(value: Any) -> Any:
    """Plain dicts anywhere in a value as ConfigDicts."""
    if type(value) is dict:
        return ConfigDict(value)
    if type(value) in (list, tuple):
        return type(value)(wrapped(item) for item in value)
    return value


def plain(value: Any) -> Any:
    """The opposite of `wrapped`."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def merge(over: Mapping[str, Any], below: Mapping[str, Any], *, path: str = "") -> dict[str, Any]:
    """`over` put over `below`: dicts key by key, everything else replaced."""
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
            message = f"a dict is put over {old!r}, which is none"
            raise ConfigError(Problem(key_path, message, f"Write `{DELETE}=True` into it to replace that."))
    return result


def _merge_items(over: Mapping[str, Any], below: list[Any] | tuple[Any, ...], path: str) -> Any:
    """`{'0': …}` put over a list: by index."""
    items = list(below)
    for key, value in over.items():
        if int(key) >= len(items):
            _no_item(path, key, len(items))
        old = items[int(key)]
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        items[int(key)] = merge(value, old, path=f"{path}.{key}") if both else value
    return type(below)(items)


def _no_item(path: str, key: str, count: int) -> NoReturn:
    raise ConfigError(Problem(f"{path}.{key}", f"there are {count} items", f"Count from 0 to {count - 1}."))


def _without_delete_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_delete_keys(item) for key, item in value.items() if key != DELETE}
    return value


# Reading a configuration file, and those that it is based on.
#
# A file of Python is run; its variables are the configuration. `_base_` names the files that it builds on, and what
# those define may be used as `_base_.model.depth`, or in the older form `{{_base_.model.depth}}`.


BASE = "_base_"
_BASE_REFERENCE = re.compile(r"""(["']?)\{\{\s*(_base_(?:\.\w+)+)\s*\}\}\1""")
_FILE_REFERENCE = re.compile(r"\{\{\s*(file\w+)\s*\}\}")
_ENVIRONMENT_REFERENCE = re.compile(r"\{\{\s*\$(\w+)")


def read_file(path: Path) -> dict[str, Any]:
    """The variables of a file, put over those of its bases."""
    return _read(path.expanduser().resolve(), ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        cycle = " → ".join(file.name for file in (*above, path))
        raise ConfigError(Problem(BASE, f"the files are based on each other: {cycle}", "Leave one of them out."))
    if not path.is_file():
        by = f"the base of {above[-1].name}, " if above else ""
        raise ConfigError(Problem(BASE if above else "config", f"{by}{str(path)!r} is no file", "Check the name."))
    text = _substituted(path)
    tree, bases = _parse(path, text)
    below: dict[str, Any] = {}
    for base in bases:
        variables = _read((path.parent / base).resolve(), (*above, path))
        both = sorted(below.keys() & variables.keys())
        if both:
            names = ", ".join(f"`{name}`" for name in both)
            message = f"{names} of {Path(base).name} stands in another of the files that {path.name} is based on, too"
            raise ConfigError(Problem(BASE, message, "Leave one of them out."))
        below.update(variables)
    variables_here = _variables(path, tree, below) if tree is not None else _data(path, text)
    return merge({key: value for key, value in variables_here.items() if key != BASE}, below)


def _substituted(path: Path) -> str:
    text = text_of(path)
    if match := _ENVIRONMENT_REFERENCE.search(text):
        message = f"{path.name} asks for the environment variable {match[1]!r}; what a run does is not decided there"
        raise ConfigError(Problem("config", message, "Pass it on the command line: --cfg-options key=value."))
    values = {
        "fileDirname": path.parent.as_posix(),
        "fileBasename": path.name,
        "fileBasenameNoExtension": path.stem,
        "fileExtname": path.suffix,
    }
    return _FILE_REFERENCE.sub(lambda match: values.get(match[1], match[0]), text)


def _parse(path: Path, text: str) -> tuple[ast.Module | None, list[str]]:
    """The program without its `_base_`, and what that named."""
    if path.suffix != ".py":
        named = _data(path, text).get(BASE, [])
        return None, [named] if isinstance(named, str) else list(named)
    if "read_base" in text:
        message = f"{path.name} uses `read_base`, MMEngine's newer form of inheritance, which is not read here"
        raise ConfigError(Problem(BASE, message, f"Write `{BASE} = ['base.py']`."))
    try:
        tree = ast.parse(_BASE_REFERENCE.sub(lambda match: match[2], text), str(path))
    except SyntaxError as error:
        message = f"{path.name}, line {error.lineno}: {error.msg}"
        raise ConfigError(Problem("config", message, "It is read as Python.")) from None
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
        message = f"{path.name} computes it, and it must be known before the file is run"
        raise ConfigError(Problem(BASE, message, "Write a text, or a list of them.")) from None
    return [named] if isinstance(named, str) else [str(name) for name in named]


def _variables(path: Path, tree: ast.Module, below: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = {"__file__": str(path), "__name__": path.stem, BASE: ConfigDict(below)}
    try:
        exec(compile(tree, str(path), "exec"), space)  # noqa: S102  # the user's own file, which he names
    except Exception as error:
        message = f"{path.name} fails when it is run: {type(error).__name__}: {error}"
        raise ConfigError(Problem("config", message, "It is run as Python.")) from error
    unwanted = types.ModuleType | types.FunctionType | type
    return {key: value for key, value in space.items() if not key.startswith("_") and not isinstance(value, unwanted)}


def _data(path: Path, text: str) -> dict[str, Any]:
    if path.suffix in (".json", ".yaml", ".yml"):
        content = parse_text(path, text)
        content = {} if content is None else content
    else:
        message = f"{path.name} has the ending {path.suffix!r}"
        raise ConfigError(Problem("config", message, "Files end in .py, .yaml, .yml or .json."))
    if not isinstance(content, dict):
        raise ConfigError(Problem("config", f"{path.name} holds no keys", "Write `key: value`."))
    return content


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
            *names, last = path.split(".")
            node = nested
            for key in names:
                node = node.setdefault(key, {})
            node[last] = value
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
