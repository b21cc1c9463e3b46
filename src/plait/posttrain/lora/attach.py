"""Which layers get an adapter, and what learns afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from plait.config import LoraConfig
from plait.errors import ConfigError, Problem
from plait.posttrain.lora.layer import add_adapter, has_adapter, is_linear
from plait.posttrain.parts import Part

ALL = "linear"
"""The word for every linear layer inside the blocks."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """How large adapters are and how much they count."""

    rank: int
    alpha: float
    dropout: float = 0.0
    scaled_by_root: bool = False

    @classmethod
    def of(cls, config: LoraConfig) -> AdapterSpec:
        """As the section says."""
        return cls(config.rank, config.alpha, config.dropout, config.scaled_by_root)

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.scaled_by_root else self.rank)


def attach(model: nn.Module, spec: AdapterSpec, targets: Sequence[str]) -> list[str]:
    """Give every target an adapter; returns their names. A word that fits no linear layer is an error."""
    names = find_targets(model, targets)
    for name in names:
        add_adapter(model.get_submodule(name), rank=spec.rank, scale=spec.scale, dropout=spec.dropout)
    return names


def lora_layers(model: nn.Module) -> list[str]:
    """Names of the layers that have an adapter."""
    return [name for name, module in model.named_modules() if has_adapter(module)]


def find_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that the words mean, in the order of the model."""
    linear = [name for name, module in model.named_modules() if is_linear(module)]
    inside = _inside_blocks(model, linear)
    chosen: set[str] = set()
    problems = []
    for word in targets:
        found = inside if word == ALL else [name for name in linear if _fits(name, word)]
        chosen.update(found)
        if not found:
            known = sorted({name.rpartition(".")[2] for name in linear})
            message = f"{word!r} fits no linear layer of this model"
            problems.append(Problem("lora.targets", message, f"Last names of its layers: {', '.join(known)}."))
    for name in sorted(chosen & _tied(model)):
        message = f"{name!r} shares its matrix with another layer, which an adapter beside it would change when merged"
        problems.append(Problem("lora.targets", message, "Leave it out, or train it whole with `lora.also`."))
    if problems:
        raise ConfigError(problems)
    return [name for name in linear if name in chosen]


def freeze_others(model: nn.Module, also: Sequence[str]) -> None:
    """Let only what was added learn, and parameters whose names fit `also`."""
    own = {id(param) for part in model.modules() if isinstance(part, Part) for param in part.parameters(recurse=False)}
    problems = []
    for pattern in also:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            problems.append(Problem("lora.also", f"{pattern!r} fits no parameter of this model", "Use full names."))
    if problems:
        raise ConfigError(problems)
    for name, param in model.named_parameters():
        param.requires_grad_(id(param) in own or any(fnmatchcase(name, pattern) for pattern in also))


def _inside_blocks(model: nn.Module, linear: list[str]) -> list[str]:
    classes = getattr(model, "block_classes", ())
    blocks = [name for name, module in model.named_modules() if classes and isinstance(module, classes)]
    if blocks:
        return [name for name in linear if any(name.startswith(f"{block}.") for block in blocks)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return [name for name in linear if model.get_submodule(name) is not head]


def _tied(model: nn.Module) -> set[str]:
    """Modules whose weight is another one's too."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            owners.setdefault(id(weight), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _fits(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}") or fnmatchcase(name, word)
