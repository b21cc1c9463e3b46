"""An optimizer of one's own: made from its name, over these groups, and held against what Plait asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch.optim import LBFGS, Optimizer, SparseAdam

from plait.config import OptimConfig, OptimPart
from plait.errors import ConfigError, Problem
from plait.optim.groups import ViewGroup
from plait.plugins import build


def build_part(config: OptimPart, groups: Sequence[ViewGroup]) -> Optimizer:
    """The optimizer that somebody names, over groups of plain parameters, each of which may be empty."""
    optimizer = make_part(config, [{"params": list(group.tensors), **group.options} for group in groups])
    if config.weight_decay is not None and "weight_decay" not in optimizer.defaults:
        message = f"{type(optimizer).__name__} has no weight decay"
        raise ConfigError(Problem("optim.weight_decay", message, "Leave it out."))
    name_of = {tensor: name for group in groups for name, tensor in zip(group.names, group.tensors, strict=True)}
    left = dict(name_of)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if left.pop(tensor, None) is None:
                message = f"{config.type!r} has a tensor in group {number} that it was not given, or has it twice"
                raise ConfigError(Problem("optim.type", message, "Have it update the parameters that it is given."))
        group["param_names"] = [name_of[tensor] for tensor in group["params"]]
        if "lr" not in group:
            message = f"{type(optimizer).__name__} has no `lr` in its groups, which schedules set and logs show"
            raise ConfigError(Problem("optim.type", message, "Have it keep its rate there."))
    if left:
        message = f"{config.type!r} leaves out {len(left)} of the parameters that it was given: {min(left.values())}, …"
        remedy = "Have it update all of them; what is not to be trained has requires_grad=False."
        raise ConfigError(Problem("optim.type", message, remedy))
    return optimizer


def make_part(config: OptimPart, groups: list[dict[str, Any]]) -> Optimizer:
    """Call what the section names with parameter groups."""
    if isinstance(config.given, Optimizer):
        message = "an optimizer that is made already is over the parameters of one model, and here others are updated"
        raise ConfigError(Problem("optim", message, "Give its class, or a function that makes it from parameters."))
    rate: dict[str, Any] = {} if config.lr is None else {"lr": config.lr}
    made = build(config, "optim", groups, **rate)
    if not isinstance(made, Optimizer):
        message = f"{str(config.type)!r} made a {type(made).__name__}, which is no torch.optim.Optimizer"
        raise ConfigError(Problem("optim.type", message, "Derive it from torch.optim.Optimizer."))
    if reason := unusable(made):
        raise ConfigError(Problem("optim.type", reason, "Use AdamW, or another that steps once for each gradient."))
    return made


def unusable(optimizer: Optimizer) -> str | None:
    """Why no engine can step an optimizer; None where it can."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return f"{kind} evaluates the model several times a step, and an engine has its gradients once"
    if isinstance(optimizer, SparseAdam):
        return f"{kind} wants sparse gradients, and here gradients are dense"
    # Of the class: a scheduler of torch puts a function around the step of the object.
    closure = next(islice(inspect.signature(type(optimizer).step).parameters.values(), 1, None), None)
    if closure is not None and closure.default is closure.empty and closure.kind is closure.POSITIONAL_OR_KEYWORD:
        return f"{kind} wants a closure in step(), to evaluate the model again, and an engine has its gradients once"
    return None


def base_rate(config: OptimConfig, optimizer: Optimizer) -> float:
    """The rate that schedules scale: `optim.lr`, or the one that the optimizer has by itself."""
    if config.lr is not None:
        return config.lr
    return float(optimizer.defaults.get("lr", optimizer.param_groups[0]["initial_lr"]))
