"""From what the user wrote to a `RunConfig`, with every problem found at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.draft import Draft, origin_of
from plait.config.explain import explain
from plait.config.fit import fitted
from plait.config.override import split_override
from plait.config.part import lost_objects
from plait.config.read import read
from plait.config.run import RunConfig
from plait.config.show import rows
from plait.config.trust import KEY, STORED_IN, StoredName, refusal
from plait.errors import ConfigError


@dataclass(frozen=True)
class Parsed:
    """A run description, and for each dotted path where its value came from.

    An origin is the name of a file, `override`, `keyword` (an argument of Python), or `default`.
    """

    config: RunConfig
    origins: Mapping[str, str]


def parse(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str = "") -> Parsed:
    """The run description in a file or mapping, with `overrides` (`strategy.zero=3`) put over it in order.

    `origin` names the source in messages; absent, it is the file's name, or `dict`. Raises `ConfigError` with
    every problem there is.
    """
    draft = Draft()
    name = origin or ("dict" if isinstance(source, Mapping) else Path(source).name)
    stored_in = None if isinstance(source, Mapping) or not _is_record(Path(source)) else str(source)
    for key, value in read(source).items():
        if stored_in is None or key != KEY:
            draft.put((key,), value, name)
    for text in overrides:
        try:
            keys, value = split_override(text)
        except ConfigError as error:
            draft.problems.extend(error.problems)
        else:
            draft.put(keys, value, "override")
    parsed = _with_objects(_finished(draft, stored_in))
    if stored_in is None:
        return parsed
    names = [(path, value) for path, value in rows(parsed.config) if isinstance(value, StoredName)]
    from_file = [(path, value) for path, value in names if parsed.origins[path] == name]
    if from_file and not parsed.config.trust_code:
        raise ConfigError([refusal(path, value, stored_in).problems[0] for path, value in from_file])
    return _finished(draft)  # what is left is the user's own: an override, or what he trusts


def parse_stored(description: Mapping[str, Any], file: str | Path, *, trust_code: bool) -> RunConfig:
    """The run description that a checkpoint holds, which anybody may have written.

    Code that it names is known as named in `file`, and not run, unless the user has said that he trusts it.
    """
    draft = Draft()
    for key, value in description.items():
        if key != KEY:
            draft.put((key,), value, str(file))
    draft.put((KEY,), trust_code, "--trust-code")
    return _finished(draft, None if trust_code else str(file)).config


def _is_record(path: Path) -> bool:
    """Whether a file is the `config.yaml` that a run wrote into its folder; each run writes it anew."""
    if path.name != "config.yaml":
        return False
    return (path.parent / "checkpoints").is_dir() or any(path.parent.glob("events-rank*.jsonl"))


def parse_sections(**sections: Any) -> Parsed:
    """The run description given as keyword arguments: mappings, shorthands or section objects.

    None is the same as leaving a section out. Raises `ConfigError` as `parse` does.
    """
    draft = Draft()
    for key, value in sections.items():
        if value is not None:
            draft.put((key,), value, "keyword")
    return _with_objects(_finished(draft))


def _with_objects(parsed: Parsed) -> Parsed:
    """The same, unless it names an object of another process."""
    if lost := lost_objects(rows(parsed.config)):
        raise ConfigError([replace(each, origin=origin_of(each.path, parsed.origins)) for each in lost])
    return parsed


def _finished(draft: Draft, stored_in: str | None = None) -> Parsed:
    draft.expand()
    context = None if stored_in is None else {STORED_IN: stored_in}
    try:
        config = fitted(RunConfig.model_validate(draft.data, context=context))
    except ValidationError as error:
        raise ConfigError([*draft.problems, *explain(error, draft)]) from None
    if draft.problems:
        raise ConfigError(draft.problems)
    defaults = {path: "default" for path, _ in rows(config)}
    return Parsed(config, {**defaults, **draft.origins})
