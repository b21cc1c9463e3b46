"""The base class of Plait's own optimizers, and which form of sharded parameters an optimizer gets."""

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
"""A function that returns one optimizer state, filled with zeros, for a parameter."""


class PlaitOptimizer(Optimizer):
    """A torch optimizer that updates all parameter groups in one method, so that one all-reduce can serve them all."""

    takes_dtensors: ClassVar[bool] = True
    """See [Note: what an optimizer says of itself]."""

    @classmethod
    def from_config(cls, given: OptimizerParams, config: OptimConfig) -> Self:
        """Return the optimizer that the section `optim` describes: each argument of the class has the key's value."""
        names = list(inspect.signature(cls).parameters)[1:]
        return cls(given.params, **{name: getattr(config, name) for name in names})

    @abstractmethod
    def _update(self) -> None:
        """Update every parameter that has a gradient."""

    def unpack(self) -> None:
        """Convert packed (8-bit) states to plain tensors. Does nothing for optimizers that have none."""

    def zero_state(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Any:
        """Return a state of the parameter's shape, filled with zeros, in the form that the optimizer keeps it in."""
        return torch.zeros_like(parameter, dtype=dtype).detach()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters; if given, call `closure` first to compute the gradients, and return its loss."""
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
            # In host memory, as in torch: it is read in each step, and that must not wait for the device.
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


# [Note: what an optimizer says of itself] Two optional attributes of an optimizer class, or of the function that builds
# an optimizer, declare which form of sharded parameters it gets:
#
# - `elementwise = True`: the update of an element depends on no other element. The optimizer gets this rank's shard of
#   each parameter, as a plain tensor: the fastest form. In a run description, `optim.elementwise` declares it for a
#   class without the attribute.
# - `takes_dtensors = True`: the optimizer needs whole parameters, and communicates itself. It gets the DTensors.
#   Plait's LAMB, Adafactor and Muon do.
#
# Without either, the optimizer gets full parameters as plain tensors, each on one rank, its owner; see [Note: one owner
# per parameter]. That is correct if the update of a parameter depends on no other parameter, which `optim.examine`
# checks. Two optional methods, `eval()` and `train()`, switch between the weights to evaluate with and those to train
# (schedule-free optimizers have them); Plait calls them. torch's own optimizers need no attributes: Plait knows which
# of them are elementwise.


ParamForm = Literal["shards", "dtensors", "full"]
"""What an optimizer gets for a sharded parameter: this rank's shard, the DTensor, or the full tensor on one rank."""

_TORCH = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)


def param_form_of(config: OptimConfig) -> ParamForm:
    """Return which form of sharded parameters the optimizer of the section `optim` gets."""
    if not isinstance(config, CustomOptim):
        return "shards" if config.elementwise else "dtensors"
    if config.elementwise is not None:
        return "shards" if config.elementwise else "full"
    return declared_param_form(load(config, "optim"))


def declared_param_form(optimizer: Any) -> ParamForm:
    """Return which form of sharded parameters an optimizer, its class, or a function that builds one declares."""
    elementwise = getattr(optimizer, "elementwise", None)
    if elementwise is not None:
        return "shards" if elementwise else "full"
    if getattr(optimizer, "takes_dtensors", False):
        return "dtensors"
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    return "shards" if issubclass(cls, Optimizer) and step_class(cls) in _TORCH else "full"


def step_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return the class of `torch.optim` whose `step` a subclass inherits; the class itself if it has its own `step`."""
    step = inspect.unwrap(cls.step)
    return next((base for base in _TORCH if inspect.unwrap(base.step) is step), cls)


def is_builtin(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `step` is torch's or Plait's. Its state then consists of tensors only."""
    by_module = isinstance(optimizer, PlaitOptimizer) or type(optimizer).__module__.startswith(
        ("torch.optim.", "plait.optim.")
    )
    return by_module or step_class(type(optimizer)) in _TORCH
