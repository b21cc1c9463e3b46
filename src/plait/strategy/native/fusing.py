"""Which of a model's layers are exchanged for others that do the same faster, and saying so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from plait.config import RunConfig
from plait.ops import has_kernels
from plait.parallel import Unit, compiling
from plait.precision import Fp8Linear, apply_fp8
from plait.spec import Note
from plait.strategy.native.forward import Say


def use_fp8(
    module: nn.Module, units: Sequence[Unit], config: RunConfig, device: torch.device, say: Say
) -> dict[str, Fp8Linear]:
    """Let linear layers multiply in 8 bits where `precision.fp8` wants that; see `precision.fp8`. Returns them."""
    wanted = config.precision.fp8
    layers = apply_fp8([(unit.name, unit.module) for unit in units] or [("", module)], wanted, device)
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


def use_fp8_at_the_head(module: nn.Module, config: RunConfig) -> None:
    """Let the head compute its gradients in 8 bits where `precision.fp8.head` wants that; the model is whole yet."""
    wanted, compiler = config.precision.fp8, config.strategy.compile
    if not wanted.head:
        return
    from plait.models import use_fp8_head  # which loads `models.hf`

    use_fp8_head(module, emulated=wanted.emulate, traced=compiler.enabled and compiler.scope == "model")


def use_kernels(module: nn.Module, config: RunConfig, device: torch.device, say: Say) -> None:
    """Take kernels where `strategy.kernels` wants them and there are some; see `models.fused`."""
    strategy = config.strategy
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
