"""Parses files, mappings and overrides into a `RunConfig`, and reports all problems at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.base import RefusedError, Section, Shorthand
from plait.config.data import IMAGE_DATA, SMALLEST_BPE, TEXT_DATA, MixtureData, leaf_sources
from plait.config.engines import check_library
from plait.config.explain import explain
from plait.config.model import GptConfig, LlamaConfig
from plait.config.part import objects_without_name
from plait.config.paths import missing_paths
from plait.config.read import read, split_override
from plait.config.rules import check
from plait.config.run import RunConfig
from plait.config.schema import Keys, dotted, field, item, items, keys_of, origin_of, section_for, settings_of_section
from plait.config.show import rows
from plait.config.text import show, whole_number
from plait.config.trust import KEY, STORED_IN, StoredName, refusal
from plait.errors import ConfigError, Problem


def _plain(value: Any) -> Any:
    """Return a mutable copy; a section object becomes a dict of the keys that were set in it."""
    if isinstance(value, Section):
        settings = settings_of_section(value)
        return {
            name: _plain(entry) for name, entry in settings.items() if name == "type" or name in value.model_fields_set
        }
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_plain(entry) for entry in value])
    return value


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


class ConfigBuilder:
    """Puts a run description together: takes values one by one, later ones over earlier ones, and keeps origins.

    A shorthand is expanded when a key inside it is set, and everywhere by `expand`; `written` has the path that the
    user wrote for each key of an expanded shorthand.
    """

    def __init__(self) -> None:
        self.data: Any = {}
        self.origins: dict[str, str] = {}
        self.written: dict[str, str] = {}
        self.problems: list[Problem] = []

    def put(self, keys: Keys, value: Any, origin: str) -> None:
        """Set the value at `keys`, and create the sections above it; what cannot be set is added to `problems`."""
        value = _plain(value)
        node: Any = self.data
        annotation: Any = RunConfig
        for depth, key in enumerate(keys):
            path = dotted(keys[:depth])
            if isinstance(node, list) and (index := self._index(node, key, path, origin)) is not None:
                key = index
            elif not isinstance(node, dict):
                return
            info = field(annotation, node, key)
            annotation = item(annotation, key) if isinstance(node, list) else info and info.annotation
            if depth == len(keys) - 1:
                self._assign(node, key, value)
                self._mark(keys, value, origin)
                return
            default = info.get_default(call_default_factory=True) if info else None
            inner = self._opened(node, key, annotation, default, keys[: depth + 1], origin)
            if inner is None:
                return
            self._assign(node, key, inner)
            node = inner

    def expand(self) -> None:
        """Expand all shorthands."""
        self.data = self._expanded(self.data, RunConfig, ())

    def _index(self, node: list[Any], key: Any, path: str, origin: str) -> int | None:
        index = whole_number(str(key))
        if index is not None and index <= len(node):
            return index
        numbers = f"0 to {len(node) - 1}, or {len(node)} to add one" if node else "0, to add the first one"
        message = f"no entry {show(key)} in a list of {len(node)}"
        self.problems.append(Problem(f"{path}.{key!s:.40}", message, f"The entries are {numbers}.", origin))
        return None

    def _assign(self, node: Any, key: Any, value: Any) -> None:
        if isinstance(node, list) and key == len(node):
            node.append(value)
        else:
            node[key] = value

    def _opened(
        self, node: Any, key: Any, annotation: Any, default: Any, keys: Keys, origin: str
    ) -> dict[Any, Any] | list[Any] | None:
        """Return the mapping or list at `key`, to set a value inside it; None where that is not possible."""
        present = key < len(node) if isinstance(node, list) else key in node
        value = node[key] if present else None
        if value is None:
            self.origins.setdefault(dotted(keys), origin)
            value = list(default or ()) if items(annotation) else {}
        if isinstance(value, dict) and "type" in keys_of(default):
            value.setdefault("type", default.type)  # the type determines which keys the section has
        if not isinstance(value, (dict, list, tuple)):
            value = self._expanded_here(value, annotation, keys)
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, (dict, list)):
            return value
        if not isinstance(value, RefusedError):  # a refused word is reported when its section is checked
            message = f"{show(value)} has no keys to set"
            self.problems.append(Problem(dotted(keys), message, "Set the value itself, or leave it out.", origin))
        return None

    def _expanded_here(self, value: Any, annotation: Any, keys: Keys) -> Any:
        """Return what `value` is a short form of in the section at `keys`: its keys, itself, or the error for it."""
        owner = section_for(annotation, value)
        if owner is None or not issubclass(owner, Shorthand):
            return value
        try:
            expanded = _plain(owner.expand(value))
        except RefusedError as refused:
            return refused
        if isinstance(expanded, dict):
            path = dotted(keys)
            for key in expanded:
                inner = f"{path}.{key}" if path else str(key)
                if inner not in self.origins and path in self.origins:
                    self._mark((*keys, key), expanded[key], self.origins[path])
                if not isinstance(value, dict):
                    self.written[inner] = self.written.get(path, path)
        return expanded

    def _expanded(self, value: Any, annotation: Any, keys: Keys) -> Any:
        expanded = self._expanded_here(value, annotation, keys)
        if isinstance(expanded, RefusedError):
            return value
        if isinstance(expanded, dict):
            for key in expanded:
                if info := field(annotation, expanded, key):
                    expanded[key] = self._expanded(expanded[key], info.annotation, (*keys, key))
        elif isinstance(expanded, list):
            annotations = [item(annotation, index) for index in range(len(expanded))]
            return [self._expanded(v, annotations[i], (*keys, i)) for i, v in enumerate(expanded)]
        return expanded

    def _mark(self, keys: Keys, value: Any, origin: str) -> None:
        """Set the origin of the value at `keys` and of all values in it, and remove origins that were set before."""
        path = dotted(keys)
        for book in (self.origins, self.written):
            for known in [known for known in book if known == path or known.startswith(f"{path}.")]:
                del book[known]
        self.origins[path] = origin
        for key, entry in _entries(value):
            self._mark((*keys, key), entry, origin)


def with_objective_shared(config: RunConfig) -> RunConfig:
    """Return the run whose validation and test texts have the objective of the first training text, if they name none.

    Images likewise.
    """
    changed: dict[str, Any] = {}
    for section_types in (TEXT_DATA, IMAGE_DATA):
        leaves = (source for _, source in leaf_sources("data", config.data) if isinstance(source, section_types))
        objective = getattr(next(leaves, None), "objective", None)
        if objective is None:
            continue
        for role in ("val_data", "test_data"):
            data = changed.get(role, getattr(config, role))
            if (shared := _share_objective(data, objective, section_types)) is not data:
                changed[role] = shared
    return _with(config, changed) if changed else config


def _share_objective(data: Any, objective: Any, section_types: tuple[type[Section], ...]) -> Any:
    if isinstance(data, MixtureData):
        sources = tuple(_share_objective(source, objective, section_types) for source in data.sources)
        unchanged = all(new is old for new, old in zip(sources, data.sources, strict=True))
        return data if unchanged else _with(data, {"sources": sources})
    named = not isinstance(data, section_types) or getattr(data, "objective", None) is not None
    return data if named else _with(data, {"objective": objective})


def with_sizes_fitted(config: RunConfig) -> RunConfig:
    """Return the run with default `seq_len` and `vocab_size` of its data no larger than the model's."""
    model = config.model
    if not isinstance(model, (GptConfig, LlamaConfig)):
        return config
    bounds = {"seq_len": model.seq_len, "vocab_size": max(model.vocab_size, SMALLEST_BPE)}
    roles = {role: getattr(config, role) for role in ("data", "val_data", "test_data")}
    changed = {role: smaller for role, data in roles.items() if (smaller := _fit_sizes(data, bounds)) is not data}
    return _with(config, changed) if changed else config


