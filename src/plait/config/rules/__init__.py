"""Rules between settings: small functions that are called after the schema has accepted every setting.

A setting may be valid by itself, but contradict another one, or have no effect because of it. Both are errors; all of
them are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import FunctionType

from plait.config.rules import engines, posttrain, strategy, training
from plait.config.rules.facts import RunFacts
from plait.config.run import RunConfig
from plait.config.schema import origin_of
from plait.errors import ConfigError, Problem

RULES: tuple[Callable[[RunFacts], Iterable[Problem]], ...] = tuple(
    value
    for module in (strategy, engines, training, posttrain)
    for value in vars(module).values()
    if isinstance(value, FunctionType) and value.__module__ == module.__name__ and "facts" in value.__annotations__
    if not value.__name__.startswith("_")
)
"""Every public function of these files with an argument `facts` is a rule."""


def violations(config: RunConfig, *, has_val: bool, require_length: bool) -> list[Problem]:
    """Return a problem for every rule that `config` breaks."""
    facts = RunFacts(config, has_val or config.val_data is not None, require_length)
    return [problem for rule in RULES for problem in rule(facts)]


def check(
    config: RunConfig,
    *,
    has_val: bool,
    require_length: bool,
    origins: Mapping[str, str] | None = None,
) -> None:
    """Raise `ConfigError` with every rule that `config` breaks.

    `has_val`: validation data is given as an object. `require_length`: the run needs a length. `origins` (of `Parsed`)
    has the origin of each value.
    """
    if problems := violations(config, has_val=has_val, require_length=require_length):
        known = origins or {}
        raise ConfigError([replace(problem, origin=origin_of(problem.path, known)) for problem in problems])
