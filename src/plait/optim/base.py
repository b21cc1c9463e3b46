"""What Plait's own optimizers have in common."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from plait.config import CustomOptim, OptimConfig
from plait.plugins import load

MakeState = Callable[[Tensor], Any]
"""From a parameter to one of its states, zero."""


class PlaitOptimizer(Optimizer):
    """A torch optimizer whose whole update, over all groups, is one method.

    One method for all groups, so that sums over ranks can travel together.
    """

    takes_dtensors: ClassVar[bool] = True
    """See [Note: what an optimizer says of itself]."""

    @abstractmethod
    def _update(self) -> None:
        """Move every parameter that has a gradient."""

    def unpack(self) -> None:
        """Bring all of the state into the form that others know: tensors like the parameter, or scalars.

        Most keep it so.
        """

    def zero_state(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Any:
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


# What an optimizer may be given of a parameter that is spread over ranks, by what it says of itself.
#
# [Note: what an optimizer says of itself] Two optional attributes of its class (or of the function that makes it):
#
# - `elementwise = True`: each number is updated by itself, with the numbers of its group. It gets this rank's part of
#   each parameter, as a plain tensor, and works on parts as on wholes: the fastest. In a run description
#   `optim.elementwise` says it of a class that does not.
# - `takes_dtensors = True`: it looks at whole parameters, and sums over ranks itself; it gets the DTensors. So do
# Plait's
#   own LAMB, Adafactor and Muon.
#
# One that says nothing gets whole parameters, as plain tensors: each on the rank that it is shared out to; see
# `optim.shared_out`. That is right for whatever treats parameters one by one, and `optim.trial` finds out whether it
# does. Two optional methods, `eval()` and `train()`, change the weights into those to use and back; Plait calls them.
#
# Of torch's own it is known here what they are.


ParamForm = Literal["shards", "dtensors", "full"]
"""Of a parameter that is spread over ranks: this rank's part, the DTensor, or all of it on one rank."""

_TORCH = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)


def param_form_of(config: OptimConfig) -> ParamForm:
    """What the optimizer that a section describes is given."""
    if not isinstance(config, CustomOptim):
        return "shards" if config.elementwise else "dtensors"
    if config.elementwise is not None:
        return "shards" if config.elementwise else "full"
    return declared_param_form(load(config, "optim"))


def declared_param_form(optimizer: Any) -> ParamForm:
    """The same of a class, a function that makes one, or an optimizer."""
    elementwise = getattr(optimizer, "elementwise", None)
    if elementwise is not None:
        return "shards" if elementwise else "full"
    if getattr(optimizer, "takes_dtensors", False):
        return "dtensors"
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    return "shards" if issubclass(cls, Optimizer) and step_class(cls) in _TORCH else "full"


def step_class(cls: type[Optimizer]) -> type[Optimizer]:
    """The class whose step it is: another one may only have other defaults."""
    step = inspect.unwrap(cls.step)
    return next((base for base in _TORCH if inspect.unwrap(base.step) is step), cls)


def is_builtin(optimizer: Optimizer) -> bool:
    """Whether its step is torch's or Plait's: all that such a one keeps from step to step is tensors."""
    by_module = isinstance(optimizer, PlaitOptimizer) or type(optimizer).__module__.startswith(
        ("torch.optim.", "plait.optim.")
    )
    return by_module or step_class(type(optimizer)) in _TORCH