def _fit_sizes(data: Any, bounds: dict[str, int]) -> Any:
    if isinstance(data, MixtureData):
        sources = tuple(_fit_sizes(source, bounds) for source in data.sources)
        unchanged = all(new is old for new, old in zip(sources, data.sources, strict=True))
        return data if unchanged else _with(data, {"sources": sources})
    defaults = (
        {} if data is None else {name: getattr(data, name, 0) for name in bounds if name not in data.model_fields_set}
    )
    smaller = {name: bounds[name] for name, size in defaults.items() if size > bounds[name]}
    return _with(data, smaller) if smaller else data


def _with(section: Any, changes: dict[str, Any]) -> Any:
    """Return a copy of a section with changed values; these do not count as set by the user."""
    assert isinstance(section, Section)
    made = section.model_copy(update=changes)
    made.__pydantic_fields_set__ &= section.model_fields_set
    return made


@dataclass(frozen=True)
class Parsed:
    """A run description, and the origin of each value by its dotted path.

    An origin is the name of a file, `override`, `keyword` (a Python argument), or `default`.
    """

    config: RunConfig
    origins: Mapping[str, str]


def parse(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "") -> Parsed:
    """Parse a run description in a file or mapping, with `overrides` (`strategy.zero=3`) in order.

    `origin` names the source in messages; absent, it is the file's name, or `dict`. Raises `ConfigError` with all
    problems.
    """
    builder = ConfigBuilder()
    name = origin or ("dict" if isinstance(source, Mapping) else Path(source).name)
    stored_in = None if isinstance(source, Mapping) or not _is_record(Path(source)) else str(source)
    for key, value in read(source).items():
        if stored_in is None or key != KEY:
            builder.put((key,), value, name)
    for text in overrides:
        try:
            keys, value = split_override(text)
        except ConfigError as error:
            builder.problems.extend(error.problems)
        else:
            builder.put(keys, value, "override")
    parsed = _with_objects(_finished(builder, stored_in))
    if stored_in is None:
        return parsed
    names = [(path, value) for path, value in rows(parsed.config) if isinstance(value, StoredName)]
    from_file = [(path, value) for path, value in names if parsed.origins[path] == name]
    if from_file and not parsed.config.trust_code:
        raise ConfigError([refusal(path, value, stored_in).problems[0] for path, value in from_file])
    return _finished(builder)  # all other names are the user's: in overrides, or in a file that is trusted


