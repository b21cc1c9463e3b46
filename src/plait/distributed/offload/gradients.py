"""Gradient offload: during the backward pass gradients are copied to the host (D2H), where the update is computed.

`GradientOffloadQueue` holds the gradients of a step for the update. `StreamedGradients` sums over micro-batches and
puts each complete gradient into the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
    """A gradient for the update: on the host after `event`, or on the device (then `event` is None)."""

    tensor: Tensor
    event: Any


class GradientOffloadQueue:
    """Receives the gradient of each parameter, in any order, as soon as it is complete, during the backward pass.

    If a parameter's optimizer state is in host memory, its gradient is copied there at once and freed on the device. If
    the state is in files, the gradient stays on the device until its bucket is updated: files are used to save host
    memory.
    """

    def __init__(self, buckets: Sequence[Bucket], streams: CopyStreams, *, sets: int) -> None:
        """`sets`: how many sets of host buffers; with two, a backward pass fills one while an update reads one."""
        self._streams = streams
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.span.indices}
        self._buffer_sets: list[dict[int, Tensor]] = [{} for _ in range(sets)]
        self._sent: dict[int, OffloadedGradient] = {}
        self._norms: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> None:
        """Compute the norm of a complete gradient, and begin to copy it to the host unless its state is in files."""
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        self._norms[index] = foreach_norm([grad], 2, dtype=wide)[0]
        bucket = self._bucket_of[index]
        if bucket.span.home != "cpu":
            self._sent[index] = OffloadedGradient(grad, None)
            return
        if len(self._buffer_sets) == 1:  # an earlier update may still read the buffer
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
        """Give parameters without a gradient one of zeros: other ranks may have used them."""
        for index, bucket in self._bucket_of.items():
            if index not in self._sent:
                target = bucket.targets[bucket.span.indices.index(index)]
                self.take(index, torch.zeros(target.shape, dtype=dtype_of(target), device=self._streams.device))

    def norms(self) -> list[Tensor]:
        """Return the norm of each gradient, in the order of the parameters."""
        return [self._norms[index] for index in sorted(self._norms)]

    def of(self, index: int) -> Tensor | None:
        """Wait for a gradient's copy, and return the gradient, on the host or the device; None if there is none."""
        sent = self._sent.get(index)
        if sent is None:
            return None
        if sent.event is not None:
            sent.event.synchronize()
        return sent.tensor

    def take_all(self) -> dict[int, OffloadedGradient]:
        """Return all gradients by parameter index, and empty the queue; the next step uses the other set of buffers."""
        sent, self._sent = self._sent, {}
        self._norms = {}
        self._buffer_sets.append(self._buffer_sets.pop(0))
        return sent

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped."""
        self._sent, self._norms = {}, {}


class StreamedGradients:
    """Sums gradients over micro-batches on the device, and queues them during the last backward pass of a step.

    It does not sum over ranks: it is for parameters that no other rank has, and for those of `fully_shard`, which sums
    over ranks itself.
    """

    def __init__(
        self,
        queue: GradientOffloadQueue,
        sum_dtype: Callable[[Tensor], torch.dtype],
        inner: Gradients | None = None,
        complete: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """`sum_dtype` returns the dtype in which a gradient is summed over micro-batches.

        `inner` is the `Gradients` of a sharded model, to which both methods of the protocol are forwarded. `complete`
        has the tensors, by parameter index, in which it leaves gradients that it does not reduce by `fully_shard`.
        """
        self._inner = inner
        self._complete = complete
        self._queue = queue
        self._sum_dtype = sum_dtype
        self.sums: dict[int, Tensor] = {}
        """The sums over the micro-batches so far, by parameter index."""
        self._last = True

    def listen(self, params: Sequence[nn.Parameter]) -> None:
        """Receive the gradients of parameters without `fully_shard` when autograd has accumulated them."""
        listen(params, self._collect)

    def _collect(self, index: int, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        param.grad = None
        with torch.no_grad():
            self.receive(index, local_grad(grad, param) if is_sharded(grad) else grad)

    def receive(self, index: int, grad: Tensor) -> None:
        """Add a micro-batch's gradient of this rank's shard of a parameter; in the last micro-batch, queue the sum."""
        before = self.sums.pop(index, None)
        if before is not None:
            grad = before.add_(grad)
        if self._last:
            # If a sharded module is called twice, `fully_shard` reduces its gradients twice: this is the second part.
            sent = self._queue.of(index)
            self._queue.take(index, grad if sent is None else grad + sent.to(grad.device))
        else:
            self.sums[index] = grad if before is not None else grad.to(self._sum_dtype(grad), copy=True)

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; in the `last` one of a step gradients are queued."""
        self._last = last
        if self._inner is not None:
            self._inner.before_backward(last=last)

    def finish(self) -> None:
        """Queue the sums of parameters that the last micro-batch did not use, and zeros for those that none used."""
        if self._inner is not None:
            self._inner.finish()
        with torch.no_grad():
            for index, gradient in self._complete.items():
                self._queue.take(index, gradient.clone())  # the next backward pass may begin before the update
            for index in list(self.sums):
                self._queue.take(index, self.sums.pop(index))
            self._queue.fill_in(self._sum_dtype)


def listen_to_reductions(model: nn.Module, index_of: dict[int, int], receive: Callable[[int, Tensor], None]) -> None:
    """Call `receive` with each gradient of a sharded model once it is reduced, in the reduce dtype.

    `index_of` has the index of each parameter by the `id` of its shard.

    [Note: gradients before they are rounded] `fully_shard` returns gradients in the dtype of its parameters, here a
    16-bit one. Before it rounds them, it passes the sums in fp32 to its all-reduce hook: one flat tensor with the
    shards of the group's parameters in order, each padded to the size that is the same on all ranks.
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
    """Return the stream on which `fully_shard` copies a module's shards; None if not sharded or not used yet."""
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
