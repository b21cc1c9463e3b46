"""The few ways in which a key is answered, to build tables of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from plait.config import choose, show
from plait.frontends.deepspeed.config.kinds import FLAG, SECTION, Kind, either
from plait.frontends.deepspeed.config.work import Act, Key, Table, Work


def to(path: str, kind: Kind, note: str = "", *, if_open: str = "", turned: Callable[[Any], Any] | None = None) -> Key:
    """Honoured by a key of the run description, with the same value, or `turned` into its words."""

    def act(work: Work, key: str, value: Any) -> None:
        found = _plain(turned(value) if turned else value)
        work.put(path, found, key)
        work.honour(key, value, f"{path}: {show(found)}" + (f" ({note})" if note else ""))

    return Key(kind, act, if_open)


def unneeded(kind: Kind, why: str) -> Key:
    """Without meaning here; `why` says that nothing is lost."""
    return Key(kind, lambda work, key, value: work.leave(key, value, why))


def refused(kind: Kind, remedy: str) -> Key:
    """Not to be had."""
    return Key(kind, lambda work, key, value: work.refuse(key, value, remedy))


def only(neutral: Any, kind: Kind, why: str, remedy: str) -> Key:
    """Without meaning at its `neutral` value, or one of several; refused at any other."""
    neutrals = neutral if isinstance(neutral, tuple) else (neutral,)

    def act(work: Work, key: str, value: Any) -> None:
        folded = value.lower() if isinstance(value, str) else value
        if any(folded == each and isinstance(folded, bool) == isinstance(each, bool) for each in neutrals):
            work.leave(key, value, why)
        else:
            work.refuse(key, value, remedy)

    return Key(kind, act)


def off(remedy: str) -> Key:
    """A switch of something that is not there: off it says nothing, on it is refused."""
    return only(False, FLAG, "it is off, here as there", remedy)


def group(table: Table) -> Key:
    """A section, each key of which is answered by `table`."""
    return Key(SECTION, lambda work, key, value: work.walk(key, value, table))


def switched(table: Table, what: str, on: Act | None = None) -> Key:
    """A section with an `enabled`: while that is not true, its other keys say nothing."""

    def act(work: Work, key: str, value: Any) -> None:
        if value.get("enabled") is True:
            work.walk(key, value, table)
            if on is not None:
                on(work, key, value)
        else:
            work.walk(key, value, dormant(table, f"{what} off"))

    return Key(SECTION, act)


def dormant(table: Table, why: str) -> Table:
    """The same keys with nothing to say: values are still looked at."""
    return {name: replace(key, act=lambda w, k, v: w.leave(k, v, why)) for name, key in table.items()}


def gone(what: str, remedy: str, *keys: str) -> Key:
    """A whole section that is answered at once: it says nothing while off, and is refused otherwise.

    One that has an `enabled` names all its `keys`, so that a misspelt one is found; it is off without it.
    """

    def act(work: Work, key: str, value: Any) -> None:
        for name in value if keys and isinstance(value, Mapping) else ():
            if name not in ("enabled", *keys):
                work.wrong(f"{key}.{name}", f"`{key}` has no such key", choose(name, ("enabled", *keys), "key"))
        enabled = value.get("enabled", not keys) if isinstance(value, Mapping) else value
        if not enabled or enabled == "auto":
            work.leave(key, value, f"{what} off, here as there")
        else:
            work.refuse(key, value, remedy)

    return Key(either(SECTION, FLAG), act)


def _plain(value: Any) -> Any:
    """`2e8` as the whole number that it is; a tuple as a list."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1:
        return int(value)
    return list(value) if isinstance(value, tuple) else value
