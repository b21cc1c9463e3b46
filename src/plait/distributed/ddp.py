"""DDP (data parallelism with replicated parameters): gradient buckets, all-reduced while the backward pass runs.

[Note: why not DistributedDataParallel]
Its reducer sums in the dtype of the parameters and hands the sum back in it; mixed precision here sums in
`reduce` and keeps the sum ([Note: one meaning of mixed precision]). It also wraps the module, which renames
every parameter, and needs `find_unused_parameters` where some are not used in a step. The buckets below need
neither, and cost the same: one copy of each gradient, and one all-reduce per bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed.dtensor import is_sharded, local_grad, to_local
from plait.torch_internals import non_persistent_buffers

# The interface of what collects gradients: `ShardedGradients` (ZeRO), `GradientBuckets` (replicated parameters),
# `LocalGradients` (one process), `StreamedGradients` (offload). The engine calls its two methods at the same moments
# for all of them.


class Gradients(Protocol):
    """What collects gradients over micro-batches and ranks."""

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; `last`: the optimizer steps after its backward pass."""

    def finish(self) -> None:
        """Complete the step's gradients."""


def combine_collectors(collectors: Sequence[Gradients]) -> Gradients:
    """One collector that forwards to those of all pipeline stages on this rank."""
    return collectors[0] if len(collectors) == 1 else _CollectorList(collectors)


class _CollectorList:
    """Forwards each call to all collectors."""

    def __init__(self, collectors: Sequence[Gradients]) -> None:
        self._collectors = collectors

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch."""
        for collector in self._collectors:
            collector.before_backward(last=last)

    def finish(self) -> None:
        """Complete the step's gradients."""
        for collector in self._collectors:
            collector.finish()


# Hooks on gradients that do not keep parameters alive.


def listen(params: Sequence[nn.Parameter], collect: Callable[[int, Tensor], None]) -> None:
    """Call a method with the index of a parameter, and the parameter, whenever its gradient has been accumulated.

    The method's object is held weakly. torch does not show a parameter's hooks to the garbage collector, so a hook that
    held an object that holds the parameters would keep all of them, for as long as the process lives.
    """
    method = weakref.WeakMethod(collect)
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(partial(_call_if_alive, method, index))  # type: ignore[no-untyped-call]


def _call_if_alive(method: weakref.WeakMethod[Callable[[int, Tensor], None]], index: int, param: Tensor) -> None:
    collect = method()
    if collect is not None:
        collect(index, param)


# Gradients of one process that computes in a smaller dtype: left in `.grad`, as long as that is exact.
#
# With one micro-batch per step there is nothing to sum: the gradient that the backward pass made is the gradient of the
# step, and an optimizer that reads any dtype needs no wide copy of it. That saves four bytes per parameter, and a pass
# over them. Where a step has several micro-batches they are summed in the wider dtype, as everywhere else.


class LocalGradients:
    """Each parameter's `.grad` in a step with one micro-batch; the sum in `reduce` in a step with several."""

    def __init__(self, params: Sequence[nn.Parameter], reduce: torch.dtype) -> None:
        self._params = list(params)
        self._reduce = reduce
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._summing = False
        self._listens = False

    def of(self, index: int) -> Tensor:
        """The gradient of one parameter, once the step's are complete."""
        param, total = self._params[index], self._sums[index]
        if total is not None:
            return total
        if param.grad is None:
            # Not used in this step. A gradient of zero, as with several ranks, of which another may have used it.
            param.grad = torch.zeros_like(param)
        return param.grad

    def clear(self) -> None:
        """Forget the sums of this step."""
        self._sums = [None] * len(self._params)

    def _collect(self, index: int, param: Tensor) -> None:
        if not self._summing:
            return
        assert param.grad is not None
        total = self._sums[index]
        if total is None:
            dtype = torch.promote_types(self._reduce, param.dtype)
            self._sums[index] = param.grad.to(dtype, copy=True)
        else:
            total.add_(param.grad)
        param.grad = None

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; one that is not the last, or not the only one, is summed."""
        self._summing = self._summing or not last
        if self._summing and not self._listens:  # not before: a call for each parameter, which most runs never need
            self._listens = True
            listen(self._params, self._collect)

    def finish(self) -> None:
        """The step's gradients are complete."""
        self._summing = False


