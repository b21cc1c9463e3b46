"""Writes a run description as rows, as plain values, and as YAML."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from plait.config.base import Section
from plait.config.rules import violations
from plait.config.run import RunConfig
from plait.config.schema import settings_of_section

if TYPE_CHECKING:
    from plait.config.parse import Parsed


def rows(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted path with a value other than a section, and the value."""
    if isinstance(value, Section):
        entries: Any = _settings(value)
    elif isinstance(value, tuple) and any(isinstance(entry, Section) for entry in value):
        entries = enumerate(value)
    else:
        yield path, value
        return
    for key, entry in entries:
        yield from rows(entry, f"{path}.{key}" if path else str(key))


def _settings(section: Section) -> list[tuple[str, Any]]:
    """Return the keys and values of a section, its `type` first."""
    return sorted(settings_of_section(section).items(), key=lambda setting: setting[0] != "type")


def describe(parsed: Parsed) -> list[tuple[str, Any, str]]:
    """Return every setting of the run: path, value, and origin."""
    return [(path, value, parsed.origins[path]) for path, value in rows(parsed.config)]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return all settings as JSON values; they parse back to an equal `RunConfig`.

    Defaults are included, except keys without effect beside the other settings, which `check` refuses when they are
    set. An object that JSON cannot represent (in `args`) becomes its `repr`.
    """
    data: dict[str, Any] = _plain(config)
    refused = _refused(RunConfig.model_validate(data)) - _refused(config)
    for path in refused:
        *sections, key = path.split(".")
        container: Any = data
        for name in sections:
            container = container[int(name) if isinstance(container, list) else name]
        del container[key]
    return data


def to_yaml(config: RunConfig) -> str:
    """Return the result of `to_dict` as YAML."""
    from plait.config import yaml_io

    return yaml_io.dump(to_dict(config))


def _refused(config: RunConfig) -> set[str]:
    return {problem.path for problem in violations(config, has_val=True, require_length=False)}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: _plain(entry) for name, entry in _settings(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return str(value)  # in a file, subclasses of `str` are plain text
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return os.fspath(value) if isinstance(value, os.PathLike) else repr(value)
