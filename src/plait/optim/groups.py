"""Split a model's parameters into groups: with and without weight decay, updated by Muon or AdamW, by learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from plait.config import MuonConfig, OptimConfig
from plait.errors import ConfigError, ModelError, Problem


class Role(Flag):
    """What kind of module a parameter belongs to. A tied parameter has the roles of all its modules."""

    PLAIN = 0
    NORM = auto()
    EMBEDDING = auto()
    CONVOLUTION = auto()


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """The properties of a parameter by which it is grouped; the same before and after sharding."""

    name: str
    """The name in `named_parameters`; for a tied parameter, the first of its names."""
    shape: torch.Size
    """The global shape."""
    role: Role = Role.PLAIN
    aliases: tuple[str, ...] = ()
    """The other names of a tied parameter."""
    trainable: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """`name`, followed by `aliases`."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The parameters of one group, and the options in which it differs from the optimizer's defaults."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A group of parameters, as the tensors that the optimizer gets; see `ParamForm` in `optim.base`.

    For an elementwise optimizer, this rank's shards as plain tensors, which may be empty; for others, DTensors, or the
    full parameters that this rank updates.
    """

    names: Sequence[str]
    tensors: Sequence[Tensor]
    options: dict[str, Any] = field(default_factory=dict)


def parameter_infos(model: nn.Module) -> list[ParameterInfo]:
    """Return the properties of all parameters in the order of `named_parameters`; a tied parameter occurs once."""
    names: dict[nn.Parameter, list[str]] = {}
    roles: dict[nn.Parameter, Role] = {}
    for path, module in model.named_modules():
        role = _role(module)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{path}.{key}" if path else key)
            roles[parameter] = roles.get(parameter, Role.PLAIN) | role
    return [
        ParameterInfo(first, parameter.shape, roles[parameter], tuple(others), parameter.requires_grad)
        for parameter, (first, *others) in names.items()
    ]


def split_groups(model: nn.Module, config: OptimConfig) -> list[GroupSpec]:
    """Return the parameter groups of a model: each trainable parameter is in exactly one.

    The result is the same before and after sharding. Raises `ConfigError` for a pattern of `optim.no_decay` that
    matches no parameter, trainable or not: it is most likely misspelt. A model may have an attribute `learning_rates`,
    name patterns → learning rates of these parameters; schedules scale them like `optim.lr`.
    """
    rates: Mapping[str, float] = getattr(model, "learning_rates", {})
    return [group for spec in _groups(model, config) for group in _by_rate(spec, rates)]


def _by_rate(spec: GroupSpec, rates: Mapping[str, float]) -> list[GroupSpec]:
    """Split a group further if some of its parameters have their own learning rate."""
    by_rate: dict[float | None, list[str]] = {}
    for name in spec.names:
        group_rate = next((rate for pattern, rate in rates.items() if fnmatchcase(name, pattern)), None)
        by_rate.setdefault(group_rate, []).append(name)
    return [
        GroupSpec(tuple(names), spec.options if rate is None else {**spec.options, "lr": rate})
        for rate, names in by_rate.items()
    ]


def _groups(model: nn.Module, config: OptimConfig) -> list[GroupSpec]:
    infos = parameter_infos(model)
    without_decay = _without_decay(infos, config.no_decay)
    trainable = [info for info in infos if info.trainable]
    if not trainable:
        raise ModelError("the model has no trainable parameter: every one has requires_grad=False")
    if not isinstance(config, MuonConfig):
        return _by_decay(trainable, without_decay, config, {})
    matrices = [info for info in trainable if _for_muon(info, config.adam_patterns)]
    if not matrices:
        raise ConfigError(
            Problem(
                "optim.adam_patterns",
                f"{list(config.adam_patterns)} leave no matrix of this model for Muon",
                "Match fewer matrices, or use `type: AdamW`.",
            )
        )
    muon, adam = {"algorithm": "muon", "lr": config.lr}, {"algorithm": "adamw", "lr": config.adam_lr}
    chosen = {info.name for info in matrices}
    rest = [info for info in trainable if info.name not in chosen]
    return [
        *_by_decay(matrices, without_decay, config, muon),
        *_by_decay(rest, without_decay, config, adam),
    ]


def _by_decay(
    infos: Sequence[ParameterInfo], without_decay: set[str], config: OptimConfig, options: dict[str, Any]
) -> list[GroupSpec]:
    decay_options = {} if config.weight_decay is None else {"weight_decay": config.weight_decay}
    # The weight decay of a user-provided optimizer applies to all parameters unless `no_decay` is set.
    if config.weight_decay == 0.0 or (not decay_options and "no_decay" not in config.model_fields_set):
        without_decay = set()
    decayed = tuple(info.name for info in infos if info.name not in without_decay)
    others = tuple(info.name for info in infos if info.name in without_decay)
    groups = [
        GroupSpec(decayed, {**options, **decay_options}),
        GroupSpec(others, {**options, "weight_decay": 0.0}),
    ]
    return [group for group in groups if group.names]


_NO_DECAY_CLASSES: dict[str, Callable[[ParameterInfo], bool]] = {
    "bias": lambda info: any(name.rpartition(".")[2] == "bias" for name in info.names),
    "norm": lambda info: Role.NORM in info.role,
    "embedding": lambda info: Role.EMBEDDING in info.role,
}


def _without_decay(infos: Sequence[ParameterInfo], patterns: Sequence[str]) -> set[str]:
    names: set[str] = set()
    problems = []
    for pattern in patterns:
        predicate = _NO_DECAY_CLASSES.get(pattern)
        matches = {info.name for info in infos if (predicate(info) if predicate else _matches(info, (pattern,)))}
        names |= matches
        if not matches and predicate is None:
            problems.append(
                Problem(
                    "optim.no_decay",
                    f"the pattern {pattern!r} matches no parameter of this model",
                    f"Use {', '.join(_NO_DECAY_CLASSES)}, or a pattern of full names such as {infos[0].name!r}."
                    if infos
                    else "",
                )
            )
    if problems:
        raise ConfigError(problems)
    return names


def _for_muon(info: ParameterInfo, adam_patterns: Sequence[str]) -> bool:
    # Other parameters of three or more dims (stacked expert weights) are updated by AdamW: Muon would flatten the
    # stack, and orthogonalize it as one matrix.
    is_matrix = len(info.shape) == 2 or (len(info.shape) > 2 and Role.CONVOLUTION in info.role)
    special = Role.NORM in info.role or Role.EMBEDDING in info.role
    return is_matrix and not special and not _matches(info, adam_patterns)


def _matches(info: ParameterInfo, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in info.names for pattern in patterns)


_NORM_NAME = re.compile(r"Norm([123]d)?$")


def _role(module: nn.Module) -> Role:
    # `fully_shard` derives a class from a module's class, so all base classes are checked.
    if any(_NORM_NAME.search(ancestor.__name__) for ancestor in type(module).__mro__):
        return Role.NORM
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Role.EMBEDDING
    if isinstance(
        module,
        nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
    ):
        return Role.CONVOLUTION
    return Role.PLAIN
