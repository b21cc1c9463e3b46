"""AdamW on the host: from gradients in any format to new fp32 weights and, in the same pass, new 16-bit ones.

[Note: one pass over memory] The update of an element is a few operations on 28 bytes, so memory decides how long it
takes. torch's fused kernel reads and writes each number once, but wants fp32 gradients, writes them back where they
are to be scaled, and leaves rounding the weights to a pass of its own. Here the work goes in pieces that stay in the
cache: a piece of the gradients is widened and scaled into a small buffer, the fused kernel updates the piece, and the
weights are rounded while they are still near. Nothing but the states themselves passes through memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 18
"""Elements of a piece for each thread: its gradient and weight stay in a core's own cache."""


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """What one update is made with."""

    step: int
    """Counts from 1."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """AdamW: weights decay by themselves. False is Adam: the decay is added to the gradient."""
    scale: float = 1.0
    """Gradients count multiplied by this; they are not changed."""


@torch.no_grad()
def adam_step(
    numbers: AdamNumbers,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rounded: Sequence[Tensor | None] | None = None,
) -> None:
    """Update fp32 weights and moments in place, and write each weight to its tensor in `rounded`, where it has one.

    All tensors are contiguous and on the CPU; gradients may be fp32, bf16 or fp16. Threads are torch's own.
    """
    places = rounded if rounded is not None else [None] * len(weights)
    for weight, grad, mean, square, place in zip(weights, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        assert weight.dtype == mean.dtype == square.dtype == torch.float32, "weights and moments are fp32"
        # The CPU kernel takes pieces of storage as they are, whatever the strides say.
        assert all(t.is_contiguous() for t in (weight, grad, mean, square)), "tensors are contiguous"
        if place is None and grad.dtype == torch.float32 and numbers.scale == 1.0:
            _update(numbers, weight, grad, mean, square)
        else:
            _update_in_pieces(
                numbers,
                weight.view(-1),
                grad.view(-1),
                mean.view(-1),
                square.view(-1),
                None if place is None else place.view(-1),
            )


def _update_in_pieces(
    numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, place: Tensor | None
) -> None:
    length = PIECE * torch.get_num_threads()
    is_ready = grad.dtype == torch.float32 and numbers.scale == 1.0
    buffer = torch.empty(0 if is_ready else min(length, weight.numel()), dtype=torch.float32)
    for start in range(0, weight.numel(), length):
        piece = slice(start, start + length)
        slope, new = grad[piece], weight[piece]
        if slope.dtype != torch.float32:
            slope = buffer[: new.numel()].copy_(slope)
            if numbers.scale != 1.0:
                slope.mul_(numbers.scale)
        elif numbers.scale != 1.0:
            slope = torch.mul(slope, numbers.scale, out=buffer[: new.numel()])
        _update(numbers, new, slope, mean[piece], square[piece])
        if place is not None:
            place[piece].copy_(new)


def _update(numbers: AdamNumbers, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
    kernel = torch._fused_adamw_ if numbers.decoupled else torch._fused_adam_
    kernel(
        [weight],
        [grad],
        [mean],
        [square],
        [],
        [torch.tensor(float(numbers.step))],
        lr=numbers.lr,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
    )


@torch.no_grad()
def adam_step_plain(
    numbers: AdamNumbers,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rounded: Sequence[Tensor | None] | None = None,
) -> None:
    """The plain twin of `adam_step`: the same update in any precision, on any device."""
    (beta1, beta2), step = numbers.betas, numbers.step
    places = rounded if rounded is not None else [None] * len(weights)
    for weight, grad, mean, square, place in zip(weights, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        slope = grad.to(weight.dtype) * numbers.scale
        if numbers.decoupled:
            weight.mul_(1.0 - numbers.lr * numbers.weight_decay)
        else:
            slope = slope + weight * numbers.weight_decay
        mean.lerp_(slope, 1.0 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1.0 - beta2)
        spread = (square / (1.0 - beta2**step)).sqrt_().add_(numbers.eps)
        weight.addcdiv_(mean, spread, value=-numbers.lr / (1.0 - beta1**step))
        if place is not None:
            place.copy_(weight)
