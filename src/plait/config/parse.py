"""From what the user wrote to a `RunConfig`, with every problem found at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.config.draft import Draft
from plait.config.explain import explain
from plait.config.fit import fitted
from plait.config.override import split_override
from plait.config.read import read
from plait.config.run import RunConfig
from plait.config.show import rows
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
    for key, value in read(source).items():
        draft.put((key,), value, name)
    for text in overrides:
        try:
            keys, value = split_override(text)
        except ConfigError as error:
            draft.problems.extend(error.problems)
        else:
            draft.put(keys, value, "override")
    return _finished(draft)


def parse_sections(**sections: Any) -> Parsed:
    """The run description given as keyword arguments: mappings, shorthands or section objects.

    None is the same as leaving a section out. Raises `ConfigError` as `parse` does.
    """
    draft = Draft()
    for key, value in sections.items():
        if value is not None:
            draft.put((key,), value, "keyword")
    return _finished(draft)


def _finished(draft: Draft) -> Parsed:
    draft.expand()
    try:
        config = fitted(RunConfig.model_validate(draft.data))
    except ValidationError as error:
        raise ConfigError([*draft.problems, *explain(error, draft)]) from None
    if draft.problems:
        raise ConfigError(draft.problems)
    defaults = {path: "default" for path, _ in rows(config)}
    return Parsed(config, {**defaults, **draft.origins})
