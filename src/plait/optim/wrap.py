"""Wrap a user's own optimizer object, whose parameters are replaced when the model is sharded.

[Note: why the object stays]
Users create an optimizer over their model's parameters, then a learning-rate scheduler over the optimizer, and only
then shard the model. Afterwards the optimizer must update other tensors: this rank's shards, or fp32 master weights.
These replace the old parameters in the groups of the same optimizer object, so that references to it (from a
scheduler) and the settings of its groups stay valid.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from plait.errors import ModelError
from plait.optim.base import ParamForm, declared_param_form, step_class
from plait.optim.groups import GroupSpec
from plait.optim.optimizers import has_fused, prepare_momentum, unusable
from plait.torch_internals import has_step_hooks

_FUSED = (AdamW, Adam, SGD, Adagrad)

OptimizerSource = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
"""An optimizer, or a function that builds one from a model's parameters."""


class WrappedOptimizer:
    """A user's optimizer, with the names of the parameters in its groups; create it before the model is sharded.

    Raises `ModelError` if the optimizer has state already, or parameters that are not in the model.
    """

    def __init__(self, source: OptimizerSource, model: nn.Module) -> None:
        trainable = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = source if isinstance(source, Optimizer) else source(trainable)
        _refuse(self.optimizer)
        name_of = {param: name for name, param in model.named_parameters()}
        self.specs: list[GroupSpec] = []
        """The parameter names of each group, in the optimizer's order; options stay in the optimizer's groups."""
        for number, group in enumerate(self.optimizer.param_groups):
            strangers = [param for param in group["params"] if param not in name_of]
            if strangers:
                raise ModelError(
                    f"group {number} of the {type(self.optimizer).__name__} has {len(strangers)} parameters that are "
                    f"not in the model, the first of shape {tuple(strangers[0].shape)}: create the optimizer from the "
                    "parameters of the given model"
                )
            names = tuple(name_of[param] for param in group["params"] if param.requires_grad)
            self.specs.append(GroupSpec(names, {}))
        self.names = frozenset(name for spec in self.specs for name in spec.names)

    @property
    def param_form(self) -> ParamForm:
        """Which form of sharded parameters it gets."""
        return declared_param_form(self.optimizer)

    def missing(self, model: nn.Module) -> list[str]:
        """Return the names of the trainable parameters that the optimizer does not have."""
        return [name for name, param in model.named_parameters() if param.requires_grad and name not in self.names]

    def replace_params(self, tensors: Mapping[str, Tensor]) -> Optimizer:
        """Replace the optimizer's parameters by these tensors, by name; return the optimizer."""
        for group, spec in zip(self.optimizer.param_groups, self.specs, strict=True):
            names = [name for name in spec.names if name in tensors]
            group["params"] = [tensors[name] for name in names]
            if "param_names" in group:
                group["param_names"] = names
            group.setdefault("initial_lr", group["lr"])
        if isinstance(self.optimizer, Adagrad):
            _restart_adagrad(self.optimizer)
        _use_fused(self.optimizer)
        return self.optimizer


def bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return an optimizer's `step`; for torch's and Plait's optimizers without step hooks, the unwrapped method.

    torch wraps `step` for profilers and step hooks; for a small model the wrapper takes as long as the update.
    """
    step = inspect.unwrap(type(optimizer).step)
    ours = step.__module__.startswith(("torch.optim.", "plait.optim."))
    return partial(step, optimizer) if ours and not has_step_hooks(optimizer) else optimizer.step


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if reason := unusable(optimizer):
        raise ModelError(f"{reason}. Use AdamW, or another that steps once for each gradient")
    if isinstance(optimizer, Adagrad):  # its state exists before the first step
        used = any(float(state["step"]) > 0 for state in optimizer.state.values())
    else:
        used = bool(optimizer.state)
    if used:
        raise ModelError(
            f"the {name} already has state: prepare the model first, and load the optimizer's state afterwards"
        )


def _restart_adagrad(optimizer: Adagrad) -> None:
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            total = torch.full_like(tensor, group["initial_accumulator_value"]).detach()
            optimizer.state[tensor] = {"step": torch.zeros(()), "sum": total}


def _use_fused(optimizer: Optimizer) -> None:
    """Use the fused kernel if the user has set neither `fused` nor `foreach`: the same maths in one kernel."""
    groups = optimizer.param_groups
    left_open = all(group.get("fused") is None and group.get("foreach") is None for group in groups)
    plain = not any(group.get("differentiable") or group.get("capturable") for group in groups)
    tensors = [tensor for group in groups for tensor in group["params"]]
    cls = step_class(type(optimizer))
    if cls not in _FUSED or not left_open or not plain or not all(has_fused(cls.__name__, t) for t in tensors):
        return
    for group in groups:
        group["fused"] = True
    if isinstance(optimizer, SGD) and any(group["momentum"] != 0 for group in groups):
        prepare_momentum(optimizer)
