"""All exceptions that Plait raises on purpose.

    PlaitError
    ├── ConfigError          the run description is wrong; lists every problem at once
    ├── WorldError           ranks, devices, ports or process groups cannot be set up
    ├── ModelError           a model cannot be built, wrapped or called as asked
    ├── DataError            a data source is missing, malformed or empty
    ├── CheckpointError      a checkpoint cannot be written, read or trusted
    ├── TrainingError        the run cannot continue
    │   ├── NonFiniteError   too many steps in a row had a non-finite loss or gradient
    │   └── RolloutMismatchError  the sampler of the rollouts is not the policy that is trained
    ├── GenerateError        text cannot be generated as asked
    ├── MissingExtraError    an optional package is needed and absent
    └── UnsupportedVersionError  an installed torch or transformers lacks something private that Plait needs

Each message names what is wrong, the value, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class PlaitError(Exception):
    """Base of everything Plait raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a run description."""

    path: str
    """Dotted path of the key, for example ``strategy.zero``."""
    message: str
    """What is wrong with it, with the value."""
    remedy: str = ""
    """What to write instead."""
    origin: str = ""
    """Where the value came from: a file, an override, a keyword argument."""

    def __str__(self) -> str:
        where = f" (from {self.origin})" if self.origin else ""
        remedy = f"\n      {self.remedy}" if self.remedy else ""
        return f"{self.path}{where}: {self.message}{remedy}"


class ConfigError(PlaitError):
    """The run description is wrong. ``problems`` holds all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        # Command-line options begin with a dash, and arguments are upper case; keys of a run description are neither.
        typed = all(problem.path.startswith("-") or problem.path.isupper() for problem in self.problems)
        where = "on the command line" if typed else "in the run description"
        super().__init__("\n".join([f"{head} {where}:", *(f"  - {p}" for p in self.problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle with its problems, to be sent between ranks."""
        return ConfigError, (self.problems,)


def in_one_line(error: PlaitError) -> str:
    """Return an error as one line, for tables and logs."""
    if isinstance(error, ConfigError):
        return "; ".join(f"{problem.path}: {problem.message}" for problem in error.problems)
    return " ".join(str(error).split())


class WorldError(PlaitError):
    """Ranks, devices, ports or process groups cannot be set up."""


class ModelError(PlaitError):
    """A model cannot be built, wrapped or called as asked."""


class DataError(PlaitError):
    """A data source is missing, malformed or empty."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be written, read or trusted."""


class TrainingError(PlaitError):
    """The run cannot continue."""


class NonFiniteError(TrainingError):
    """Too many steps in a row had a non-finite loss or gradient."""


class RolloutMismatchError(TrainingError):
    """The sampler of the rollouts is not the policy that is trained: their log-probabilities differ."""


class GenerateError(PlaitError):
    """Text cannot be generated as asked."""


class ContextError(GenerateError):
    """The request is longer than the model's context."""


class MissingExtraError(PlaitError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs the package {package!r}: pip install 'plait[{extra}]'")


class UnsupportedVersionError(PlaitError):
    """An installed torch or transformers lacks something private that Plait needs."""

    def __init__(self, package: str, installed: str, name: str, checked: str, remedy: str = "") -> None:
        super().__init__(
            f"plait needs {name}, which {package} {installed} does not have. "
            + (remedy or f"Install {package} {checked}, with which plait was checked.")
        )
