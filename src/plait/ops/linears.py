"""Linear layers that share an input, as one step of the backward pass.

[Note: one input, several layers] Each layer sends a gradient back to the input, and autograd adds them up: a pass over
memory for each layer but one. Here the first product makes the gradient of the input, and the others add to it while
they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plait.fake_tensors import class_of
from plait.torch_internals import any_global_hook, compiled_call, is_hooked


def is_plain(layer: nn.Module) -> bool:
    """Whether all that calling a layer does is multiply with its weight: no bias, no hooks, no other kind of weight."""
    return type(layer) is nn.Linear and layer.bias is None and is_untouched(layer)


def is_untouched(layer: nn.Linear) -> bool:
    """Whether calling a layer is the `forward` of its class with a weight of the usual kind, and nothing beside."""
    changed = "forward" in vars(layer) or compiled_call(layer) is not None
    watched = is_hooked(layer) or changed or any_global_hook()
    return class_of(layer.weight) in (nn.Parameter, Tensor) and not watched


def through_all(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """What each layer makes of `x`. Plain ones are taken together; otherwise each is called."""
    if all(map(is_plain, layers)):
        return linears(x, *(layer.weight for layer in layers))  # type: ignore[arg-type]
    return [layer(x) for layer in layers]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`F.linear(x, weight)` for each weight; see [Note: one input, several layers]."""
    outputs: tuple[Tensor, ...] = _Linears.apply(*as_autocast_would(x, *weights))  # type: ignore[no-untyped-call]
    return outputs


def linears_plain(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The plain twin."""
    return tuple(F.linear(x, weight) for weight in weights)


def as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The factors of a matrix product, in the format that autocast chooses where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


class _Linears(torch.autograd.Function):
    """Keeps the input where a weight learns, and the weights where the input has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        back, *learning = ctx.needs_input_grad
        ctx.save_for_backward(x if any(learning) else None, *(weight if back else None for weight in weights))
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.device = x.shape, x.device.type
        return linears_plain(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        back, *learning = ctx.needs_input_grad
        flat = [None if grad is None else rows_of(grad) for grad in grads]
        grad_x: Tensor | None = None
        # The formats were chosen in the forward pass.
        with torch.autocast(ctx.device, enabled=False):
            for grad, weight in zip(flat, weights, strict=True):
                if back and grad is not None:
                    grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
            grad_weights = [
                grad.t() @ rows_of(x) if learns and grad is not None else None
                for grad, learns in zip(flat, learning, strict=True)
            ]
        return None if grad_x is None else grad_x.view(ctx.shape), *grad_weights


def rows_of(x: Tensor) -> Tensor:
    """All tokens, one below the other."""
    return x.reshape(-1, x.shape[-1])


def spoken_for(model: nn.Module) -> set[nn.Module]:
    """Layers that are not called: a module of the model, which names them in `together`, multiplies for them."""
    found: set[nn.Module] = set()
    for module in model.modules():
        for names in getattr(type(module), "together", ()):
            layers = [module.get_submodule(name) for name in names]
            found.update(layers if all(map(is_plain, layers)) else ())
    return found
