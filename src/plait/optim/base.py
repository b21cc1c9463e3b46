"""The base of Plait's own optimizers, and in which form an optimizer gets sharded parameters."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

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

if TYPE_CHECKING:
    from plait.optim.optimizers import OptimizerParams

MakeState = Callable[[Tensor], Any]
"""From a parameter to one of its states, filled with zeros."""


class PlaitOptimizer(Optimizer):
    """A torch optimizer whose update over all groups is one method, so that they share their all-reduces."""

    takes_dtensors: ClassVar[bool] = True
    """See [Note: what an optimizer says of itself]."""

    @classmethod
    def from_config(cls, given: OptimizerParams, config: OptimConfig) -> Self:
        """Return the optimizer that a section describes: its keys are the arguments of the class, by name."""
        names = list(inspect.signature(cls).parameters)[1:]
        return cls(given.params, **{name: getattr(config, name) for name in names})

    @abstractmethod
    def _update(self) -> None:
        """Update every parameter that has a gradient."""

    def unpack(self) -> None:
        """Convert all state to tensors of the parameter's shape, or scalars. Most optimizers keep only these."""

    def zero_state(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Any:
        """Return a state of the parameter's shape, filled with zeros, in the form that training uses."""
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
        """Count one more update of a parameter, and return the count."""
        state = self.state[parameter]
        if "step" not in state:
            # On the host, as in torch: it is read in each step, and reading must not wait for the device.
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        return float(state["step"])

    def _moment(self, parameter: Tensor, name: str) -> Tensor:
        """Return a state tensor of the parameter's own shape and sharding, zero at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        tensor: Tensor = state[name]
        return tensor


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of a group that have a gradient."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


# [Note: what an optimizer says of itself] Two optional attributes of its class, or of the function that builds it,
# declare in which form it gets parameters that are sharded over ranks:
#
# - `elementwise = True`: each element is updated by itself, with the values of its group. It gets this rank's shard of
#   each parameter, as a plain tensor: the fastest form. In a run description `optim.elementwise` declares it for a
#   class that does not.
# - `takes_dtensors = True`: it looks at whole parameters, and sums over ranks itself; it gets the DTensors. So do
#   Plait's own LAMB, Adafactor and Muon.
#
# Without either it gets full parameters, as plain tensors, each on the rank that owns it; see [Note: one owner per
# parameter]. That is correct for any optimizer that treats parameters one by one, and `optim.examine` checks that it
# does. Two optional methods, `eval()` and `train()`, switch between the weights to evaluate and those to train; Plait
# calls them. torch's own optimizers need no attributes: Plait knows which of them are elementwise.


ParamForm = Literal["shards", "dtensors", "full"]
"""In which form an optimizer gets a sharded parameter: this rank's shard, the DTensor, or all of it on one rank."""

_TORCH = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)


def param_form_of(config: OptimConfig) -> ParamForm:
    """Return in which form the optimizer of a section gets sharded parameters."""
    if not isinstance(config, CustomOptim):
        return "shards" if config.elementwise else "dtensors"
    if config.elementwise is not None:
        return "shards" if config.elementwise else "full"
    return declared_param_form(load(config, "optim"))


def declared_param_form(optimizer: Any) -> ParamForm:
    """Return the same for an optimizer, its class, or a function that builds one."""
    elementwise = getattr(optimizer, "elementwise", None)
    if elementwise is not None:
        return "shards" if elementwise else "full"
    if getattr(optimizer, "takes_dtensors", False):
        return "dtensors"
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    return "shards" if issubclass(cls, Optimizer) and step_class(cls) in _TORCH else "full"


def step_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return torch's class that has the same `step`: a subclass may only change defaults."""
    step = inspect.unwrap(cls.step)
    return next((base for base in _TORCH if inspect.unwrap(base.step) is step), cls)


def is_builtin(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is torch's or Plait's, whose state consists of tensors only."""
    by_module = isinstance(optimizer, PlaitOptimizer) or type(optimizer).__module__.startswith(
        ("torch.optim.", "plait.optim.")
    )
    return by_module or step_class(type(optimizer)) in _TORCH
