"""Command lines of other people's scripts: `--flag`, `--flag value`, `--flag=value`, `--flag a b`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plait.config import choose
from plait.errors import ConfigError, Problem


def read_flags(words: Sequence[str], known: Collection[str]) -> dict[str, list[str]]:
    """The values of each flag, whose dashes are read as underscores. An unknown flag is an error with a suggestion."""
    given: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            if name not in known:
                raise ConfigError(Problem(flag, "unknown flag", choose(name, known, "flag")))
            current = given.setdefault(name, [])
            current += [value] if equals else []
        elif current is None:
            raise ConfigError(Problem(word, "belongs to no flag", "Write `--flag value`."))
        else:
            current.append(word)
    return given
