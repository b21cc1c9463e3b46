"""Linear layers of a model's blocks, made to multiply in 8 bits; see [Note: numbers in 8 bits] in `ops.fp8`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

import torch
from torch import Tensor, nn

from plait.config import Fp8Config
from plait.errors import ConfigError, ModelError, Problem
from plait.ops import AT_ONCE, MULTIPLE, Earlier, fp8_feed_forward, fp8_linears, is_untouched, swiglu
from plait.precision.earlier import EarlierScales


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits. The weight, its name and its format are those of a plain one."""

    rowwise: bool
    emulated: bool
    scales: EarlierScales | None = None
    """What is known from earlier steps; without it, scales are found at once."""
    row: int
    """This layer's number there."""

    def forward(self, x: Tensor) -> Tensor:
        """The same as the plain layer's, up to rounding."""
        return through_fp8(x, [self])[0]


def are_fp8(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[Fp8Linear]]:
    """Whether these layers multiply in 8 bits with one scale a tensor, and calling one does nothing beside."""
    return all(type(layer) is Fp8Linear and not layer.rowwise and is_untouched(layer) for layer in layers)


def through_fp8(x: Tensor, layers: Sequence[Fp8Linear]) -> tuple[Tensor, ...]:
    """What each layer makes of `x`, which is rounded once for all."""
    dtype = _format(x, layers[0])
    weights = [layer.weight.to(dtype) for layer in layers]
    biases = [None if layer.bias is None else layer.bias.to(dtype) for layer in layers]
    return fp8_linears(
        x.to(dtype),
        weights,
        biases,
        rowwise=layers[0].rowwise,
        emulated=layers[0].emulated,
        earlier=_earlier(x, layers),
    )


def feed_forward_fp8(x: Tensor, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear) -> Tensor:
    """`down(silu(gate(x)) * up(x))`, as one operation where `ops.fp8_gated` has one."""
    layers = gate, up, down
    learning = {layer.weight.requires_grad for layer in layers}
    if any(layer.bias is not None for layer in layers) or len(learning) > 1 or torch.compiler.is_compiling():
        return down(swiglu(*through_fp8(x, (gate, up))))  # type: ignore[no-any-return]
    dtype = _format(x, gate)
    weights = (layer.weight.to(dtype) for layer in layers)
    return fp8_feed_forward(x.to(dtype), *weights, emulated=gate.emulated, earlier=_earlier(x, layers))


def _earlier(x: Tensor, layers: Sequence[Fp8Linear]) -> Earlier:
    scales = layers[0].scales
    if scales is None or not layers[0].training:  # what is evaluated may be unlike what the scales are from
        return AT_ONCE
    return scales.of([layer.row for layer in layers], x)


def _format(x: Tensor, layer: Fp8Linear) -> torch.dtype:
    # Autocast decides for the plain layer; here nobody asks it.
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype


def apply_fp8(blocks: Iterable[tuple[str, nn.Module]], config: Fp8Config, device: torch.device) -> dict[str, Fp8Linear]:
    """Make linear layers inside these blocks multiply in 8 bits; returns them by name.

    Embedding and head are outside of blocks, and stay as they are; of a model without blocks, which comes under the
    name "", the last linear layer does. A layer changes its class in place, so no parameter changes its name. Layers
    whose sizes are no multiples of 16, and frozen ones, are left alone.
    """
    if config.recipe == "none":
        return {}
    if not config.emulate:
        _require(device)
    found: dict[str, nn.Linear] = {}
    for prefix, block in blocks:
        inside = [(name, module) for name, module in block.named_modules() if type(module) is nn.Linear]
        if not prefix:
            inside = inside[:-1]
        found |= {".".join(filter(None, (prefix, name))): module for name, module in inside}
    chosen = {name: module for name, module in found.items() if _wanted(name, config) and _fits(module)}
    if not chosen:
        raise ModelError(
            f"precision.fp8 found no linear layer to work on: of {len(found)} inside the blocks, none has sizes "
            f"that are multiples of {MULTIPLE} and a name that `modules` and `skip` let through. Name the blocks with "
            "strategy.wrap, or write precision: bf16"
        )
    layers: dict[str, Fp8Linear] = {}
    for name, module in chosen.items():
        module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)
        module.rowwise, module.emulated = config.recipe == "rowwise", config.emulate
        layers[name] = module
    return layers


def scale_by_earlier_steps(
    layers: Mapping[str, Fp8Linear], config: Fp8Config, device: torch.device
) -> EarlierScales | None:
    """Let layers take their scales from earlier steps, where `config` wants that; returns what has to be kept."""
    if not layers or config.scales != "earlier":
        return None
    scales = EarlierScales(list(layers), history=config.history, headroom=config.headroom, device=device)
    for row, layer in enumerate(layers.values()):
        layer.scales, layer.row = scales, row
    return scales


def _wanted(name: str, config: Fp8Config) -> bool:
    fits = any(fnmatchcase(name, pattern) for pattern in config.modules)
    return fits and not any(fnmatchcase(name, pattern) for pattern in config.skip)


def _fits(module: nn.Linear) -> bool:
    sizes = module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
    return sizes and module.weight.requires_grad


def _require(device: torch.device) -> None:
    """Refuse a device that has no products of 8-bit numbers."""
    if device.type != "cuda":
        reason = f"{device.type} has none"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        reason = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and they begin with 8.9"
    else:
        return
    raise ConfigError(
        Problem(
            "precision.fp8",
            f"8-bit matrix products need a GPU that has them: {reason}",
            "Write `precision: bf16`; or `precision.fp8.emulate: true`, to see what the rounding does, slowly.",
        )
    )
