"""How the tensors of one naming are made of those of another, said without having any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from plait.models.common.weights import Translate


class Made(NamedTuple):
    """One tensor, made of others. `make` gets them whole, in this order, and must work on meta tensors too."""

    parts: tuple[str, ...]
    make: Callable[..., Tensor]


def same(tensor: Tensor) -> Tensor:
    """The tensor itself, under another name."""
    return tensor


def by_translation(translate: Translate, shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """What `translate` would make of tensors with these names and shapes."""
    made: dict[str, Made] = {}
    for stored, shape in shapes.items():
        for index, (name, _) in enumerate(translate(stored, torch.empty(shape, device="meta"))):
            made.setdefault(name, Made((stored,), partial(_piece, translate, stored, index)))
    return made


def _piece(translate: Translate, stored: str, index: int, tensor: Tensor) -> Tensor:
    return list(translate(stored, tensor))[index][1]
