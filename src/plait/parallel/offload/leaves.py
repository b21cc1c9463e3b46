"""The tensors inside of a parameter's optimizer state, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

PART = "/"
"""Between the name of a state and of a tensor inside of it."""


def leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a parameter's state that are no scalars, also those inside of a named tuple."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.ndim > 0:
                yield key, value
        elif hasattr(value, "_fields"):
            parts = ((part, getattr(value, part)) for part in value._fields)
            yield from ((f"{key}{PART}{part}", each) for part, each in parts if isinstance(each, Tensor))


def mapped(value: Any, change: Callable[[Tensor], Tensor], constant: Callable[[Any], Any]) -> Any:
    """A state of the same form with each of its leaves changed; `constant` is for tables that it refers to."""
    if isinstance(value, Tensor):
        return change(value) if value.ndim > 0 else value
    if not hasattr(value, "_fields"):
        return value
    inside = {part: getattr(value, part) for part in value._fields}
    tensors = {part: change(each) for part, each in inside.items() if isinstance(each, Tensor)}
    tables = {part: constant(each) for part, each in inside.items() if hasattr(each, "_fields")}
    return value._replace(**tensors, **tables)
