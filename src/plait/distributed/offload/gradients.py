"""Gradient offload: gradients are copied to where the update is computed (D2H) during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.distributed.ddp import Gradients, listen
from plait.distributed.dtensor import is_sharded, local_grad
from plait.distributed.offload.layout import Bucket
from plait.distributed.offload.streams import CopyStreams
from plait.torch_internals import (
    foreach_norm,
    fsdp_all_gather_copy_in_stream,
    fsdp_param_group,
    fsdp_params,
    fsdp_params_in_reduce_order,
    fsdp_sharded_param,
    fsdp_sharded_sizes,
)


class OffloadedGradient(NamedTuple):
    """A gradient for the update: on the host after the event `event`, or still on the device."""

    tensor: Tensor
    event: Any


class GradientOffloadQueue:
    """Takes each parameter's complete gradient as soon as it is known, in any order, during the backward pass.

    Gradients of parameters whose state is in host memory are copied there at once, which frees the device. Those of a
    bucket in files stay on the device until its turn comes: files are there to save host memory.
    """

    def __init__(self, buckets: Sequence[Bucket], streams: CopyStreams, *, sets: int) -> None:
        """`sets` of host buffers: two where one is still read while the next backward pass fills the other."""
        self._streams = streams
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.span.indices}
        self._buffer_sets: list[dict[int, Tensor]] = [{} for _ in range(sets)]
        self._sent: dict[int, OffloadedGradient] = {}
        self._norms: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> None:
        """Begin to copy a complete gradient to the host. Its norm is computed on the device."""
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        self._norms[index] = foreach_norm([grad], 2, dtype=wide)[0]
        bucket = self._bucket_of[index]
        if bucket.span.home != "cpu":
            self._sent[index] = OffloadedGradient(grad, None)
            return
        if len(self._buffer_sets) == 1:  # an update may still read the buffer of a parameter that was not used since
            if bucket.update is not None:
                bucket.update.result()
            self._streams.wait(bucket.published)
        buffer = self._buffer(index, grad)
        self._sent[index] = OffloadedGradient(buffer, self._streams.copy_to_host(buffer, grad))

    def _buffer(self, index: int, grad: Tensor) -> Tensor:
        buffers = self._buffer_sets[0]
        buffer = buffers.get(index)
        if buffer is None or buffer.dtype != grad.dtype:
            buffer = buffers[index] = self._streams.host_tensor(grad.shape, grad.dtype)
        return buffer

    def fill_in(self, dtype_of: Any) -> None:
        """Give unused parameters a gradient of zero: other ranks may have used them."""
        for index, bucket in self._bucket_of.items():
            if index not in self._sent:
                target = bucket.targets[bucket.span.indices.index(index)]
                self.take(index, torch.zeros(target.shape, dtype=dtype_of(target), device=self._streams.device))

    def norms(self) -> list[Tensor]:
        """The norm of each gradient, in the order of the parameters."""
        return [self._norms[index] for index in sorted(self._norms)]

    def of(self, index: int) -> Tensor | None:
        """A gradient that was taken, on the host or the device, once its copy is done; None where there is none."""
        sent = self._sent.get(index)
        if sent is None:
            return None
        if sent.event is not None:
            sent.event.synchronize()
        return sent.tensor

    def take_all(self) -> dict[int, OffloadedGradient]:
        """All gradients, for an update; the next ones go to another set of buffers, where there are two."""
        sent, self._sent = self._sent, {}
        self._norms = {}
        self._buffer_sets.append(self._buffer_sets.pop(0))
        return sent

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped."""
        self._sent, self._norms = {}, {}


class StreamedGradients:
    """Queues each gradient during the last backward pass of a step; sums those of earlier ones on the device.

    For parameters whose gradients need no other rank, and for those of `fully_shard`, which sums over ranks itself.
    """

    def __init__(
        self, queue: GradientOffloadQueue, sum_dtype: Callable[[Tensor], torch.dtype], inner: Gradients | None = None
    ) -> None:
        """`sum_dtype` gives the dtype in which a gradient is summed over micro-batches.

        `inner` is the collector of a sharded model; calls are forwarded to it.
        """
        self._inner = inner
        self._queue = queue
        self._sum_dtype = sum_dtype
        self.sums: dict[int, Tensor] = {}
        """Of earlier micro-batches, by parameter."""
        self._last = True

    def listen(self, params: Sequence[nn.Parameter]) -> None:
        """Take the gradients of plain parameters when autograd has accumulated them."""
        listen(params, self._collect)

    def _collect(self, index: int, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        param.grad = None
        with torch.no_grad():
            self.receive(index, local_grad(grad, param) if is_sharded(grad) else grad)

    def receive(self, index: int, grad: Tensor) -> None:
        """Take one micro-batch's gradient of this rank's shard of one parameter."""
        before = self.sums.pop(index, None)
        if before is not None:
            grad = before.add_(grad)
        if self._last:
            # The gradients of a sharded module that is called twice are summed over ranks twice.
            sent = self._queue.of(index)
            self._queue.take(index, grad if sent is None else grad + sent.to(grad.device))
        else:
            self.sums[index] = grad if before is not None else grad.to(self._sum_dtype(grad), copy=True)

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; on the `last` one gradients leave the device."""
        self._last = last
        if self._inner is not None:
            self._inner.before_backward(last=last)

    def finish(self) -> None:
        """Queue gradients of earlier micro-batches alone, and zeros for unused parameters."""
        if self._inner is not None:
            self._inner.finish()
        with torch.no_grad():
            for index in list(self.sums):
                self._queue.take(index, self.sums.pop(index))
            self._queue.fill_in(self._sum_dtype)


def listen_to_reductions(model: nn.Module, index_of: dict[int, int], receive: Callable[[int, Tensor], None]) -> None:
    """Take the gradients of a sharded model when they are reduced, in the reduce dtype.

    [Note: gradients before they are rounded] `fully_shard` returns gradients in the dtype of its parameters, here a
    16-bit one. What it has summed in fp32 is passed, before that, to its all-reduce hook: one flat tensor, with the
    shards of the group's parameters in order, each padded to the size that all ranks have.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = fsdp_param_group(module)
        if group is None:
            continue
        module.set_all_reduce_hook(_reduced_hook(group, index_of, receive))
        for shard in map(fsdp_sharded_param, fsdp_params(group)):
            if shard.requires_grad:
                shard.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]


def gathering_stream(module: nn.Module) -> Any:
    """The stream on which `fully_shard` copies the shards of a module; None before its first use, or if not sharded."""
    group = fsdp_param_group(module)
    return None if group is None else fsdp_all_gather_copy_in_stream(group)


def _reduced_hook(
    group: Any, index_of: dict[int, int], receive: Callable[[int, Tensor], None]
) -> Callable[[Tensor], None]:
    def hook(flat: Tensor) -> None:
        offset = 0
        with torch.no_grad():
            for member in fsdp_params_in_reduce_order(group):
                shard = fsdp_sharded_param(member)
                if not shard.requires_grad:
                    continue
                shape, padded = fsdp_sharded_sizes(member)
                receive(index_of[id(shard)], flat[offset : offset + shape.numel()].view(shape))
                offset += padded
        assert offset == flat.numel(), "a group's gradients are reduced together"

    return hook


def _forget(param: Tensor) -> None:
    param.grad = None
