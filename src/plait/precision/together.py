"""Layers that are computed together, in the number format that they have; see `ops.linears`, `ops.gated`, `ops.fp8`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from plait.ops import feed_forward as feed_forward_plain
from plait.ops import is_plain
from plait.ops import spoken_for as spoken_for_plain
from plait.ops import through_all as through_plain
from plait.precision.fp8 import are_fp8, feed_forward_fp8, through_fp8


def go_together(layers: Sequence[nn.Module]) -> bool:
    """Whether layers that share an input are computed together; otherwise each is called."""
    return all(map(is_plain, layers)) or are_fp8(layers)


def through_all(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """What each layer makes of `x`."""
    return through_fp8(x, layers) if are_fp8(layers) else through_plain(x, layers)


def feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """`down(silu(gate(x)) * up(x))`."""
    layers = gate, up, down
    return feed_forward_fp8(x, *layers) if are_fp8(layers) else feed_forward_plain(x, gate, up, down)


def spoken_for(model: nn.Module) -> set[nn.Module]:
    """Layers that are not called: a module of the model, which names them in `together`, multiplies for them."""
    found = spoken_for_plain(model)
    for module in model.modules():
        layers = [module.get_submodule(name) for names in getattr(type(module), "together", ()) for name in names]
        if are_fp8(layers):
            found.update(layers)
    return found
