"""One process with fp32 weights behind smaller ones, and an optimizer that does everything in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from plait.parallel import OwnGradients
from plait.strategy.native.views import Views
from plait.torch_internals import foreach_copy_


class RoundedViews(Views):
    """The optimizer sees the fp32 weights; it finds small gradients on the parameters, and writes those itself.

    See `optim.one_pass` and `parallel.single`.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        gradients: OwnGradients,
        masters: Sequence[Tensor | None],
        frozen: Mapping[nn.Parameter, Tensor],
    ) -> None:
        """`masters` holds, for each parameter in a smaller format, its fp32 weights; None for the others."""
        self.frozen = frozen
        self._gradients = gradients
        self._masters = masters
        super().__init__(names, params)

    def _make_tensors(self) -> list[nn.Parameter]:
        return [
            param if master is None else nn.Parameter(master)
            for param, master in zip(self.params, self._masters, strict=True)
        ]

    def gather_gradients(self) -> list[Tensor]:
        """The gradients as the backward pass left them, or their sums."""
        grads = []
        for index, tensor in enumerate(self.tensors):
            grad = self._gradients.of(index)
            if grad.dtype == tensor.dtype:
                tensor.grad = grad
            grads.append(grad)
        return grads

    def gradient(self, index: int) -> Tensor | None:
        """The gradient of this step, while there is one."""
        return self._gradients.of(index)

    def clear_gradients(self) -> None:
        """Forget gradients and sums."""
        super().clear_gradients()
        self._gradients.clear()
        for tensor in self.tensors:
            tensor.grad = None

    def rooms(self) -> dict[Tensor, Tensor]:
        """The parameters behind which fp32 weights are updated."""
        return {tensor: param for tensor, param in zip(self.tensors, self.params, strict=True) if tensor is not param}

    def publish(self) -> None:
        """Round the fp32 weights to what the model computes with."""
        if rooms := self.rooms():
            with torch.no_grad():
                foreach_copy_([*rooms.values()], [*rooms])
