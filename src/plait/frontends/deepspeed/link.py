"""From a parameter to the engine that trains it: what DeepSpeed's functions on bare parameters need."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor, nn

from plait.strategy import ManualEngine
from plait.world import is_sharded

_NAME = "_plait_link"


@dataclass(slots=True)
class Link:
    """Where a parameter lives. Nothing is kept alive by it."""

    engine: weakref.ref[ManualEngine]
    name: str
    homes: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    """Every module that holds it, and under which key."""


def link_parameters(engine: ManualEngine) -> None:
    """Leave a note on every parameter of an engine's model."""
    named = {id(param): name for name, param in engine.model.named_parameters()}
    for module in engine.model.modules():
        for key, param in module._parameters.items():
            if param is None:
                continue
            link = link_of(param) or Link(weakref.ref(engine), named[id(param)])
            link.homes.append((weakref.ref(module), key))
            setattr(param, _NAME, link)


def link_of(param: Tensor) -> Link | None:
    """What was noted on a parameter; None where it belongs to no engine."""
    found = getattr(param, _NAME, None)
    assert found is None or isinstance(found, Link)
    return found


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this rank may hold a part; every rank must ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor
