"""Gradients of one process that computes in a smaller format: left where and as they are, as long as that is exact.

With one micro-batch a step there is nothing to sum: the gradient that the backward pass made is the gradient of the
step, and an optimizer that reads any format needs no wide copy of it. That spares four bytes for each parameter, and a
pass over them. Where a step has several micro-batches they are summed in the wider format, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.parallel.listening import listen


class OwnGradients:
    """Each parameter's own gradient of a step with one micro-batch; the sum in `reduce` of a step with several."""

    def __init__(self, params: Sequence[nn.Parameter], reduce: torch.dtype) -> None:
        self._params = list(params)
        self._reduce = reduce
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._summing = False
        self._listens = False

    def of(self, index: int) -> Tensor:
        """The gradient of one parameter, once the step's are complete."""
        param, total = self._params[index], self._sums[index]
        if total is not None:
            return total
        if param.grad is None:
            # Took no part in this step. A gradient of zero, as on many ranks, where another may have used it.
            param.grad = torch.zeros_like(param)
        return param.grad

    def clear(self) -> None:
        """Forget the sums of this step."""
        self._sums = [None] * len(self._params)

    def _collect(self, index: int, param: Tensor) -> None:
        if not self._summing:
            return
        assert param.grad is not None
        total = self._sums[index]
        if total is None:
            dtype = torch.promote_types(self._reduce, param.dtype)
            self._sums[index] = param.grad.to(dtype, copy=True)
        else:
            total.add_(param.grad)
        param.grad = None

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; one that is not the last, or not the only one, is summed."""
        self._summing = self._summing or not last
        if self._summing and not self._listens:  # not before: a call for each parameter, which most runs never need
            self._listens = True
            listen(self._params, self._collect)

    def finish(self) -> None:
        """The step's gradients are complete."""
        self._summing = False