class _GradientBucket:
    """A flat buffer, and the parameters whose gradients it holds."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None, sizes: Sequence[torch.Size]
    ) -> None:
        self.group = group
        self.flat = torch.zeros(sum(s.numel() for s in sizes), dtype=dtype, device=device)
        pieces = self.flat.split_with_sizes([s.numel() for s in sizes])
        self.views = [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]
        self.waiting = len(sizes)
        self.held: list[torch.Tensor] = []
        """Gradients that were copied, kept until the step's end: on CPU, allocating their memory again costs more, in
        page faults, than the copy itself."""


class GradientBuckets:
    """Collects each parameter's gradient in the reduce dtype, and sums it over the ranks with the same shard.

    The gradient of this rank's shard of a parameter is stored in its view of a bucket (`view_of`). Buckets are reduced
    strictly in order, so ranks whose gradients become ready in different order, or not at all, still agree.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
        bucket_bytes: int,
    ) -> None:
        """`group_of` gives the ranks over which a parameter's gradient is summed; None: this one alone."""
        self._params = list(params)
        self._buckets: list[_GradientBucket] = []
        self._bucket_and_position: list[tuple[int, int]] = [(0, 0)] * len(self._params)
        self._fill_buckets(dtype_of, group_of, bucket_bytes)
        self._touched = [False] * len(self._params)
        self._ready = [False] * len(self._params)
        self._reducing = False
        self._next = 0
        self._works: list[dist.Work] = []
        listen(self._params, self._collect)

    def view_of(self, index: int) -> torch.Tensor:
        """The view of a bucket that holds the gradient of the parameter with this index."""
        bucket, position = self._bucket_and_position[index]
        return self._buckets[bucket].views[position]

    def _fill_buckets(self, dtype_of: Any, group_of: Any, bucket_bytes: int) -> None:
        # The backward pass meets the last parameters first, so they share the first bucket.
        pending: list[int] = []
        size = 0
        previous: Any = None
        for index in reversed(range(len(self._params))):
            param = self._params[index]
            key = (dtype_of(param), param.device, group_of(param))
            if pending and (size >= bucket_bytes or key != previous):
                self._close_bucket(pending, *previous)
                pending, size = [], 0
            previous = key
            pending.append(index)
            size += to_local(param.detach()).numel() * key[0].itemsize
        if pending:
            self._close_bucket(pending, *previous)

    def _close_bucket(
        self, indices: list[int], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        for position, index in enumerate(indices):
            self._bucket_and_position[index] = (len(self._buckets), position)
        sizes = [to_local(self._params[index].detach()).shape for index in indices]
        self._buckets.append(_GradientBucket(dtype, device, group, sizes))

    def _collect(self, index: int, param: torch.Tensor) -> None:
        number, position = self._bucket_and_position[index]
        bucket = self._buckets[number]
        view, grad = bucket.views[position], param.grad
        if grad is not view:
            assert grad is not None
            sharded = is_sharded(param)
            if sharded:
                with torch.no_grad():
                    grad = local_grad(grad, param)
            if self._touched[index]:
                view.add_(grad)
            else:
                view.copy_(grad)
            # Further micro-batches accumulate straight into the bucket where the dtype allows it.
            param.grad = view if view.dtype == param.dtype and not sharded else None
            if view.device.type == "cpu":
                bucket.held.append(grad)
        self._touched[index] = True
        if self._reducing and not self._ready[index]:
            self._ready[index] = True
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch_in_order()

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; on the `last` one gradients are reduced as they become ready."""
        self._reducing = last

    def _launch_in_order(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: _GradientBucket) -> None:
        self._next += 1
        if bucket.group is None:
            return
        work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
        assert work is not None
        self._works.append(work)

    def collected(self) -> Callable[[], None]:
        """A function that records again which gradients exist, after a CUDA graph has replayed this micro-batch."""
        touched = list(self._touched)

        def restore() -> None:
            self._touched = list(touched)

        return restore

    def finish(self) -> None:
        """Complete the step's gradients: zeros for unused parameters, and wait for all sums."""
        for index, touched in enumerate(self._touched):
            if not touched:
                self.view_of(index).zero_()
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        for work in self._works:
            work.wait()
        self._works.clear()
        self._next = 0
        self._reducing = False
        self._touched = [False] * len(self._params)
        self._ready = [False] * len(self._params)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.views)
            bucket.held.clear()


# Buffers.


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a checkpoint holds, each under its first name; others are computed from the configuration."""
    non_persistent = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in non_persistent_buffers(module)
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in non_persistent)


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup, ranks: int) -> None:
    """Make every rank's persistent buffers the same: floating-point ones their mean, others those of rank 0.

    Other buffers are tables, computed from the configuration and equal everywhere.
    """
    for _, buffer in persistent_buffers(model):
        if buffer.is_floating_point():
            dist.all_reduce(buffer, group=group)
            buffer /= ranks
        else:
            dist.broadcast(buffer, group_src=0, group=group)
