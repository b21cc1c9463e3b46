"""Linear layers of a model's blocks, made to multiply in 8 bits; see [Note: numbers in 8 bits] in `ops.fp8`."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from plait.config.precision import Fp8Config
from plait.errors import ConfigError, ModelError, Problem
from plait.ops.fp8 import MULTIPLE, fp8_linear


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits. The weight, its name and its format are those of a plain one."""

    rowwise: bool
    emulated: bool

    def forward(self, x: Tensor) -> Tensor:
        """The same as the plain layer's, up to rounding."""
        # Autocast decides for the plain layer; here nobody asks it.
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return fp8_linear(x.to(dtype), self.weight.to(dtype), bias, rowwise=self.rowwise, emulated=self.emulated)


def apply_fp8(blocks: Iterable[tuple[str, nn.Module]], config: Fp8Config, device: torch.device) -> list[str]:
    """Make linear layers inside these blocks multiply in 8 bits; returns their names.

    Embedding and head are outside of blocks, and stay as they are; of a model without blocks, which comes under the
    name "", the last linear layer does. A layer changes its class in place, so no parameter changes its name. Layers
    whose sizes are no multiples of 16, and frozen ones, are left alone.
    """
    if config.recipe == "none":
        return []
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
    for module in chosen.values():
        module.__class__ = Fp8Linear
        assert isinstance(module, Fp8Linear)
        module.rowwise, module.emulated = config.recipe == "rowwise", config.emulate
    return list(chosen)


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
