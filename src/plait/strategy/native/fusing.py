"""Which of a model's layers are exchanged for others that do the same faster, and saying so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from plait.config import RunConfig
from plait.errors import ConfigError, Problem
from plait.ops import has_kernels
from plait.parallel import Unit, compiling
from plait.plugins import build, call, load
from plait.precision import Fp8Linear
from plait.spec import Note
from plait.strategy.preparation import Preparation


def use_fp8(given: Preparation, module: nn.Module, units: Sequence[Unit]) -> dict[str, Fp8Linear]:
    """Let linear layers multiply in 8 bits where `precision.fp8` wants that; see `precision.fp8`. Returns them."""
    config, device, say = given.config, given.device, given.say
    wanted = config.precision.fp8
    layers: dict[str, Fp8Linear] = build(wanted, "precision.fp8", _blocks(module, units), device=device)
    if not layers:
        return {}
    head = ", and so does the head in its backward pass" if wanted.head else ""
    say(Note(f"fp8 ({wanted.recipe}): {len(layers)} linear layers multiply in 8 bits{head}, the rest is bf16"))
    if config.strategy.compile.enabled or wanted.emulate:
        return layers
    slow = "finding scales and rounding take more time than the products save"
    if wanted.recipe == "rowwise":
        say(f"fp8 (rowwise) without strategy.compile: {slow}")
    elif not has_kernels(torch.empty(0, device=device)):
        say(f"fp8 without the package triton and without strategy.compile: {slow}")
    return layers


class PrecisionRecipe(Protocol):
    """What `precision.recipe` may name."""

    tensor_parallel: bool
    """Whether it can exchange layers that ranks share (`strategy.layout.tp`). Absent: no."""

    def __call__(self, blocks: Sequence[tuple[str, nn.Module]], *, device: torch.device) -> Iterable[str]:
        """Exchange layers inside these blocks, in place, before anything has values; returns their names.

        Parameters keep their names, shapes and formats: layers may change their class or their `forward`.
        """


def use_recipe(given: Preparation, module: nn.Module, units: Sequence[Unit]) -> None:
    """Let a recipe of the user's own exchange layers, where `precision.recipe` names one."""
    config, part, key = given.config, given.config.precision.recipe, "precision.recipe"
    if part is None:
        return
    recipe = load(part, key)
    if config.strategy.layout.tp > 1 and not getattr(recipe, "tensor_parallel", False):
        message = f"{str(part)!r} does not say that it can work on layers that ranks share (`tensor_parallel = True`)"
        raise ConfigError(Problem(key, message, "Write `strategy.layout.tp: 1`, or let it say so."))
    before = dict(module.named_parameters())
    blocks = _blocks(module, units)
    names = call(recipe, key, blocks, name=str(part), arguments=part.arguments, device=given.device)
    after = dict(module.named_parameters())
    if changed := [name for name in before if after.get(name) is not before[name]] or list(after.keys() - before):
        message = f"{str(part)!r} changed the parameter {changed[0]!r}"
        raise ConfigError(Problem(key, message, "Keep parameters, and their names: a checkpoint knows them by these."))
    if isinstance(names, str) or not isinstance(names, Iterable) or not (count := len(list(names))):
        message = f"{str(part)!r} returned no names of layers that it exchanged"
        raise ConfigError(Problem(key, message, "Return their names, or leave the recipe out."))
    given.say(Note(f"precision.recipe: {part} exchanged {count} layers"))


def _blocks(module: nn.Module, units: Sequence[Unit]) -> list[tuple[str, nn.Module]]:
    return [(unit.name, unit.module) for unit in units] or [("", module)]


def use_fp8_at_the_head(module: nn.Module, config: RunConfig) -> None:
    """Let the head compute its gradients in 8 bits where `precision.fp8.head` wants that; the model is whole yet."""
    wanted, compiler = config.precision.fp8, config.strategy.compile
    if not wanted.head:
        return
    from plait.models import use_fp8_head  # which loads `models.hf`

    use_fp8_head(module, emulated=wanted.emulate, traced=compiler.enabled and compiler.scope == "model")


def use_kernels(given: Preparation, module: nn.Module) -> None:
    """Take kernels where `strategy.kernels` wants them and there are some; see `models.fused`."""
    strategy, device, say = given.config.strategy, given.device, given.say
    compiled = strategy.compile.enabled and compiling.why_not(strategy.compile, device) is None
    if strategy.kernels == "plain" or device.type != "cuda" or compiled or strategy.layout.tp > 1:
        return
    if not has_kernels(torch.empty(0, device=device)):
        say("strategy.kernels: the package triton is not installed, so norms, gates and rotations stay plain")
        return
    from plait.models import fuse  # which loads all models

    counts = fuse(module)
    if counts:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        say(Note(f"strategy.kernels: fused kernels for {found}"))
