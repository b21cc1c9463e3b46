"""Samples to one micro-batch, and micro-batches to pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from plait.errors import DataError

Collate = Callable[[list[Any]], Any]


def stack(items: list[Any]) -> Any:
    """What torch's `default_collate` gives; the common cases, mappings and tuples of tensors, go faster."""
    first = items[0]
    try:
        if type(first) is dict and all(type(value) is Tensor for value in first.values()):
            return {key: torch.stack([item[key] for item in items]) for key in first}
        if type(first) is tuple and all(type(value) is Tensor for value in first):
            return [torch.stack(column) for column in zip(*items, strict=True)]
        return default_collate(items)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{len(items)} samples of type {type(first).__name__} cannot be stacked into one micro-batch: "
            f"{error}; make them alike, or give a collate function"
        ) from error


def as_is(value: Any) -> Any:
    """For torch's DataLoader, where its items are micro-batches already: by itself it would convert them."""
    return value


def pin(value: Any) -> Any:
    """The same structure with every tensor in page-locked memory."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pin(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pin, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(pin, value))
    return value


class ReadyMade:
    """Turns a function of one item into a collate function for micro-batches of one item.

    For data sets whose items are whole batches already.
    """

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        """Convert the only item."""
        (item,) = items
        return self._convert(item)
