"""Gradients on their way to where the update is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.distributed.ddp import Gradients, listen
from plait.distributed.dtensor import is_sharded, settled_part
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
    """A gradient for the update: on the host once the mark has passed, or still on the device."""

    tensor: Tensor
    mark: Any


class GradientOffloadQueue:
    """Takes each parameter's complete gradient as soon as there is one, in any order, beside the backward pass.

    Gradients of parameters whose state is in host memory go there at once, so that the device is rid of them. Those of
    a bucket in files stay on the device until its turn comes: host memory is what files are to spare.
    """

    def __init__(self, buckets: Sequence[Bucket], lanes: CopyStreams, *, sets: int) -> None:
        """`sets`: of host memory; two where one is still read while the next backward pass fills the other."""
        self._lanes = lanes
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.span.indices}
        self._rooms: list[dict[int, Tensor]] = [{} for _ in range(sets)]
        self._sent: dict[int, OffloadedGradient] = {}
        self._norms: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> None:
        """Send a complete gradient off. Its norm is computed where it is."""
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        self._norms[index] = foreach_norm([grad], 2, dtype=wide)[0]
        bucket = self._bucket_of[index]
        if bucket.span.home != "cpu":
            self._sent[index] = OffloadedGradient(grad, None)
            return
        if len(self._rooms) == 1:  # of a parameter that took no part since, an update may still read the room
            if bucket.update is not None:
                bucket.update.result()
            self._lanes.follow(bucket.published)
        room = self._room(index, grad)
        self._sent[index] = OffloadedGradient(room, self._lanes.out(room, grad))

    def _room(self, index: int, grad: Tensor) -> Tensor:
        rooms = self._rooms[0]
        room = rooms.get(index)
        if room is None or room.dtype != grad.dtype:
            room = rooms[index] = self._lanes.room(grad.shape, grad.dtype)
        return room

    def fill_in(self, dtype_of: Any) -> None:
        """Parameters that took no part have a gradient of zero: on other ranks they may have taken part."""
        for index, bucket in self._bucket_of.items():
            if index not in self._sent:
                target = bucket.targets[bucket.span.indices.index(index)]
                self.take(index, torch.zeros(target.shape, dtype=dtype_of(target), device=self._lanes.device))

    def norms(self) -> list[Tensor]:
        """The norm of each gradient, in the order of the parameters."""
        return [self._norms[index] for index in sorted(self._norms)]

    def of(self, index: int) -> Tensor | None:
        """A gradient that was sent, wherever it is; the host must wait for its mark."""
        sent = self._sent.get(index)
        if sent is None:
            return None
        if sent.mark is not None:
            sent.mark.synchronize()
        return sent.tensor

    def hand_over(self) -> dict[int, OffloadedGradient]:
        """All gradients, for an update; the next ones go to another set of rooms, where there are two."""
        sent, self._sent = self._sent, {}
        self._norms = {}
        self._rooms.append(self._rooms.pop(0))
        return sent

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped."""
        self._sent, self._norms = {}, {}


# Gradients of a parameter, from its backward pass to the outbox.


class StreamedGradients:
    """Sends each gradient off during the last backward pass of a step; sums those of earlier ones on the device.

    For parameters whose gradients need no other rank, and for those of `fully_shard`, which sums over ranks itself.
    """

    def __init__(
        self, outbox: GradientOffloadQueue, sum_dtype: Callable[[Tensor], torch.dtype], inner: Gradients | None = None
    ) -> None:
        """`sum_dtype` gives the format in which a gradient is summed over micro-batches.

        `inner` sees to the gradients of a sharded model; whatever this one is told is passed on to it.
        """
        self._inner = inner
        self._outbox = outbox
        self._sum_dtype = sum_dtype
        self.sums: dict[int, Tensor] = {}
        """Of earlier micro-batches, by parameter."""
        self._last = True

    def listen(self, params: Sequence[nn.Parameter]) -> None:
        """Take the gradients of plain parameters when autograd has them."""
        listen(params, self._collect)

    def _collect(self, index: int, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        param.grad = None
        with torch.no_grad():
            self.receive(index, settled_part(grad, param) if is_sharded(grad) else grad)

    def receive(self, index: int, grad: Tensor) -> None:
        """One micro-batch's gradient of one parameter, this rank's part."""
        before = self.sums.pop(index, None)
        if before is not None:
            grad = before.add_(grad)
        if self._last:
            # The gradients of a sharded module that is called twice are summed over ranks twice.
            sent = self._outbox.of(index)
            self._outbox.take(index, grad if sent is None else grad + sent.to(grad.device))
        else:
            self.sums[index] = grad if before is not None else grad.to(self._sum_dtype(grad), copy=True)

    def before_backward(self, *, last: bool) -> None:
        """Prepare for one micro-batch; on the `last` one gradients leave the device."""
        self._last = last
        if self._inner is not None:
            self._inner.before_backward(last=last)

    def finish(self) -> None:
        """Send what the last micro-batch had no part in, and zeros for what none had."""
        if self._inner is not None:
            self._inner.finish()
        with torch.no_grad():
            for index in list(self.sums):
                self._outbox.take(index, self.sums.pop(index))
            self._outbox.fill_in(self._sum_dtype)


def listen_to_shards(model: nn.Module, index_of: dict[int, int], receive: Callable[[int, Tensor], None]) -> None:
    """Take the gradients of a sharded model when they are summed over ranks, in the format of the sum.

    [Note: gradients before they are rounded] `fully_shard` hands gradients back in the format of its parameters, here a
    16-bit one. What it has summed in fp32 is seen, before that, by the hook it offers after a reduction: one flat
    tensor, with the parts of the group's parameters in order, each padded to the size that all ranks have.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = fsdp_param_group(module)
        if group is None:
            continue
        module.set_all_reduce_hook(_hook_of(group, index_of, receive))
        for part in map(fsdp_sharded_param, fsdp_params(group)):
            if part.requires_grad:
                part.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]


def gathering_stream(module: nn.Module) -> Any:
    """The stream on which `fully_shard` reads the shards of a module; None for one that is not sharded, or not yet."""
    group = fsdp_param_group(module)
    return None if group is None else fsdp_all_gather_copy_in_stream(group)


def _hook_of(group: Any, index_of: dict[int, int], receive: Callable[[int, Tensor], None]) -> Callable[[Tensor], None]:
    def hook(flat: Tensor) -> None:
        at = 0
        with torch.no_grad():
            for member in fsdp_params_in_reduce_order(group):
                part = fsdp_sharded_param(member)
                if not part.requires_grad:
                    continue
                shape, padded = fsdp_sharded_sizes(member)
                receive(index_of[id(part)], flat[at : at + shape.numel()].view(shape))
                at += padded
        assert at == flat.numel(), "a group's gradients are reduced together"

    return hook


def _forget(param: Tensor) -> None:
    param.grad = None
