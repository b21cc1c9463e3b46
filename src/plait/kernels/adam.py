"""AdamW on the CPU: gradients of any dtype in, new fp32 weights and, in the same pass, new 16-bit weights out.

[Note: one pass over memory] The update of an element is a few operations on 28 bytes, so memory bandwidth decides how
long it takes. torch's fused kernel reads and writes each number once, but it needs fp32 gradients, and rounding the
weights takes another pass. Here the work is cut into pieces that stay in the cache: a piece of the gradients is cast to
fp32 in a small buffer, the fused kernel updates the piece, and the weights are rounded while they are in the cache.
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

# [Note: no barriers] torch splits each operation over its threads and waits for all of them at its end. For long
# operations that is right. For many short ones, on a machine whose cores have other work too, every wait lasts as long
# as the slowest thread. The threads of a `ThreadPool` take piece after piece, each with all operations of its piece,
# and synchronize only once, at the end.


class ThreadPool:
    """Threads in each of which torch uses one core; see [Note: no barriers]."""

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._pool = ThreadPoolExecutor(threads, initializer=_work_alone)
        ready = threading.Barrier(threads)
        default = torch.get_num_threads()
        wait([self._pool.submit(ready.wait) for _ in range(threads)])
        # `set_num_threads` in a thread also sets the default of threads that start later: restore it.
        torch.set_num_threads(default)

    def share(self, count: int, work: Callable[[Iterator[int]], None]) -> None:
        """Let every thread run `work` over an iterator of `range(count)` that they share: each number is used once."""
        numbers = iter(range(count))
        futures = [self._pool.submit(work, numbers) for _ in range(min(count, self._size))]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _work_alone() -> None:
    torch.get_num_threads()  # the first call in a thread resets the number, so it must come before it is set
    torch.set_num_threads(1)


_Update = Callable[[Tensor, Tensor, Tensor, Tensor], None]

PIECE = 1 << 19
"""Elements of a piece per thread: small enough for the cache, large enough for the overhead of a call."""


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """The hyperparameters of one update."""

    step: int
    """Counts from 1."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    """True: AdamW. False: Adam, which adds the weight decay to the gradient."""
    scale: float = 1.0
    """Factor on the gradients; the fused kernel overwrites fp32 gradients with the product."""


@torch.no_grad()
def adam_step(
    numbers: AdamNumbers,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rounded: Sequence[Tensor | None] | None = None,
    *,
    pool: ThreadPool | None = None,
) -> None:
    """Update fp32 weights and moments in place, and write each weight to its tensor in `rounded`, where it has one.

    All tensors are contiguous and on the CPU; gradients may be fp32, bf16 or fp16. With `pool` its threads work on
    different pieces; without, torch's own threads work on one piece after another.
    """
    outputs = rounded if rounded is not None else [None] * len(weights)
    update = _kernel(numbers)
    for weight, grad, mean, square, output in zip(weights, grads, exp_avgs, exp_avg_sqs, outputs, strict=True):
        assert weight.dtype == mean.dtype == square.dtype == torch.float32, "weights and moments are fp32"
        # The CPU kernel ignores strides.
        assert all(t.is_contiguous() for t in (weight, grad, mean, square)), "tensors are contiguous"
        if output is None and grad.dtype == torch.float32:
            update(weight, grad, mean, square)
        else:
            _update_in_pieces(update, (weight, grad, mean, square), output, pool)


def _update_in_pieces(
    update: _Update, tensors: Sequence[Tensor], output: Tensor | None, pool: ThreadPool | None
) -> None:
    length = PIECE if pool is not None else PIECE * torch.get_num_threads()
    weights, grads, means, squares = (torch.split(tensor.view(-1), length) for tensor in tensors)
    output_pieces = [None] * len(weights) if output is None else torch.split(output.view(-1), length)
    widens = tensors[1].dtype != torch.float32

    @torch.no_grad()
    def work(pieces: Iterator[int]) -> None:
        buffer = torch.empty(len(weights[0]) if widens else 0)
        for at in pieces:
            weight, output_piece = weights[at], output_pieces[at]
            update(weight, buffer[: len(weight)].copy_(grads[at]) if widens else grads[at], means[at], squares[at])
            if output_piece is not None:
                output_piece.copy_(weight)

    if pool is None or len(weights) == 1:
        work(iter(range(len(weights))))
    else:
        pool.share(len(weights), work)


def _kernel(numbers: AdamNumbers) -> _Update:
    """Return torch's fused update as a function of one weight, its gradient and its moments."""
    fused = fused_adamw_ if numbers.decoupled else fused_adam_
    steps = [torch.tensor(float(numbers.step))]
    # The kernel divides by `grad_scale`, as it does for torch's optimizers.
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
    """`adam_step` in torch operations: the same update in any precision, on any device."""
    (beta1, beta2), step = numbers.betas, numbers.step
    outputs = rounded if rounded is not None else [None] * len(weights)
    for weight, grad, mean, square, output in zip(weights, grads, exp_avgs, exp_avg_sqs, outputs, strict=True):
        slope = grad.to(weight.dtype) * numbers.scale
        if numbers.decoupled:
            weight.mul_(1.0 - numbers.lr * numbers.weight_decay)
        else:
            slope = slope + weight * numbers.weight_decay
        mean.lerp_(slope, 1.0 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1.0 - beta2)
        spread = (square / (1.0 - beta2**step)).sqrt_().add_(numbers.eps)
        weight.addcdiv_(mean, spread, value=-numbers.lr / (1.0 - beta1**step))
        if output is not None:
            output.copy_(weight)
