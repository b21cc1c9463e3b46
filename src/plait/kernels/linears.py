"""Linear layers that share an input, and a gated feed-forward, each as one autograd function.

[Note: one input, several layers] Each layer contributes to the gradient of the input, and autograd adds these up: a
pass over memory for each layer but one. Here the first product creates the gradient, and the others accumulate into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plait.fake_tensors import class_of
from plait.kernels.swiglu import product_of, slopes_of, swiglu, swiglu_plain
from plait.torch_internals import any_global_hook, compiled_call, is_hooked


def is_plain(layer: nn.Module) -> bool:
    """Whether calling a layer only multiplies with its weight: no bias, no hooks, no tensor subclass as weight."""
    return type(layer) is nn.Linear and layer.bias is None and is_untouched(layer)


def is_untouched(layer: nn.Linear) -> bool:
    """Whether calling a layer is the `forward` of its class alone (no hooks, not compiled), with a plain weight."""
    changed = "forward" in vars(layer) or compiled_call(layer) is not None
    watched = is_hooked(layer) or changed or any_global_hook()
    return class_of(layer.weight) in (nn.Parameter, Tensor) and not watched


def apply_linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Apply each layer to `x`: in one autograd function if all are plain, else by calling each."""
    if all(map(is_plain, layers)):
        return linears(x, *(layer.weight for layer in layers))  # type: ignore[arg-type]
    return [layer(x) for layer in layers]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`F.linear(x, weight)` for each weight; see [Note: one input, several layers]."""
    outputs: tuple[Tensor, ...] = _SharedInputLinears.apply(*as_autocast_would(x, *weights))  # type: ignore[no-untyped-call]
    return outputs


def linears_plain(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`linears` in torch operations."""
    return tuple(F.linear(x, weight) for weight in weights)


def as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a matrix product, in autocast's dtype where autocast is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class _SharedInputLinears(torch.autograd.Function):
    """Saves the input where a weight is trainable, and the weights where the input needs a gradient."""

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
        # The dtypes were chosen in the forward pass.
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
    """All tokens as rows of one matrix."""
    return x.reshape(-1, x.shape[-1])


def bypassed_layers(model: nn.Module) -> set[nn.Module]:
    """The layers whose `forward` is not called, because their parent, which lists them in `together`, multiplies."""
    bypassed: set[nn.Module] = set()
    for module in model.modules():
        for names in getattr(type(module), "together", ()):
            layers = [module.get_submodule(name) for name in names]
            bypassed.update(layers if all(map(is_plain, layers)) else ())
    return bypassed


# A gated feed-forward that saves gate and up, and not their product.
#
# [Note: the product is computed again] The last layer needs silu(gate) * up for the gradient of its weight. The
# backward pass reads gate and up anyway, so it computes the product again in the same pass, in the memory of the
# gradient that it has just read. Saved activations shrink by the width of the feed-forward per token.
#
# [Note: saved before multiplied] When torch recomputes activations, it stops as soon as all saved tensors are there
# again, and it sees what a function saves when its forward ends. So what the backward pass needs is saved by
# `_GatedInner`, before the last product, and `_GatedLast`, which multiplies, saves nothing: the product is not
# recomputed. The gradient of the output flows from one to the other along `thread`, an expanded tensor of one element.


def feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """`down(silu(gate(x)) * up(x))`; layers that are not `is_plain` are called."""
    g, u = apply_linears(x, (gate, up))
    if is_plain(down) and g.dtype == u.dtype:
        return gated_down(g, u, down.weight)  # type: ignore[arg-type]
    return down(swiglu(g, u))  # type: ignore[no-any-return]


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(silu(gate) * up, weight)`, of tensors of one dtype; saves its arguments only."""
    gate, up, weight = as_autocast_would(gate.contiguous(), up.contiguous(), weight)
    thread, product = _GatedInner.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    out: Tensor = _GatedLast.apply(thread, product, weight.detach())  # type: ignore[no-untyped-call]
    return out


def gated_down_plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`gated_down` in torch operations."""
    return F.linear(swiglu_plain(gate, up), weight)


class _GatedInner(torch.autograd.Function):
    """silu(gate) * up; its backward is that of `gated_down`. See [Note: saved before multiplied]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gate, up, weight if any(ctx.needs_input_grad[:2]) else None)
        ctx.set_materialize_grads(False)
        product = product_of(gate, up)
        ctx.mark_non_differentiable(product)
        return gate.new_empty(()).expand(*gate.shape[:-1], len(weight)), product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if grad is None:
            return None, None, None
        gate, up, weight = ctx.saved_tensors
        inside, learns = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        grad_gate = grad_up = grad_weight = product = None
        rows = rows_of(grad)
        with torch.autocast(grad.device.type, enabled=False):  # the dtypes were chosen in the forward pass
            if inside:
                grad_gate, grad_up, product = slopes_of(gate, up, (rows @ weight).view(gate.shape), again=learns)
            if learns:
                grad_weight = rows.t() @ rows_of(product_of(gate, up) if product is None else product)
        return grad_gate, grad_up, grad_weight


class _GatedLast(torch.autograd.Function):
    """The last product; passes its gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, thread: Tensor, product: Tensor, weight: Tensor) -> Tensor:
        return F.linear(product, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
