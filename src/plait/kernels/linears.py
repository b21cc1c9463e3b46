"""Linear layers that share an input, and a gated feed-forward, each as one autograd function.

[Note: one input, several layers] The input's gradient is a sum with one term per layer. Autograd computes each term as
a tensor and adds them in separate kernels. Here the first matrix multiplication creates the gradient, and the others
accumulate into it (`addmm_`), which saves these additions.
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
    """Whether calling a layer only multiplies by its weight: no bias, no hooks, no tensor subclass as weight."""
    return type(layer) is nn.Linear and layer.bias is None and is_untouched(layer)


def is_untouched(layer: nn.Linear) -> bool:
    """Whether calling a layer runs only the `forward` of its class (no hooks, not compiled), with a plain weight."""
    changed = "forward" in vars(layer) or compiled_call(layer) is not None
    watched = is_hooked(layer) or changed or any_global_hook()
    return class_of(layer.weight) in (nn.Parameter, Tensor) and not watched


def apply_linears(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return the output of each layer for `x`: by one autograd function if all are `is_plain`, else by calling each."""
    if all(map(is_plain, layers)):
        return linears(x, *(layer.weight for layer in layers))  # type: ignore[arg-type]
    return [layer(x) for layer in layers]


def linears(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return `F.linear(x, weight)` for each weight; see [Note: one input, several layers]."""
    outputs: tuple[Tensor, ...] = _SharedInputLinears.apply(*as_autocast_would(x, *weights))  # type: ignore[no-untyped-call]
    return outputs


def linears_plain(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return what `linears` returns, by torch operations."""
    return tuple(F.linear(x, weight) for weight in weights)


def as_autocast_would(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of a matrix multiplication, cast to autocast's dtype where autocast is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


class _SharedInputLinears(torch.autograd.Function):
    """Linear layers of one input. Saves the input for trainable weights, the weights for the input's gradient."""

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
    """Return `x` as a matrix, with all dims but the last flattened."""
    return x.reshape(-1, x.shape[-1])


def bypassed_layers(model: nn.Module) -> set[nn.Module]:
    """Return the layers whose `forward` is not called, because their parent multiplies by their weights itself.

    Such a parent lists its layers in the class attribute `together`.
    """
    bypassed: set[nn.Module] = set()
    for module in model.modules():
        for names in getattr(type(module), "together", ()):
            layers = [module.get_submodule(name) for name in names]
            bypassed.update(layers if all(map(is_plain, layers)) else ())
    return bypassed


# A gated feed-forward. `gate` and `up` are the outputs of its first two layers; the *product* is the elementwise
# silu(gate) * up, the input of its last layer. Gate and up are saved for the backward pass, the product is not.
#
# [Note: the product is computed again] The gradient of the last layer's weight needs the product. The backward pass
# reads gate and up anyway, so the kernel that computes their gradients computes the product again, and stores it in
# the memory of the product's gradient, which it has just read. That saves one activation of the feed-forward's width
# per token.
#
# [Note: saved before multiplied] When torch recomputes activations (checkpointing), it stops as soon as all saved
# tensors are recomputed, and it learns what an autograd function saves when its forward ends. So `_GatedInner`, which
# computes the product, saves all that the backward pass needs, and `_GatedLast`, which does the last matrix
# multiplication, saves nothing: that multiplication is not recomputed. `_GatedInner` computes the whole backward pass,
# and needs the gradient of the output for it: `_GatedLast` passes it on as the gradient of `thread`, a tensor in the
# shape of the output that takes the memory of one element.


def feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """Return `down(silu(gate(x)) * up(x))`; layers that are not `is_plain` are called."""
    g, u = apply_linears(x, (gate, up))
    if is_plain(down) and g.dtype == u.dtype:
        return gated_down(g, u, down.weight)  # type: ignore[arg-type]
    return down(swiglu(g, u))  # type: ignore[no-any-return]


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return `F.linear(silu(gate) * up, weight)` for tensors of one dtype; saves only its arguments for backward."""
    gate, up, weight = as_autocast_would(gate.contiguous(), up.contiguous(), weight)
    thread, product = _GatedInner.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    out: Tensor = _GatedLast.apply(thread, product, weight.detach())  # type: ignore[no-untyped-call]
    return out


def gated_down_plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """Return what `gated_down` returns, by torch operations."""
    return F.linear(swiglu_plain(gate, up), weight)


class _GatedInner(torch.autograd.Function):
    """The product; its backward pass is that of all of `gated_down`. See [Note: saved before multiplied]."""

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
    """The last matrix multiplication. Its backward pass returns the output's gradient unchanged, for `thread`."""

    @staticmethod
    def forward(ctx: Any, thread: Tensor, product: Tensor, weight: Tensor) -> Tensor:
        return F.linear(product, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