def parse_stored(description: Mapping[str, Any], file: str | Path, *, trust_code: bool) -> RunConfig:
    """Parse the run description in a checkpoint, which anybody may have written.

    Code that it names is marked as named in `file`, and not run, unless `trust_code` is set.
    """
    builder = ConfigBuilder()
    for key, value in description.items():
        if key != KEY:
            builder.put((key,), value, str(file))
    builder.put((KEY,), trust_code, "--trust-code")
    return _finished(builder, None if trust_code else str(file)).config


def _is_record(path: Path) -> bool:
    """Return whether a file is the `config.yaml` that a run wrote into its folder."""
    if path.name != "config.yaml":
        return False
    return (path.parent / "checkpoints").is_dir() or any(path.parent.glob("events-rank*.jsonl"))


def parse_sections(**sections: Any) -> Parsed:
    """Parse a run description given as keyword arguments: mappings, shorthands or section objects.

    None is the same as leaving a section out. Raises `ConfigError` as `parse` does.
    """
    builder = ConfigBuilder()
    for key, value in sections.items():
        if value is not None:
            builder.put((key,), value, "keyword")
    return _with_objects(_finished(builder))


def _with_objects(parsed: Parsed) -> Parsed:
    """Return the run description; raise an error if it names a Python object of another process."""
    if lost := objects_without_name(rows(parsed.config)):
        raise ConfigError([replace(problem, origin=origin_of(problem.path, parsed.origins)) for problem in lost])
    return parsed


def _finished(builder: ConfigBuilder, stored_in: str | None = None) -> Parsed:
    builder.expand()
    context = None if stored_in is None else {STORED_IN: stored_in}
    try:
        config = with_sizes_fitted(with_objective_shared(RunConfig.model_validate(builder.data, context=context)))
    except ValidationError as error:
        raise ConfigError([*builder.problems, *explain(error, builder.written, builder.origins)]) from None
    if builder.problems:
        raise ConfigError(builder.problems)
    defaults = {path: "default" for path, _ in rows(config)}
    return Parsed(config, {**defaults, **builder.origins})


def check_complete(parsed: Parsed, *, require_length: bool) -> None:
    """Refuse a run that breaks a rule, lacks its model or data, or names files or an engine that do not exist."""
    config = parsed.config
    check(config, has_val=config.val_data is not None, require_length=require_length, origins=parsed.origins)
    absent = [role for role in ("model", "data") if getattr(config, role) is None]
    problems = [Problem(role, "it is missing", f"Add a section `{role}` with a `type`.") for role in absent]
    problems += [replace(problem, origin=origin_of(problem.path, parsed.origins)) for problem in missing_paths(config)]
    if problems:
        raise ConfigError(problems)
    check_library(config.strategy.engine)
