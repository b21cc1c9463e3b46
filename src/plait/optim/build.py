"""From a configuration and parameter groups to an optimizer.

[Note: dynamo is loaded late] torch loads its compiler when a function is called that is not to be compiled, in order
to tell it so. One of them is `Optimizer.add_param_group`, which every optimizer calls as it is made; and the compiler
takes as long to load as half of torch. A run that compiles nothing does without: here the function itself is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from plait.config import (
    AdafactorConfig,
    AdagradConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimConfig,
    SGDConfig,
)
from plait.errors import ConfigError, ModelError, Problem
from plait.ops import has_kernels
from plait.optim.lion import Lion
from plait.optim.one_pass import OnePassAdam, takes_one_pass
from plait.world import is_sharded, replaced

_ELEMENTWISE = (AdamWConfig, AdamConfig, AdamW8bitConfig, SGDConfig, AdagradConfig, LionConfig)
# Where fused steps are known to exist in every supported torch, and to honour `grad_scale` and `found_inf`.
_FUSED_DEVICES = {
    "AdamW": ("cpu", "cuda"),
    "Adam": ("cpu", "cuda"),
    "SGD": ("cpu", "cuda"),
    "Adagrad": ("cpu",),
}


@dataclass(frozen=True, slots=True)
class ViewGroup:
    """A group of parameters as the optimizer sees them.

    For an elementwise optimizer a view is a plain tensor, this rank's shard, perhaps empty; for the others
    it is the parameter itself.
    """

    names: Sequence[str]
    tensors: Sequence[Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def is_elementwise(config: OptimConfig) -> bool:
    """Whether each element's update depends on that element alone, so that shards need no exchange."""
    return isinstance(config, _ELEMENTWISE)


def supports_grad_scale(optimizer: Optimizer) -> bool:
    """Whether `step` honours the attributes `grad_scale` and `found_inf`.

    With both set to scalar tensors, the fused kernels divide gradients by the one (in place) and change
    nothing where the other is 1, without the host waiting to know.
    """
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and isinstance(optimizer, AdamW | Adam | SGD | Adagrad)


