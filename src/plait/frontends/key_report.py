"""Translates another framework's configuration key by key: the common code of all front ends.

A front end derives its settings from `TranslatedSettings`, with the value types that the framework knows, and writes a
table with a `KeyReader` for every key that the framework has:

    READERS = {
        "lr": honoured_as("optim.lr"),
        "bucket_size": unneeded("collectives carry one block of the model each"),
        "amsgrad": refused_unless("leave it out", False),
        "scheduler": read_scheduler,  # a function of the settings, the key and its value
    }
    settings = TranslatedSettings()
    settings.read(config, READERS)
    translation = settings.translation()

Every key has one of four outcomes in the `KeyReport`, which users are shown. An unknown key, a value of the wrong type
and a contradiction are problems, raised together as one `ConfigError`. A refused key is an error only if the caller
calls `KeyReport.raise_refusals`.

DeepSpeed (`frontends/deepspeed/config/keys.py`) adds the type of each value and its `auto`, Accelerate the spellings of
YAML; MMEngine uses this module unchanged. A configuration that contains one of DeepSpeed passes it to DeepSpeed's
`translate`, and adds the entries of that report to its own; so does the Trainer of transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from plait.config import choose, show
from plait.errors import ConfigError, Problem

_WIDEST = 56
"""The greatest width of the column of keys and values in `lines`."""

ABSENT = "(absent)"
"""Shown as the value of an absent key whose default has to be reported."""


class KeyOutcome(StrEnum):
    """How a key was translated. Every key gets one of these outcomes."""

    HONOURED = "honoured"
    """The key has the same effect as in the other framework."""
    MAPPED = "mapped"
    """Another setting of Plait has the same or nearly the same effect; the text says which."""
    UNNEEDED = "unneeded"
    """The key has no effect in Plait's engine; the text says why that is safe."""
    REFUSED = "refused"
    """The key is not supported; the text says what to write instead."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key, its value, and its outcome."""

    key: str
    value: Any
    outcome: KeyOutcome
    text: str

    @property
    def shown(self) -> str:
        """The value as it was written, shortened if it is long."""
        if isinstance(self.value, float) and self.value >= 1e6:
            return f"{self.value:g}"
        return ABSENT if self.value == ABSENT else show(self.value)


@dataclass(slots=True)
class KeyReport:
    """The outcomes of all keys of a configuration, in the order of the configuration."""

    entries: list[KeyEntry] = field(default_factory=list)

    def add(self, outcome: KeyOutcome, key: str, value: Any, text: str) -> None:
        """Record the outcome of a key."""
        self.entries.append(KeyEntry(key, value, outcome, text))

    def of(self, *outcomes: KeyOutcome) -> Iterable[KeyEntry]:
        """Return the entries with one of these outcomes."""
        return (entry for entry in self.entries if entry.outcome in outcomes)

    def summary(self) -> str:
        """Return one line with the number of keys of each outcome."""
        counts = Counter(entry.outcome for entry in self.entries)
        by_outcome = ", ".join(f"{counts[outcome]} {outcome}" for outcome in KeyOutcome if counts[outcome])
        total = len(self.entries)
        return f"{total} key{'' if total == 1 else 's'}" + (f": {by_outcome}" if by_outcome else "")

    def lines(self) -> list[str]:
        """Return one line per key: the outcome, the key with its value, and what it becomes."""
        keys = [f"{entry.key}: {entry.shown}" for entry in self.entries]
        width = min(max(map(len, keys), default=0), _WIDEST)
        return [
            f"{entry.outcome:<8}  {key:<{width}}  {entry.text}" for entry, key in zip(self.entries, keys, strict=True)
        ]

    def raise_refusals(self) -> None:
        """Raise one `ConfigError` that names every refused key; do nothing if none was refused."""
        problems = [Problem(entry.key, entry.shown, entry.text) for entry in self.of(KeyOutcome.REFUSED)]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class Translation:
    """The result: the sections of a run description, and the report on the keys that they came from."""

    sections: dict[str, Any]
    report: KeyReport


