"""Build the optimizer that the section `optim` describes, over parameter groups.

[Note: dynamo is loaded late] torch imports its compiler (dynamo) when a function marked as not to be compiled is
called. One of these is `Optimizer.add_param_group`, which every optimizer's constructor calls. The import takes half as
long as that of torch itself. A run that compiles nothing avoids it: here the unwrapped function is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from plait.config import (
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    CustomOptim,
    OptimConfig,
    SGDConfig,
)
from plait.distributed import is_sharded, replaced
from plait.errors import ConfigError, ModelError, Problem
from plait.kernels import has_kernels
from plait.optim.base import step_class
from plait.optim.fused_adam import OnePassAdam, supports_one_pass
from plait.optim.groups import OptimizerGroup
from plait.plugins import build


def build_custom_optimizer(config: CustomOptim, groups: Sequence[OptimizerGroup]) -> Optimizer:
    """Return a user-provided optimizer over groups of plain tensors, each of which may be empty (a shard).

    Raises `ConfigError` if it does not update exactly these parameters.
    """
    optimizer = make_custom_optimizer(config, [{"params": list(group.tensors), **group.options} for group in groups])
    if config.weight_decay is not None and "weight_decay" not in optimizer.defaults:
        message = f"{type(optimizer).__name__} has no weight decay"
        raise ConfigError(Problem("optim.weight_decay", message, "Leave it out."))
    name_of = {tensor: name for group in groups for name, tensor in zip(group.names, group.tensors, strict=True)}
    left = dict(name_of)
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if left.pop(tensor, None) is None:
                message = (
                    f"{config.type!r} has a tensor in group {number} that is not a given parameter, or has it twice"
                )
                raise ConfigError(Problem("optim.type", message, "Have it update exactly the given parameters."))
        group["param_names"] = [name_of[tensor] for tensor in group["params"]]
        if "lr" not in group:
            message = f"{type(optimizer).__name__} has no `lr` in its groups, which schedules set and logs show"
            raise ConfigError(Problem("optim.type", message, "Have it keep its learning rate there."))
    if left:
        message = f"{config.type!r} leaves out {len(left)} of the parameters that it was given: {min(left.values())}, …"
        remedy = "Have it update all of them; what is not to be trained has requires_grad=False."
        raise ConfigError(Problem("optim.type", message, remedy))
    return optimizer


def make_custom_optimizer(config: CustomOptim, groups: list[dict[str, Any]]) -> Optimizer:
    """Call the class or function that `optim.type` names with parameter groups; return the optimizer.

    Raises `ConfigError` if it returns none, or one that engines cannot step.
    """
    if isinstance(config.given, Optimizer):
        message = "an optimizer object holds the parameters of one model, and here others are updated"
        raise ConfigError(Problem("optim", message, "Give its class, or a function that builds it from parameters."))
    rate: dict[str, Any] = {} if config.lr is None else {"lr": config.lr}
    made = build(config, "optim", groups, **rate)
    if not isinstance(made, Optimizer):
        message = f"{str(config.type)!r} made a {type(made).__name__}, which is not a torch.optim.Optimizer"
        raise ConfigError(Problem("optim.type", message, "Derive it from torch.optim.Optimizer."))
    if reason := unusable(made):
        raise ConfigError(Problem("optim.type", reason, "Use AdamW, or another that steps once for each gradient."))
    return made


def unusable(optimizer: Optimizer) -> str | None:
    """Return the reason why engines cannot step an optimizer (it needs a closure); None if they can."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return f"{name} evaluates the model several times per step, and an engine computes gradients once"
    if isinstance(optimizer, SparseAdam):
        return f"{name} needs sparse gradients, and gradients are dense here"
    # The class's method: a torch scheduler wraps the `step` of the object.
    closure = next(islice(inspect.signature(type(optimizer).step).parameters.values(), 1, None), None)
    if closure is not None and closure.default is closure.empty and closure.kind is closure.POSITIONAL_OR_KEYWORD:
        return f"{name} needs a closure in step(), to evaluate the model again; an engine computes gradients once"
    return None


def base_rate(config: OptimConfig, optimizer: Optimizer) -> float:
    """Return the learning rate that schedules scale: `optim.lr`, or the optimizer's own default."""
    if config.lr is not None:
        return config.lr
    return float(optimizer.defaults.get("lr", optimizer.param_groups[0]["initial_lr"]))


# The devices on which every supported torch has a fused step that uses `grad_scale` and `found_inf`.
_FUSED_DEVICES = {
    "AdamW": ("cpu", "cuda"),
    "Adam": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}


@dataclass(frozen=True, slots=True)
class OptimizerParams:
    """The parameter groups from which a built-in optimizer is built, together with its section."""

    groups: Sequence[OptimizerGroup]
    in_place: bool = True
    """Whether the tensors keep their memory addresses, which a kernel may then cache."""

    @property
    def params(self) -> list[dict[str, Any]]:
        """The groups as arguments of torch's optimizers, with named parameters."""
        return [
            {"params": list(zip(group.names, group.tensors, strict=True)), **group.options} for group in self.groups
        ]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors of all groups."""
        return (tensor for group in self.groups for tensor in group.tensors)


def supports_grad_scale(optimizer: Optimizer) -> bool:
    """Whether an optimizer's `step` uses the attributes `grad_scale` and `found_inf`.

    With both set to scalar tensors, the fused kernels divide gradients by `grad_scale` (in place) and change nothing
    if `found_inf` is 1, without the host waiting for it.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and (isinstance(optimizer, OnePassAdam) or step_class(type(optimizer)) in (AdamW, Adam, SGD, Adagrad))


