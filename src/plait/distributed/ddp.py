"""Replicated parameters: gradients collected in buckets, summed over ranks while the backward pass runs.

[Note: why not DistributedDataParallel]
Its reducer sums in the dtype of the parameters and hands the sum back in it; mixed precision here sums in
`reduce` and keeps the sum ([Note: one meaning of mixed precision]). It also wraps the module, which renames
every parameter, and has to be told about parameters that take no part in a step. The buckets below need
neither, and cost the same: one copy of each gradient, and one all-reduce a bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.distributed.dtensor import is_sharded, local_part, settled_part
from plait.torch_internals import non_persistent_buffers

# What every collector of gradients is told, however it collects them.
#
# Each technique brings its own: `ShardedGradients` (ZeRO), `GradientBuckets` (replicated parameters), `OwnGradients`
# (one process), `StreamedGradients` (offload). The engine calls the two methods below at the same moments for all of
# them.


class Gradients(Protocol):
    """What collects gradients over micro-batches and ranks."""

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; `last`: the optimizer steps after its backward pass."""

    def finish(self) -> None:
        """Complete the step's gradients."""


def as_one(collectors: Sequence[Gradients]) -> Gradients:
    """The collectors of all stages that a rank holds, as one."""
    return collectors[0] if len(collectors) == 1 else _Several(collectors)


class _Several:
    """Passes on to each what all are told."""

    def __init__(self, each: Sequence[Gradients]) -> None:
        self._each = each

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch."""
        for one in self._each:
            one.before_backward(last=last)

    def finish(self) -> None:
        """Complete the step's gradients."""
        for one in self._each:
            one.finish()


# Being told of gradients, without keeping parameters alive by it.


def listen(params: Sequence[nn.Parameter], collect: Callable[[int, Tensor], None]) -> None:
    """Call a method with the index of a parameter, and the parameter, whenever its gradient is there.

    The method's object is held weakly. torch does not show a parameter's hooks to the garbage collector, so a hook that
    held an object that holds the parameters would keep all of them, for as long as the process lives.
    """
    method = weakref.WeakMethod(collect)
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(partial(_tell, method, index))  # type: ignore[no-untyped-call]


def _tell(method: weakref.WeakMethod[Callable[[int, Tensor], None]], index: int, param: Tensor) -> None:
    collect = method()
    if collect is not None:
        collect(index, param)


# Gradients of one process that computes in a smaller format: left where and as they are, as long as that is exact.
#
# With one micro-batch a step there is nothing to sum: the gradient that the backward pass made is the gradient of the
# step, and an optimizer that reads any format needs no wide copy of it. That spares four bytes for each parameter, and
# a pass over them. Where a step has several micro-batches they are summed in the wider format, as everywhere else.


class OwnGradients:
    """Each parameter's own gradient of a step with one micro-batch; the sum in `reduce` of a step with several."""

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
            # Took no part in this step. A gradient of zero, as on many ranks, where another may have used it.
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


# What a model keeps besides its parameters.


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds, each under its first name; others are made from the configuration."""
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in non_persistent_buffers(module)
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)


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
        """Gradients that were copied, until the step's end: on CPU, giving their memory back at once and taking it
        anew costs more, in page faults, than the copy itself."""


class GradientBuckets:
    """Collects each parameter's gradient in the reduce dtype, and sums it over the ranks that hold the same part.

    This rank's part of a parameter's gradient lands in its view of a bucket (`view_of`). Buckets are reduced strictly
    in order, so ranks whose parameters become ready in different order, or not at all, still agree.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
        bucket_bytes: int,
    ) -> None:
        """`group_of` names the ranks over which a parameter's gradient is summed; None: this one alone."""
        self._params = list(params)
        self._buckets: list[_GradientBucket] = []
        self._place: list[tuple[int, int]] = [(0, 0)] * len(self._params)
        self._fill_buckets(dtype_of, group_of, bucket_bytes)
        self._touched = [False] * len(self._params)
        self._ready = [False] * len(self._params)
        self._reducing = False
        self._next = 0
        self._works: list[dist.Work] = []
        listen(self._params, self._collect)

    def view_of(self, index: int) -> torch.Tensor:
        """Where the gradient of the parameter with this index is collected."""
        bucket, position = self._place[index]
        return self._buckets[bucket].views[position]

    def _fill_buckets(self, dtype_of: Any, group_of: Any, bucket_bytes: int) -> None:
        # The backward pass meets the last parameters first, so they share the first bucket.
        pending: list[int] = []
        size = 0
        before: Any = None
        for index in reversed(range(len(self._params))):
            param = self._params[index]
            kind = (dtype_of(param), param.device, group_of(param))
            if pending and (size >= bucket_bytes or kind != before):
                self._close_bucket(pending, *before)
                pending, size = [], 0
            before = kind
            pending.append(index)
            size += local_part(param.detach()).numel() * kind[0].itemsize
        if pending:
            self._close_bucket(pending, *before)

    def _close_bucket(
        self, indices: list[int], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        for position, index in enumerate(indices):
            self._place[index] = (len(self._buckets), position)
        sizes = [local_part(self._params[index].detach()).shape for index in indices]
        self._buckets.append(_GradientBucket(dtype, device, group, sizes))

    def _collect(self, index: int, param: torch.Tensor) -> None:
        place, position = self._place[index]
        bucket = self._buckets[place]
        view, grad = bucket.views[position], param.grad
        if grad is not view:
            assert grad is not None
            spread = is_sharded(param)
            if spread:
                with torch.no_grad():
                    grad = settled_part(grad, param)
            if self._touched[index]:
                view.add_(grad)
            else:
                view.copy_(grad)
            # Further micro-batches accumulate straight into the bucket where the dtype allows it.
            param.grad = view if view.dtype == param.dtype and not spread else None
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
        """What tells anew, once the device has repeated this micro-batch by itself, whose gradients are here."""
        touched = list(self._touched)

        def tell() -> None:
            self._touched = list(touched)

        return tell

    def finish(self) -> None:
        """Complete the step's gradients: zeros for parameters that took no part, and wait for all sums."""
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


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup, ranks: int) -> None:
    """Make every rank's persistent buffers the same: floating-point ones their mean, others those of rank 0.

    Buffers that no checkpoint holds are tables, made from the configuration and equal everywhere.
    """
    for _, buffer in persistent_buffers(model):
        if buffer.is_floating_point():
            dist.all_reduce(buffer, group=group)
            buffer /= ranks
        else:
            dist.broadcast(buffer, group_src=0, group=group)
