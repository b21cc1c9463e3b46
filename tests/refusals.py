"""What a refusal must say, without its sentence: the class of the error, the key it is about, and the values it names.

    with refused(ConfigError, "AdamX", key="optim.type"):
        parse({"optim": {"type": "AdamX"}})

Sentences are free to become better; the key, the value that was found and the names in the remedy are not free to go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from plait.errors import ConfigError


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], *names: object, key: str | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `error`, whose message has each of `names`; with `key`, a `ConfigError` about that key."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    if key is not None:
        assert isinstance(caught.value, ConfigError), f"{type(caught.value).__name__} has no keys: {message}"
        paths = [problem.path for problem in caught.value.problems]
        assert key in paths, f"no problem of {key}, but of {paths}: {message}"
    absent = missing(message, *names)
    assert not absent, f"not named: {absent} in: {message}"


def missing(text: str, *names: object) -> list[str]:
    """Those of `names` (keys, values, paths, commands) that `text` does not have."""
    return [str(name) for name in names if str(name) not in text]