class TranslatedSettings:
    """The state of one translation: the settings of the run description so far, and the outcome of every key."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.report = KeyReport()
        self.problems: list[Problem] = []
        self.sources: dict[str, str] = {}
        """For each dotted key of the run description, the key of the framework that it came from."""

    def set(self, path: str, value: Any, source: str = "") -> None:
        """Set a dotted key of the run description; `source` is the framework's key that it comes from."""
        *names, last = path.split(".")
        section = self.sections
        for name in names:
            section = section.setdefault(name, {})
        section[last] = value
        self.sources[path] = source

    def get(self, path: str) -> Any:
        """Return the value that a dotted key was set to; None if it was not set."""
        value: Any = self.sections
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def drop(self, path: str) -> None:
        """Unset a dotted key, and remove sections that become empty."""
        name, _, rest = path.partition(".")
        _drop(self.sections, name, rest)

    def honoured(self, key: str, value: Any, text: str) -> None:
        """Record that the key has the same effect here."""
        self.report.add(KeyOutcome.HONOURED, key, value, text)

    def mapped(self, key: str, value: Any, text: str) -> None:
        """Record that another setting has the effect of the key."""
        self.report.add(KeyOutcome.MAPPED, key, value, text)

    def unneeded(self, key: str, value: Any, text: str) -> None:
        """Record that the key has no effect here, and why that is safe."""
        self.report.add(KeyOutcome.UNNEEDED, key, value, text)

    def refused(self, key: str, value: Any, remedy: str) -> None:
        """Record that the key is not supported, and what to write instead."""
        self.report.add(KeyOutcome.REFUSED, key, value, remedy)

    def wrong(self, key: str, message: str, remedy: str = "") -> None:
        """Record a mistake in the key or its value; `raise_problems` raises all of them together."""
        self.problems.append(Problem(key, message, remedy))

    def read(self, section: Mapping[str, Any], readers: Mapping[str, KeyReader[Any]], prefix: str = "") -> None:
        """Call the reader of every key of a section; an unknown key is a problem, with a suggestion."""
        for name, value in section.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            if (reader := readers.get(name)) is None:
                self.unknown(key, readers)
            else:
                reader(self, key, value)

    def unknown(self, key: str, readers: Mapping[str, KeyReader[Any]]) -> None:
        """Record a problem for a key that the framework does not have; `readers`: the valid keys of its section."""
        self.wrong(key, "unknown key", choose(key.rpartition(".")[2], sorted(readers), "key"))

    def raise_problems(self) -> None:
        """Raise one `ConfigError` with every mistake; do nothing if there is none."""
        if self.problems:
            raise ConfigError(self.problems)

    def translation(self) -> Translation:
        """Return the sections and the report; raise `ConfigError` if there are mistakes."""
        self.raise_problems()
        return Translation(self.sections, self.report)


def _drop(section: dict[str, Any], name: str, rest: str) -> None:
    if not rest:
        section.pop(name, None)
    elif isinstance(inner := section.get(name), dict):
        _drop(inner, *rest.partition(".")[::2])
        if not inner:
            del section[name]


S = TypeVar("S", bound=TranslatedSettings)
KeyReader = Callable[[S, str, Any], None]
"""A function that translates one key; its arguments are the settings, the key's full name and its value."""


def honoured(text: str) -> KeyReader[Any]:
    """Return a reader that records any value as honoured."""
    return lambda settings, key, value: settings.honoured(key, value, text)


def mapped(text: str) -> KeyReader[Any]:
    """Return a reader that records any value as mapped."""
    return lambda settings, key, value: settings.mapped(key, value, text)


def unneeded(text: str) -> KeyReader[Any]:
    """Return a reader that records any value as unneeded."""
    return lambda settings, key, value: settings.unneeded(key, value, text)


def refused(remedy: str) -> KeyReader[Any]:
    """Return a reader that records any value as refused."""
    return lambda settings, key, value: settings.refused(key, value, remedy)


def honoured_as(path: str, convert: Callable[[Any], Any] = lambda value: value, comment: str = "") -> KeyReader[Any]:
    """Return a reader that sets a dotted key of the run description to the converted value."""

    def read(settings: TranslatedSettings, key: str, value: Any) -> None:
        converted = convert(value)
        settings.set(path, converted, key)
        settings.honoured(key, value, f"{path}: {show(converted)}" + (f" ({comment})" if comment else ""))

    return read


def refused_unless(remedy: str, *neutral: Any, why: str = "asks for nothing") -> KeyReader[Any]:
    """Return a reader: None and `neutral` values (texts in any case) are unneeded, every other value is refused."""

    def read(settings: TranslatedSettings, key: str, value: Any) -> None:
        folded = value.lower() if isinstance(value, str) else value
        if value is None or any(folded is item or folded == item for item in neutral):
            settings.unneeded(key, value, why)
        else:
            settings.refused(key, value, remedy)

    return read
