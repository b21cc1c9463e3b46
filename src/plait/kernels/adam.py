"""AdamW on the host: from gradients in any format to new fp32 weights and, in the same pass, new 16-bit ones.

[Note: one pass over memory] The update of an element is a few operations on 28 bytes, so memory decides how long it
takes. torch's fused kernel reads and writes each number once, but wants fp32 gradients, and leaves rounding the weights
to a pass of its own. Here the work goes in pieces that stay in the cache: a piece of the gradients is widened into a
small buffer, the fused kernel updates the piece, and the weights are rounded while they are still near. Nothing but the
states themselves passes through memory twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.torch_internals import fused_adam_, fused_adamw_

# Threads for work on host memory that is cut into pieces.
#
# [Note: no barriers] torch splits each operation over its threads and waits for all of them at its end. For long
# operations that is right. For many short ones, on a machine whose cores have other work too, every wait lasts as long
# as the one thread that was set aside by the system. A crew's threads take piece after piece, each with all operations
# of its piece, and wait for nobody before the end.


class ThreadPool:
    """A few threads, in each of which torch works on one core."""

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._pool = ThreadPoolExecutor(threads, initializer=_work_alone)
        ready = threading.Barrier(threads)
        usual = torch.get_num_threads()
        wait([self._pool.submit(ready.wait) for _ in range(threads)])
        # What a thread says about itself, torch also takes as the wish for threads to come: they get the usual number.
        torch.set_num_threads(usual)

    def share(self, count: int, work: Callable[[Iterator[int]], None]) -> None:
        """Let every thread run `work` over the numbers below `count`; each number is given out once."""
        numbers = iter(range(count))
        done = [self._pool.submit(work, numbers) for _ in range(min(count, self._size))]
        wait(done)
        for each in done:
            each.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _work_alone() -> None:
    torch.get_num_threads()  # a thread takes up the usual number when it first asks, so it must have asked before
    torch.set_num_threads(1)


_Update = Callable[[Tensor, Tensor, Tensor, Tensor], None]

PIECE = 1 << 19
"""Elements of a piece for each thread: small enough for the cache, large enough to be worth a call."""


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
    """Gradients count multiplied by this; the fused kernel overwrites fp32 ones with the product."""


@torch.no_grad()
def adam_step(
    numbers: AdamNumbers,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rounded: Sequence[Tensor | None] | None = None,
    *,
    crew: ThreadPool | None = None,
) -> None:
    """Update fp32 weights and moments in place, and write each weight to its tensor in `rounded`, where it has one.

    All tensors are contiguous and on the CPU; gradients may be fp32, bf16 or fp16. The pieces are shared out to the
    threads of `crew`; without one, torch's own threads work on one piece after another.
    """
    places = rounded if rounded is not None else [None] * len(weights)
    update = _kernel(numbers)
    for weight, grad, mean, square, place in zip(weights, grads, exp_avgs, exp_avg_sqs, places, strict=True):
        assert weight.dtype == mean.dtype == square.dtype == torch.float32, "weights and moments are fp32"
        # The CPU kernel takes pieces of storage as they are, whatever the strides say.
        assert all(t.is_contiguous() for t in (weight, grad, mean, square)), "tensors are contiguous"
        if place is None and grad.dtype == torch.float32:
            update(weight, grad, mean, square)
        else:
            _update_in_pieces(update, (weight, grad, mean, square), place, crew)


def _update_in_pieces(
    update: _Update, tensors: Sequence[Tensor], place: Tensor | None, crew: ThreadPool | None
) -> None:
    length = PIECE if crew is not None else PIECE * torch.get_num_threads()
    weights, grads, means, squares = (torch.split(tensor.view(-1), length) for tensor in tensors)
    rooms = [None] * len(weights) if place is None else torch.split(place.view(-1), length)
    widens = tensors[1].dtype != torch.float32

    @torch.no_grad()
    def work(pieces: Iterator[int]) -> None:
        buffer = torch.empty(len(weights[0]) if widens else 0)
        for at in pieces:
            weight, room = weights[at], rooms[at]
            update(weight, buffer[: len(weight)].copy_(grads[at]) if widens else grads[at], means[at], squares[at])
            if room is not None:
                room.copy_(weight)

    if crew is None or len(weights) == 1:
        work(iter(range(len(weights))))
    else:
        crew.share(len(weights), work)


def _kernel(numbers: AdamNumbers) -> _Update:
    """torch's fused update of one weight, given its gradient and moments."""
    fused = fused_adamw_ if numbers.decoupled else fused_adam_
    steps = [torch.tensor(float(numbers.step))]
    # The kernel divides: by the same number as an optimizer of torch would be given for these gradients.
    scale = None if numbers.scale == 1.0 else torch.tensor(1.0 / numbers.scale)
    options: dict[str, Any] = {
        "lr": numbers.lr,
        "beta1": numbers.betas[0],
        "beta2": numbers.betas[1],
        "weight_decay": numbers.weight_decay,
        "eps": numbers.eps,
        "amsgrad": False,
        "maximize": False,
        "grad_scale": scale,
    }

    def update(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        fused([weight], [grad], [mean], [square], [], steps, **options)

    return update


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
