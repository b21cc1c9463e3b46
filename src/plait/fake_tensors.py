"""Where code that trains differs on fake tensors, which have shapes, dtypes and devices but no values.

[Note: one question about fake tensors] A plan runs the code that trains, on fake tensors. Nearly all of it is the same.
What reads values or addresses (a kernel of Plait's own, a decision on the host) has a stand-in, as operations of torch
have by `register_fake`: `on_fake_tensors` calls it, and no other code of Plait asks whether a tensor is fake. What
depends on the machine rather than on a tensor (files, links, free memory, threads) asks `World.fake`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from plait.torch_internals import has_values

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def on_fake_tensors(
    stand_in: Callable[_Params, _Result], *, argument: int = 0
) -> Callable[[Callable[_Params, _Result]], Callable[_Params, _Result]]:
    """A decorator: call `stand_in` instead where the tensor at this position of the arguments is fake.

    The argument may be a sequence, whose first tensor decides. A stand-in for a kernel allocates as much memory as the
    kernel and reads and writes about as many bytes, so that a plan counts these; nothing is computed.
    """

    def decorate(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        @wraps(function)
        def either(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            first: Any = args[argument]
            while not isinstance(first, Tensor):
                first = first[0]
            return function(*args, **kwargs) if has_values(first) else stand_in(*args, **kwargs)

        return either

    return decorate


def is_like(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are fake, or neither: they can be arguments of one operation."""
    return has_values(one) == has_values(other)


def class_of(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor; of a fake one the class of the tensor that it simulates."""
    if has_values(tensor):
        return type(tensor)
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
