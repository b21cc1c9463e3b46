"""A gated feed-forward that keeps its two inner tensors, and not their product.

[Note: the product is made again] The last layer needs silu(gate) * up for the gradient of its weight. The backward pass
reads gate and up anyway, so it makes the product again in the same pass, over the gradient that it has just read. What
is kept of a token falls by the width of the feed-forward.

[Note: kept before multiplied] Where activations are recomputed, torch stops as soon as everything that was saved is
there again, and what a function saves is looked at when its forward ends. So what the backward pass needs is saved by
`_Inner`, before the last product, and `_Last`, which multiplies, saves nothing: the product is not recomputed. The
gradient of the output goes from one to the other along `thread`, which has the output's shape and one element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from plait.ops.linears import as_autocast_would, is_plain, rows_of, through_all
from plait.ops.swiglu import product_of, slopes_of, swiglu, swiglu_plain


def feed_forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """`down(silu(gate(x)) * up(x))`. Layers that are not plain, as `linears.is_plain` has it, are called."""
    g, u = through_all(x, (gate, up))
    if is_plain(down) and g.dtype == u.dtype:
        return gated_down(g, u, down.weight)  # type: ignore[arg-type]
    return down(swiglu(g, u))  # type: ignore[no-any-return]


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(silu(gate) * up, weight)`, of tensors of one format; keeps its arguments only."""
    gate, up, weight = as_autocast_would(gate.contiguous(), up.contiguous(), weight)
    thread, product = _Inner.apply(gate, up, weight)  # type: ignore[no-untyped-call]
    out: Tensor = _Last.apply(thread, product, weight.detach())  # type: ignore[no-untyped-call]
    return out


def gated_down_plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """The plain twin."""
    return F.linear(swiglu_plain(gate, up), weight)


class _Inner(torch.autograd.Function):
    """The middle; its backward is that of the whole. See [Note: kept before multiplied]."""

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
        with torch.autocast(grad.device.type, enabled=False):  # the formats were chosen in the forward pass
            if inside:
                grad_gate, grad_up, product = slopes_of(gate, up, (rows @ weight).view(gate.shape), again=learns)
            if learns:
                grad_weight = rows.t() @ rows_of(product_of(gate, up) if product is None else product)
        return grad_gate, grad_up, grad_weight


class _Last(torch.autograd.Function):
    """The last product; hands its gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, thread: Tensor, product: Tensor, weight: Tensor) -> Tensor:
        return F.linear(product, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None
