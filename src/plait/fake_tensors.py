"""Stand-ins for functions that cannot run on fake tensors, which have shapes, dtypes and devices but no values.

[Note: one question about fake tensors] To predict memory and time, a plan runs the training code on fake tensors. Most
of this code does not know it. A function that reads values or addresses of tensors (a kernel of Plait, a decision on
the host) gets a stand-in by the decorator `on_fake_tensors`, as an operation of torch gets one by `register_fake`.
Other code must not check whether a tensor is fake. Code that depends on the machine and not on a tensor (files, links,
free memory, threads) checks `World.fake`.
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
    """Return a decorator: if the positional argument number `argument` is a fake tensor, `stand_in` is called instead.

    If that argument is a sequence, its first tensor is checked. A stand-in for a kernel should allocate as much memory
    as the kernel, and read and write about as many bytes, since the plan counts these; it computes nothing.
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
    """Return whether both tensors are fake or neither is, so that one operation may have both as arguments."""
    return has_values(one) == has_values(other)


def class_of(tensor: Tensor) -> type[Tensor]:
    """Return the class of a tensor; for a fake one, the class of the tensor that it simulates."""
    if has_values(tensor):
        return type(tensor)
    return nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
