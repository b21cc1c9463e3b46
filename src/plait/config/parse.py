"""From what the user wrote to a `RunConfig`, with every problem found at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.base import Section
from plait.config.data import SMALLEST_BPE, MixtureData
from plait.config.draft import Draft, origin_of
from plait.config.engines import check_library
from plait.config.explain import explain
from plait.config.model import GptConfig, LlamaConfig
from plait.config.part import lost_objects
from plait.config.paths import missing_paths
from plait.config.read import read, split_override
from plait.config.rules import check
from plait.config.run import RunConfig
from plait.config.show import rows
from plait.config.trust import KEY, STORED_IN, StoredName, refusal
from plait.errors import ConfigError, Problem

# Defaults that follow another section: what was not written must not stand against what was.


def fitted(config: RunConfig) -> RunConfig:
    """The same run; sequences and trained vocabularies whose size was not written are no larger than the model's."""
    model = config.model
    if not isinstance(model, (GptConfig, LlamaConfig)):
        return config
    bounds = {"seq_len": model.seq_len, "vocab_size": max(model.vocab_size, SMALLEST_BPE)}
    roles = {role: getattr(config, role) for role in ("data", "val_data", "test_data")}
    changed = {role: found for role, data in roles.items() if (found := _within(data, bounds)) is not data}
    return _with(config, changed) if changed else config


def _within(data: Any, bounds: dict[str, int]) -> Any:
    if isinstance(data, MixtureData):
        sources = tuple(_within(source, bounds) for source in data.sources)
        unchanged = all(new is old for new, old in zip(sources, data.sources, strict=True))
        return data if unchanged else _with(data, {"sources": sources})
    own = {} if data is None else {name: getattr(data, name, 0) for name in bounds if name not in data.model_fields_set}
    smaller = {name: bounds[name] for name, size in own.items() if size > bounds[name]}
    return _with(data, smaller) if smaller else data


def _with(section: Any, changes: dict[str, Any]) -> Any:
    """A copy with other values, in which nothing counts as written that did not before."""
    assert isinstance(section, Section)
    made = section.model_copy(update=changes)
    made.__pydantic_fields_set__ &= section.model_fields_set
    return made


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


# Whether a run description has all that a run needs, found out before a process starts.


def check_complete(parsed: Parsed, *, require_length: bool) -> None:
    """Refuse a run that breaks a rule, lacks its model or its data, or names files or an engine that are not there."""
    config = parsed.config
    check(config, has_val=config.val_data is not None, require_length=require_length, origins=parsed.origins)
    absent = [role for role in ("model", "data") if getattr(config, role) is None]
    problems = [Problem(role, "there is none", f"Add a section `{role}` with a `type`.") for role in absent]
    problems += [replace(each, origin=origin_of(each.path, parsed.origins)) for each in missing_paths(config)]
    if problems:
        raise ConfigError(problems)
    check_library(config.strategy.engine)