def build_optimizer(config: OptimConfig, groups: Sequence[OptimizerGroup], *, in_place: bool = True) -> Optimizer:
    """Return the optimizer that `config` describes, over these groups.

    Each of its groups has `param_names`, and `initial_lr`: the rate that schedules scale. `in_place`: the tensors keep
    their memory addresses, which a kernel may then cache.
    """
    if not isinstance(config, CustomOptim) and not config.elementwise:
        _check_rows(config, groups)
    bare = inspect.unwrap(Optimizer.add_param_group)
    with replaced(Optimizer, "add_param_group", bare):  # [Note: dynamo is loaded late]
        if isinstance(config, CustomOptim):
            optimizer = build_custom_optimizer(config, groups)
        else:
            optimizer = build(config, "optim", OptimizerParams(groups, in_place))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _check_rows(config: OptimConfig, groups: Sequence[OptimizerGroup]) -> None:
    """Raise `ConfigError` for shardings that LAMB, Adafactor or Muon do not support.

    See [Note: what an optimizer may be given].
    """
    if not any(is_sharded(tensor) for group in groups for tensor in group.tensors):
        return
    from plait.optim.full_params import row_sharding

    for group in groups:
        if group.options.get("algorithm") == "adamw":
            continue  # Muon's groups that AdamW updates elementwise
        for name, tensor in zip(group.names, group.tensors, strict=True):
            try:
                row_sharding(tensor)
            except ModelError as error:
                message = (
                    f"{config.type} supports whole parameters or shards of rows, but the layout shards {name} otherwise"
                )
                remedy = "Use AdamW, Adam, Lion, SGD or Adagrad, or leave out `strategy.layout.tp` (and `ep`)."
                raise ConfigError(Problem("optim.type", message, remedy)) from error


def is_one_pass(config: OptimConfig, tensors: Iterable[Tensor]) -> bool:
    """Whether the optimizer will be `OnePassAdam`: its kernel also rounds weights, and reads gradients of any dtype."""
    if not isinstance(config, AdamWConfig | AdamConfig) or config.amsgrad:
        return False
    if config.implementation == "auto":
        return all(supports_one_pass(tensor) and has_kernels(tensor) for tensor in tensors)
    return config.implementation == "one-pass"


def adam(given: OptimizerParams, config: AdamWConfig | AdamConfig) -> Optimizer:
    """Return Adam or AdamW: torch's, or `OnePassAdam`."""
    if given.in_place and is_one_pass(config, given.tensors):
        return _in_one_pass(given, config)
    chosen = _implementation(config, given)
    optimizer_class = AdamW if isinstance(config, AdamWConfig) else Adam
    return optimizer_class(
        given.params,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        eps=config.eps,
        amsgrad=config.amsgrad,
        **chosen,
    )


def _in_one_pass(given: OptimizerParams, config: AdamWConfig | AdamConfig) -> Optimizer:
    misfit = next((tensor for tensor in given.tensors if not supports_one_pass(tensor)), None)
    if misfit is not None:
        raise ConfigError(
            Problem(
                "optim.implementation",
                f"'one-pass' does not support {str(misfit.dtype).removeprefix('torch.')} parameters with strides "
                f"{misfit.stride()}",
                "Use 'auto', which takes the fastest available.",
            )
        )
    decoupled = isinstance(config, AdamWConfig)
    return OnePassAdam(given.params, config.lr, config.betas, config.eps, config.weight_decay, decoupled=decoupled)


def sgd(given: OptimizerParams, config: SGDConfig) -> Optimizer:
    """Return torch's SGD."""
    made = SGD(
        given.params,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        **_implementation(config, given),
    )
    if config.momentum != 0:
        prepare_momentum(made)
    return made


def adagrad(given: OptimizerParams, config: AdagradConfig) -> Optimizer:
    """Return torch's Adagrad."""
    return Adagrad(
        given.params,
        lr=config.lr,
        weight_decay=config.weight_decay,
        lr_decay=config.lr_decay,
        eps=config.eps,
        **_implementation(config, given),
    )


def _implementation(
    config: AdamWConfig | AdamConfig | SGDConfig | AdagradConfig, given: OptimizerParams
) -> dict[str, bool]:
    misfit = next((t for t in given.tensors if not has_fused(config.type, t)), None)
    if config.implementation == "fused" and misfit is not None:
        raise ConfigError(
            Problem(
                "optim.implementation",
                f"'fused' {config.type} does not support {str(misfit.dtype).removeprefix('torch.')} parameters on "
                f"{misfit.device.type}",
                "Use 'auto', which takes the fastest available.",
            )
        )
    wanted = config.implementation
    if wanted == "one-pass":
        raise ConfigError(
            Problem(
                "optim.implementation",
                "'one-pass' supports neither amsgrad nor offloaded parameters",
                "Use 'auto', which takes the fastest available.",
            )
        )
    if wanted == "auto":
        wanted = "fused" if misfit is None else "foreach"
    return {"fused": wanted == "fused", "foreach": wanted == "foreach"}


def has_fused(name: str, tensor: Tensor) -> bool:
    """Whether torch has a correct fused step of this optimizer for a tensor."""
    if tensor.device.type not in _FUSED_DEVICES[name] or not tensor.is_floating_point():
        return False
    # torch 2.13's fused SGD on CPU gives wrong updates for 16-bit tensors of 16 or more elements.
    return not (name == "SGD" and tensor.device.type == "cpu" and tensor.dtype.itemsize < 4)


def prepare_momentum(optimizer: Optimizer) -> None:
    """Initialize the momentum of every parameter of an SGD with zeros."""
    # Fused SGD allocates its buffers uninitialized in the first step, and leaves them so if that step is skipped for an
    # overflow. Starting from zeros gives the same first step, and is safe.
    for tensor in (t for group in optimizer.param_groups for t in group["params"]):
        optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
