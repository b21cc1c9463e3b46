"""Gradients of a parameter, from its backward pass to the outbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.gradients import Gradients
from plait.parallel.listening import listen
from plait.parallel.offload.outbox import Outbox
from plait.torch_internals import (
    fsdp_copy_in_stream,
    fsdp_group,
    fsdp_params,
    fsdp_part,
    fsdp_part_sizes,
    fsdp_reduced_in_order,
)
from plait.world import is_sharded, settled_part


class StreamedGradients:
    """Sends each gradient off during the last backward pass of a step; sums those of earlier ones on the device.

    For parameters whose gradients need no other rank, and for those of `fully_shard`, which sums over ranks itself.
    """

    def __init__(
        self, outbox: Outbox, sum_dtype: Callable[[Tensor], torch.dtype], inner: Gradients | None = None
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
        group = fsdp_group(module)
        if group is None:
            continue
        module.set_all_reduce_hook(_hook_of(group, index_of, receive))
        for part in map(fsdp_part, fsdp_params(group)):
            if part.requires_grad:
                part.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]


def gathering_stream(module: nn.Module) -> Any:
    """The stream on which `fully_shard` reads the shards of a module; None for one that is not sharded, or not yet."""
    group = fsdp_group(module)
    return None if group is None else fsdp_copy_in_stream(group)


def _hook_of(group: Any, index_of: dict[int, int], receive: Callable[[int, Tensor], None]) -> Callable[[Tensor], None]:
    def hook(flat: Tensor) -> None:
        at = 0
        with torch.no_grad():
            for member in fsdp_reduced_in_order(group):
                part = fsdp_part(member)
                if not part.requires_grad:
                    continue
                shape, padded = fsdp_part_sizes(member)
                receive(index_of[id(part)], flat[at : at + shape.numel()].view(shape))
                at += padded
        assert at == flat.numel(), "a group's gradients are reduced together"

    return hook


def _forget(param: Tensor) -> None:
    param.grad = None