def build_optimizer(config: OptimConfig, groups: Sequence[ViewGroup], *, in_place: bool = True) -> Optimizer:
    """The optimizer that `config` describes, over these groups.

    Each of its groups carries `param_names`, and `initial_lr`: the rate that schedules scale. `in_place`: the tensors
    stay where they are, so that a kernel may know them by their addresses.
    """
    if not is_elementwise(config):
        _check_rows(config, groups)
    bare = inspect.unwrap(Optimizer.add_param_group)
    with replaced(Optimizer, "add_param_group", bare):  # [Note: dynamo is loaded late]
        optimizer = _build_in_one_pass(config, groups) if in_place and is_one_pass(config, _views(groups)) else None
        optimizer = optimizer or _build(config, groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _check_rows(config: OptimConfig, groups: Sequence[ViewGroup]) -> None:
    """Refuse what an optimizer could not update, before the first step; see [Note: what an optimizer may be given]."""
    if not any(is_sharded(tensor) for tensor in _views(groups)):
        return
    from plait.optim.shards import rows_of

    for group in groups:
        if group.options.get("algorithm") == "adamw":
            continue  # those of Muon that are updated element by element
        for name, tensor in zip(group.names, group.tensors, strict=True):
            try:
                rows_of(tensor)
            except ModelError as error:
                message = (
                    f"{config.type} works on whole parameters or rows of them, but the layout cuts {name} otherwise"
                )
                remedy = "Use AdamW, Adam, Lion, SGD or Adagrad, or leave out `strategy.layout.tp` (and `ep`)."
                raise ConfigError(Problem("optim.type", message, remedy)) from error


def is_one_pass(config: OptimConfig, tensors: Iterable[Tensor]) -> bool:
    """Whether the update also rounds weights and reads gradients in any format; see `optim.one_pass`."""
    if not isinstance(config, AdamWConfig | AdamConfig) or config.amsgrad:
        return False
    if config.implementation == "auto":
        return all(takes_one_pass(tensor) and has_kernels(tensor) for tensor in tensors)
    return config.implementation == "one-pass"


def _build_in_one_pass(config: OptimConfig, groups: Sequence[ViewGroup]) -> Optimizer:
    assert isinstance(config, AdamWConfig | AdamConfig)
    misfit = next((tensor for tensor in _views(groups) if not takes_one_pass(tensor)), None)
    if misfit is not None:
        raise ConfigError(
            Problem(
                "optim.implementation",
                f"'one-pass' is not made for {str(misfit.dtype).removeprefix('torch.')} parameters that lie like "
                f"{misfit.stride()}",
                "Use 'auto', which takes the fastest there is.",
            )
        )
    return OnePassAdam(
        _params(groups),
        config.lr,
        config.betas,
        config.eps,
        config.weight_decay,
        decoupled=isinstance(config, AdamWConfig),
    )


def _params(groups: Sequence[ViewGroup]) -> list[dict[str, Any]]:
    return [{"params": list(zip(group.names, group.tensors, strict=True)), **group.options} for group in groups]


def _build(config: OptimConfig, groups: Sequence[ViewGroup]) -> Optimizer:
    params = _params(groups)
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config:
        case AdamWConfig() | AdamConfig():
            chosen = _implementation(config, groups)
            kind = AdamW if isinstance(config, AdamWConfig) else Adam
            return kind(params, betas=config.betas, eps=config.eps, amsgrad=config.amsgrad, **common, **chosen)
        case SGDConfig():
            chosen = _implementation(config, groups)
            sgd = SGD(params, momentum=config.momentum, nesterov=config.nesterov, **common, **chosen)
            if config.momentum != 0:
                prepare_momentum(sgd)
            return sgd
        case AdagradConfig():
            chosen = _implementation(config, groups)
            return Adagrad(params, lr_decay=config.lr_decay, eps=config.eps, **common, **chosen)
        case AdamW8bitConfig():
            from plait.optim.adam8bit import AdamW8bit

            return AdamW8bit(params, betas=config.betas, eps=config.eps, **common)
        case LionConfig():
            return Lion(params, betas=config.betas, **common)
        case LambConfig():
            from plait.optim.lamb import Lamb

            return Lamb(
                params,
                betas=config.betas,
                eps=config.eps,
                min_trust=config.min_trust,
                max_trust=config.max_trust,
                **common,
            )
        case AdafactorConfig():
            from plait.optim.adafactor import Adafactor

            return Adafactor(
                params,
                beta2_decay=config.beta2_decay,
                eps=config.eps,
                clip_threshold=config.clip_threshold,
                **common,
            )
        case _:
            from plait.optim.muon import Muon

            return Muon(
                params,
                momentum=config.momentum,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                betas=config.adam_betas,
                eps=config.adam_eps,
                **common,
            )


def _implementation(
    config: AdamWConfig | AdamConfig | SGDConfig | AdagradConfig, groups: Sequence[ViewGroup]
) -> dict[str, bool]:
    misfit = next((t for t in _views(groups) if not has_fused(config.type, t)), None)
    if config.implementation == "fused" and misfit is not None:
        raise ConfigError(
            Problem(
                "optim.implementation",
                f"'fused' {config.type} is not offered for {str(misfit.dtype).removeprefix('torch.')} parameters on "
                f"{misfit.device.type}",
                "Use 'auto', which takes the fastest there is.",
            )
        )
    wanted = config.implementation
    if wanted == "one-pass":
        raise ConfigError(
            Problem(
                "optim.implementation",
                "'one-pass' has no amsgrad, and does not update what is offloaded",
                "Use 'auto', which takes the fastest there is.",
            )
        )
    if wanted == "auto":
        wanted = "fused" if misfit is None else "foreach"
    return {"fused": wanted == "fused", "foreach": wanted == "foreach"}


def has_fused(kind: str, tensor: Tensor) -> bool:
    """Whether torch has a fused step of this optimizer for such a tensor, and one that is right."""
    if tensor.device.type not in _FUSED_DEVICES[kind] or not tensor.is_floating_point():
        return False
    # torch 2.13's fused SGD on CPU gives wrong updates for 16-bit tensors of 16 or more elements.
    return not (kind == "SGD" and tensor.device.type == "cpu" and tensor.dtype.itemsize < 4)


def prepare_momentum(optimizer: Optimizer) -> None:
    """Give every parameter of an SGD its momentum, of zeros."""
    # Fused SGD allocates its buffers, unfilled, in the first step, and leaves them so if that step is
    # skipped for an overflow. Starting from zeros gives the same first step, and is safe.
    for tensor in (t for group in optimizer.param_groups for t in group["params"]):
        optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)


def _views(groups: Sequence[ViewGroup]) -> Iterator[Tensor]:
    return (tensor for group in groups for tensor in group.tensors)
