"""Damage for well-formed input, drawn from a seed: to text, to bytes, and to what JSON and YAML hold."""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

SECONDS = 10.0
"""Of a processor, for one case: a healthy one takes a small part of a second."""

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1 << 70,
    -(1 << 70),
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    " ",
    "auto",
    "../..",
    "/etc/hostname",
    "a\0b",
    "\ud800",
    "\u2028",
    "é" * 300,
    "1e5",
    "0x10",
    "yes",
    "${HOME}",
    "*",
    [],
    {},
    [[]],
    [None],
    {"": 0},
    {"type": "x"},
    {"type": ["x"]},
    [1, 2, 3],
    ["a", {"b": []}],
)


class HungError(BaseException):
    """A case took too long. No `except Exception` takes it for something else."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise where the block takes longer than `SECONDS`."""

    def ring(*_: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGVTALRM, ring)  # the real timer is that of pytest-timeout
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def draws(request: pytest.FixtureRequest, kind: str, fixed: int, whole: int) -> Iterator[tuple[str, Random]]:
    """Generators of random numbers, and their names: a few of the session's seed, and with `--fresh` all of them."""
    for number in range(whole if request.config.option.fresh else fixed):
        name = f"{kind} {request.config.option.draw} {number}"
        yield name, Random(name)


def mutated(value: Any, random: Random) -> Any:
    """The same lists and mappings, with one to three places in them changed."""
    found = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = _changed(found, random)
    return found


def _changed(value: Any, random: Random) -> Any:
    places = list(_places(value))
    if not places:
        return random.choice(ODD)
    owner, key = random.choice(places)
    match random.randrange(6):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, dict):
            owner[str(key) + random.choice(("x", "", " ", ".y", "\0"))] = owner.pop(key)
        case 2:
            other, its = random.choice(places)
            owner[key] = copy.deepcopy(other[its])
        case 3:
            owner[key] = [owner[key]] if random.random() < 0.5 else {random.choice(("x", "type", "path")): owner[key]}
        case 4 if type(owner[key]) in (int, float):
            owner[key] += random.choice((-1, 1, 7, 1 << 31))
        case _:
            owner[key] = copy.deepcopy(random.choice(ODD))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


SNIPPETS = (
    "{", "[", "]", "}", ":", ",", '"', "'", "\\", "\n", "\t", " ", "#", "-", "- ", "? ", "&a ", "*a", "<<: *a",
    "!!int ", "!!python/name:os.system ", "%YAML 9.9\n",
    "---\n", "...\n", "| ", "> ", "\0", "\ufeff", "\x85", "\\ud800", "NaN",
    "1" * 5000, "[" * 300, "{" * 300, '{"a":' * 300, "a: " * 200, "nan", "~", "=", "//", "/*", "e" * 100,
)  # fmt: skip


def spoiled(data: bytes, random: Random) -> bytes:
    """The same text, or any bytes, with a few of them changed, cut out, repeated or put in."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        begin = random.randrange(len(found) + 1)
        end = min(len(found), begin + random.choice((1, 1, 2, 8, 64)))
        match random.randrange(7):
            case 0 if begin < len(found):
                found[begin] ^= 1 << random.randrange(8)
            case 1:
                del found[begin:end]
            case 2:
                found[begin:begin] = random.choice(SNIPPETS).encode()
            case 3:
                found[begin:begin] = found[begin:end] * random.choice((1, 2, 50))
            case 4:
                del found[begin:]
            case 5:
                found[begin:end] = random.randbytes(end - begin)
            case _:
                found[begin:end] = random.choice((b"0", b"-1", b"null", b"1e999", b"true", b"9" * 25, b""))
    return bytes(found)


def damaged_json(content: Any, random: Random) -> bytes:
    """JSON with something wrong in it: mostly what it says, sometimes that it is JSON."""
    if random.random() < 0.7:
        return json.dumps(mutated(content, random)).encode()
    return spoiled(json.dumps(content, indent=random.choice((None, 1))).encode(), random)
