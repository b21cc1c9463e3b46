"""What Plait's own optimizers have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeState = Callable[[Tensor], Any]
"""From a parameter to one of its states, zero."""


class OwnOptimizer(Optimizer):
    """A torch optimizer whose whole update, over all groups, is one method.

    One method for all groups, so that sums over ranks can travel together.
    """

    takes_dtensors: ClassVar[bool] = True
    """See [Note: what an optimizer says of itself]."""

    @abstractmethod
    def _update(self) -> None:
        """Move every parameter that has a gradient."""

    def widen(self) -> None:
        """Bring all of the state into the form that others know: tensors like the parameter, or scalars.

        Most keep it so.
        """

    def room_for(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Any:
        """A state of the parameter's shape, zero, in the form that training has it in."""
        return torch.zeros_like(parameter, dtype=dtype).detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; `closure`, if given, computes the gradients first, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _count(self, parameter: Tensor) -> float:
        """Count one more update of a parameter, and give the number."""
        state = self.state[parameter]
        if "step" not in state:
            # On the host, as torch does it: it is read each step, and reading must not wait for the device.
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        return float(state["step"])

    def _moment(self, parameter: Tensor, name: str) -> Tensor:
        """A state tensor of the parameter's own shape and sharding, zero at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        tensor: Tensor = state[name]
        return tensor


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have a gradient this time."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]
