"""A parameter that speaks for the whole of itself, as long as that is there.

Scripts hold on to parameters: they ask for one, gather it, and look at the very object that they asked for. It stays
the object that the engine knows; only what is done to it meanwhile is done to the whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from plait.torch_internals import tree_map

_WHOLE = "_plait_whole"


class Gathered(DTensor):
    """The class of a parameter while it is gathered."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_whole_of, args), **tree_map(_whole_of, kwargs or {}))


def _whole_of(value: Any) -> Any:
    return value.__dict__[_WHOLE] if isinstance(value, Gathered) else value


def speak_for(param: DTensor, whole: nn.Parameter) -> None:
    """From now on, what is done to `param` is done to `whole`."""
    param.__dict__[_WHOLE] = whole
    param.__class__ = Gathered


def speak_for_itself(param: DTensor) -> None:
    """The parameter is this rank's part again."""
    param.__class__ = DTensor
    del param.__dict__[_WHOLE]
