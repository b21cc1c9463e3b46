"""What values a key takes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A set of values, and how a sentence calls them."""

    words: str
    has: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    """`2e8` is a float to every reader, and a fine count all the same."""
    return _number(value) and value == int(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number from 1", lambda value: _whole(value) and value >= 1)
SIZE = Kind("a whole number from 0", lambda value: _whole(value) and value >= 0)
WHOLE = Kind("a whole number", _whole)
NUMBER = Kind("a number", _number)
SHARE = Kind("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
PAIR = Kind(
    "a list of two numbers",
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_number, value)),
)
TEXT = Kind("a text", lambda value: isinstance(value, str))
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike))
TEXTS = Kind("a list of texts", _texts)
TEXT_OR_TEXTS = Kind("a text or a list of texts", lambda value: isinstance(value, str) or _texts(value))
SECTION = Kind(
    "a section with keys", lambda value: isinstance(value, Mapping) and all(isinstance(k, str) for k in value)
)
ANY = Kind("anything", lambda value: True)


def one_of(*choices: Any) -> Kind:
    """Words of a closed list, in any case."""
    folded = {str(choice).lower() for choice in choices}
    return Kind(
        f"one of {', '.join(map(str, choices))}", lambda value: isinstance(value, str) and value.lower() in folded
    )


def either(*kinds: Kind) -> Kind:
    """A value of any of these kinds."""
    return Kind(" or ".join(kind.words for kind in kinds), lambda value: any(kind.has(value) for kind in kinds))


FORMATS = {
    "fp32": "fp32",
    "float32": "fp32",
    "torch.float32": "fp32",
    "float": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "torch.float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
}
"""DeepSpeed's names of a number format, and Plait's."""
FORMAT = Kind("a format such as fp16, bf16 or fp32", lambda value: named_format(value) is not None)


def named_format(value: Any) -> str | None:
    """Plait's name of a format; torch's own objects are known by their names."""
    return FORMATS.get(str(value).lower())
