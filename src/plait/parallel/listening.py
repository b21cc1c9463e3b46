"""Being told of gradients, without keeping parameters alive by it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn


def listen(params: Sequence[nn.Parameter], collect: Callable[[int, Tensor], None]) -> None:
    """Call a method with the index of a parameter, and the parameter, whenever its gradient is there.

    The method's object is held weakly. torch does not show a parameter's hooks to the garbage collector, so a hook that
    held an object that holds the parameters would keep all of them, for as long as the process lives.
    """
    method = weakref.WeakMethod(collect)
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(partial(_tell, method, index))  # type: ignore[no-untyped-call]


def _tell(method: weakref.WeakMethod[Callable[[int, Tensor], None]], index: int, param: Tensor) -> None:
    collect = method()
    if collect is not None:
        collect(index, param)
