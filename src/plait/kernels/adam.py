"""AdamW on the CPU: updates fp32 weights from fp32 or 16-bit gradients, and also stores the new weights in 16 bits.

[Note: one pass over memory] The update of an element is a few operations on 28 bytes, so memory bandwidth decides how
long it takes. torch's fused kernel reads and writes each number once, but it needs fp32 gradients and does not round
the weights; casting and rounding would each read and write all of memory once more. Here tensors are updated in pieces
that fit into the cache: a piece of the gradients is cast to fp32 into a small buffer, torch's fused kernel updates that
piece, and its new weights are rounded while they are still in the cache.
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

# [Note: no barriers] torch splits each operation over its threads and waits for all of them when it ends. For long
# operations that is right. With many short ones, on a machine whose cores also do other work, every operation takes as
# long as its slowest thread. Each thread of a `ThreadPool` instead performs all operations on one piece, then on the
# next piece that no thread has taken; the threads wait for each other only once, at the end.


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
        """Run `work(numbers)` in every thread and wait for all of them; raise the error of a thread that failed.

        `numbers` is one iterator over `range(count)` that all threads share, so each number is processed once.
        """
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
"""Elements of a piece per thread: few enough for the cache, enough that the overhead of a call does not matter."""


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """The hyperparameters of one update."""

    step: int
    """The number of this update; the first is 1."""
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
    """Update fp32 weights and moments in place, and copy each new weight to its tensor in `rounded`, if any.

    All tensors are contiguous and on the CPU; gradients may be fp32, bf16 or fp16. With `pool`, each of its threads
    updates other pieces; without, torch's own threads update one piece after another together.
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
    """Do the update of `adam_step` with torch operations, in the dtype of the weights, on any device."""
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
