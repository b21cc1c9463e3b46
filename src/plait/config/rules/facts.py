"""The argument of every rule (`RunFacts`), and checks that several rules use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.config.base import Section
from plait.config.run import RunConfig
from plait.config.text import show
from plait.errors import Problem


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run description, and further facts about the run."""

    config: RunConfig
    has_val: bool
    """There is validation data, in the run description or given as an object."""
    require_length: bool
    """The run needs `max_steps` or `max_epochs`."""


def keys_set(section: Section, *names: str) -> list[str]:
    """Return those of `names` that the user has set, other than to null."""
    return [name for name in names if name in section.model_fields_set and getattr(section, name) is not None]


def without_effect(path: str, section: Section, names: tuple[str, ...], reason: str, remedy: str) -> Iterator[Problem]:
    """Yield a problem for each of `names` that was set although it has no effect."""
    for name in keys_set(section, *names):
        value = show(getattr(section, name))
        yield Problem(f"{path}.{name}", f"{value} has no effect: {reason}", remedy)
