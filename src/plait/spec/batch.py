"""One rank's part of one forward/backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a model is called with once.

    `inputs` is a mapping (passed as keywords), a tuple or list (passed as positions) or a single object.
    `samples` is how many samples are real. Zero marks a filler: a rank without data of its own still
    takes part in every collective, and its loss and metrics count for nothing.
    """

    inputs: Any
    samples: int


def first_part(inputs: Any) -> Any:
    """The first value of a mapping or sequence; anything else as it is. With that an `nn.Sequential` is called."""
    if isinstance(inputs, Mapping):
        return next(iter(inputs.values()))
    return inputs[0] if isinstance(inputs, (tuple, list)) else inputs
