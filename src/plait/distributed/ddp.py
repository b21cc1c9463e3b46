"""DDP (data parallelism with replicated parameters): gradient buckets, all-reduced while the backward pass runs.

Also the interface `Gradients`, which collectors of gradients have for every kind of sharding.

[Note: why not DistributedDataParallel]
DistributedDataParallel sums gradients in the dtype of the parameters; here they are summed and kept in the dtype
`reduce` ([Note: one meaning of mixed precision]). It also wraps the module, which renames every parameter, and needs
`find_unused_parameters` if some parameters are not used in a step. The buckets below do neither, and cost the same: one
copy of each gradient, and one all-reduce per bucket.
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

# Classes that collect gradients: `ShardedGradients` (ZeRO), `GradientBuckets` (replicated parameters),
# `LocalGradients` (one process), `StreamedGradients` (offload). The engine calls the two methods of their interface in
# the same way for all of them.


class Gradients(Protocol):
    """A collector: it sums gradients over micro-batches and ranks."""

    def before_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of one micro-batch; `last`: it is the last one before the optimizer's step."""

    def finish(self) -> None:
        """Complete the gradients of a step, after its last backward pass."""


def combine_collectors(collectors: Sequence[Gradients]) -> Gradients:
    """Return one collector that forwards to `collectors`, those of all pipeline stages on this rank."""
    return collectors[0] if len(collectors) == 1 else _CollectorList(collectors)


class _CollectorList:
    """Forwards each call to all collectors."""

    def __init__(self, collectors: Sequence[Gradients]) -> None:
        self._collectors = collectors

    def before_backward(self, *, last: bool) -> None:
        """Forward to all collectors."""
        for collector in self._collectors:
            collector.before_backward(last=last)

    def finish(self) -> None:
        """Forward to all collectors."""
        for collector in self._collectors:
            collector.finish()


# Gradient hooks that do not keep parameters alive.


def listen(params: Sequence[nn.Parameter], collect: Callable[[int, Tensor], None]) -> None:
    """Call `collect(index, param)` whenever autograd has accumulated the gradient of a parameter.

    `collect` is a method, whose object is referenced weakly: torch hides a parameter's hooks from the garbage
    collector, so a strong reference from a hook to an object that refers to the parameters would never be freed.
    """
    method = weakref.WeakMethod(collect)
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(partial(_call_if_alive, method, index))  # type: ignore[no-untyped-call]


def _call_if_alive(method: weakref.WeakMethod[Callable[[int, Tensor], None]], index: int, param: Tensor) -> None:
    collect = method()
    if collect is not None:
        collect(index, param)


# Gradients of one process that computes in 16 bits: kept in `.grad` if a step has one micro-batch.
#
# Then there is nothing to sum: the gradient of the backward pass is the gradient of the step, and an optimizer that
# reads any dtype needs no fp32 copy. That saves four bytes per parameter, and the time to write and read them. If a
# step has several micro-batches, gradients are summed in the dtype `reduce`, as with any other layout.


class LocalGradients:
    """Holds gradients of one process: `.grad` in a step with one micro-batch, a sum in `reduce` in one with several."""

    def __init__(self, params: Sequence[nn.Parameter], reduce: torch.dtype) -> None:
        self._params = list(params)
        self._reduce = reduce
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._summing = False
        self._listens = False

    def of(self, index: int) -> Tensor:
        """Return the gradient of one parameter, after `finish`."""
        param, total = self._params[index], self._sums[index]
        if total is not None:
            return total
        if param.grad is None:
            # Not used in this step: zeros, as with several ranks, where another rank may have used it.
            param.grad = torch.zeros_like(param)
        return param.grad

    def clear(self) -> None:
        """Drop the sums of this step."""
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
        """Prepare for one micro-batch; its gradients are summed unless it is the only one of the step."""
        self._summing = self._summing or not last
        if self._summing and not self._listens:  # not earlier: most runs need no hooks, a call per parameter
            self._listens = True
            listen(self._params, self._collect)

    def finish(self) -> None:
        """Complete the gradients of a step: `of` returns them from now on."""
        self._summing = False


class _GradientBucket:
    """A flat buffer with the gradients of some parameters; it is all-reduced as a whole."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None, sizes: Sequence[torch.Size]
    ) -> None:
        self.group = group
        self.flat = torch.zeros(sum(s.numel() for s in sizes), dtype=dtype, device=device)
        pieces = self.flat.split_with_sizes([s.numel() for s in sizes])
        self.views = [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]
        self.waiting = len(sizes)
        self.held: list[torch.Tensor] = []
        """On CPU, gradients that were copied to the buffer, kept until the end of the step: if each were freed at once,
        allocating the next one would cost more, in page faults, than the copy itself."""


class GradientBuckets:
    """Sums each parameter's gradient, in the reduce dtype, over the ranks that have the same shard of the parameter.

    The gradient of this rank's shard is stored in a view of a bucket (`view_of`). Buckets are reduced in a fixed order:
    all ranks call the same collectives, even if gradients become ready in different order, or not at all.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
        bucket_bytes: int,
    ) -> None:
        """`group_of` returns the group over which a parameter's gradient is summed; None: it is not summed."""
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
        """Return the view of a bucket that holds the gradient of the parameter with this index."""
        bucket, position = self._bucket_and_position[index]
        return self._buckets[bucket].views[position]

    def _fill_buckets(self, dtype_of: Any, group_of: Any, bucket_bytes: int) -> None:
        # The backward pass computes the gradients of the last parameters first, so these are in the first bucket.
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
            # If the dtypes are equal, autograd adds the gradients of further micro-batches directly to the bucket.
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
        """Prepare for one micro-batch; in the `last` one gradients are reduced as they become ready."""
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
        """Return a function that marks the gradients that exist now as existing.

        It is called after a CUDA graph has replayed the backward pass of this micro-batch, which runs no hooks.
        """
        touched = list(self._touched)

        def restore() -> None:
            self._touched = list(touched)

        return restore

    def finish(self) -> None:
        """Complete the gradients of a step: write zeros for unused parameters, and wait for all reductions."""
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


# Buffers of modules, such as running statistics.


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return (name, buffer) of the buffers that checkpoints contain, each with its first name.

    Buffers with `persistent=False` are left out: they are computed from the configuration.
    """
    non_persistent = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in non_persistent_buffers(module)
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in non_persistent)


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup, ranks: int) -> None:
    """Make the persistent buffers equal on all ranks: the mean of floating-point ones, rank 0's of all others.

    Non-persistent buffers are computed from the configuration, and so equal already.
    """
    for _, buffer in persistent_buffers(model):
        if buffer.is_floating_point():
            dist.all_reduce(buffer, group=group)
            buffer /= ranks
        else:
            dist.broadcast(buffer, group_src=0, group=group)
