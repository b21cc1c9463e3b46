"""The update of offloaded weights: bucket by bucket, on a thread of its own.

[Note: what overlaps with what] Gradients leave the device while the backward pass still runs. Whether a step may be
applied at all is known when the last of them is there: its norm is needed, to clip and to skip what is not finite. From
then on the buckets are updated one after another, in the order in which the next forward pass wants them. While one is
computed, the weights of the one before travel to the device, and files of the next are read. The next forward pass
begins at once, and waits for each unit's buckets when it comes to the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.optim import bare_step, clip_by_value, supports_grad_scale
from plait.parallel.offload.buckets import Bucket, copy_options, twin
from plait.parallel.offload.lanes import Lanes
from plait.parallel.offload.outbox import Sent
from plait.parallel.offload.passage import Passage

_STAGES = 2
"""Sets of pinned memory for weights on their way back: one is filled while the other is copied."""


class Updates:
    """Updates buckets and brings the model's weights up to date."""

    def __init__(self, buckets: Sequence[Bucket], lanes: Lanes, passage: Passage | None, *, delayed: bool) -> None:
        self._buckets = buckets
        self._lanes = lanes
        self._passage = passage
        self._delayed = delayed
        self._optimizer: Optimizer | None = None
        self._inline = lanes.fake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plait-offload")
        self._wide = _Scratch(lanes)
        self._narrow = [_Scratch(lanes) for _ in range(_STAGES)]
        self._turn = 0
        self._late: list[tuple[Bucket, list[Tensor]]] = []
        """Updated weights that the model has not seen yet, with `delayed`."""
        self._late_rooms: dict[int, _Scratch] = {}

    def attach(self, optimizer: Optimizer) -> None:
        """Learn what updates the weights."""
        self._optimizer = optimizer
        for bucket in self._buckets:
            bucket.optimizer = twin(optimizer, bucket.masters)

    # ---- on the thread of the training loop

    def begin(self, sent: dict[int, Sent], factor: float, clip_value: float | None) -> None:
        """Update all buckets with these gradients times `factor`; returns while that is going on."""
        assert self._optimizer is not None
        self.finish()
        self.show_late()
        computed = self._lanes.mark()
        for bucket in self._buckets:
            assert bucket.optimizer is not None
            copy_options(self._optimizer, bucket.optimizer)
            grads = [sent[index] for index in bucket.span.indices]
            if bucket.span.home == "device":
                self._step(bucket, [grad.tensor for grad in grads], factor, clip_value)
                self._to_targets_here(bucket)
            else:
                bucket.update = self._submit(lambda b=bucket, g=grads: self._update(b, g, factor, clip_value, computed))  # type: ignore[misc]

    def wait_for(self, bucket: Bucket) -> None:
        """Until the model has a bucket's new weights; the device waits by itself for those that are on their way."""
        if self._delayed:
            return
        if bucket.update is not None:
            bucket.update.result()
            bucket.update = None
        self._lanes.follow(bucket.published)
        bucket.published = None

    def finish(self) -> None:
        """Wait for the updates under way."""
        for bucket in self._buckets:
            if bucket.update is not None:
                bucket.update.result()
                bucket.update = None
        if self._passage is not None:
            self._passage.settle()

    def settle(self) -> None:
        """Wait until updates are done, the model has the new weights, and files hold everything."""
        self.finish()
        self.show_late()
        for bucket in self._buckets:
            self._lanes.follow(bucket.published)
            bucket.published = None

    def show_late(self) -> None:
        """Give the model the weights of a delayed update."""
        late, self._late = self._late, []
        self._lanes.hold_back(self._lanes.mark())
        for bucket, rooms in late:
            self._send_back(bucket, rooms)
        for bucket, _ in late:
            self._lanes.follow(bucket.published)

    def publish(self) -> None:
        """Give the model all weights as they are in the masters: after they were made or loaded."""
        self._late = []
        for bucket in self._buckets:
            if bucket.span.home == "device":
                self._to_targets_here(bucket)
                continue
            weights: Sequence[Tensor] = bucket.masters
            if bucket.span.home == "nvme":
                assert self._passage is not None
                weights = self._passage.weights(bucket)
            with torch.no_grad():
                for target, master in zip(bucket.targets, weights, strict=True):
                    target.copy_(master)

    def _to_targets_here(self, bucket: Bucket) -> None:
        with torch.no_grad():
            for _, master, target in bucket.items():
                if master.data_ptr() != target.data_ptr() or master.dtype != target.dtype:
                    target.copy_(master)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if not self._inline:
            return self._thread.submit(work)
        done: Future[None] = Future()
        work()
        done.set_result(None)
        return done

    # ---- on the thread of the updates

    def _update(
        self, bucket: Bucket, sent: Sequence[Sent], factor: float, clip_value: float | None, computed: Any
    ) -> None:
        files = self._passage if bucket.span.home == "nvme" else None
        if files is not None:
            files.enter(bucket)
        self._step(bucket, self._arrived(bucket, sent, computed), factor, clip_value)
        self._to_targets(bucket, computed)
        if files is not None:
            files.leave(bucket)

    def _arrived(self, bucket: Bucket, sent: Sequence[Sent], computed: Any) -> list[Tensor]:
        """The gradients on the host, in the format of the weights."""
        wide = self._wide.views(bucket.masters, [master.dtype for master in bucket.masters])
        grads: list[Tensor] = []
        for each, room, master in zip(sent, wide, bucket.masters, strict=True):
            if each.mark is not None:
                each.mark.synchronize()
            if each.tensor.device.type == "cpu" and each.tensor.dtype == master.dtype:
                grads.append(each.tensor)
                continue
            if each.tensor.device.type == "cpu" or self._inline:
                room.copy_(each.tensor)
            else:
                self._lanes.fetch(room, each.tensor, computed)
            grads.append(room)
        return grads

    def _step(self, bucket: Bucket, grads: Sequence[Tensor], factor: float, clip_value: float | None) -> None:
        optimizer: Any = bucket.optimizer
        with torch.no_grad():
            for master, grad in zip(bucket.masters, grads, strict=True):
                master.grad = grad if grad.dtype == master.dtype else grad.to(master.dtype)
            if supports_grad_scale(optimizer) and clip_value is None:
                if factor != 1.0:
                    device = bucket.masters[0].device
                    optimizer.grad_scale = torch.full((), 1.0 / factor, device=device)
                    optimizer.found_inf = torch.zeros((), device=device)
            else:
                scaled = [master.grad for master in bucket.masters if master.grad is not None]
                if factor != 1.0:
                    torch._foreach_mul_(scaled, factor)
                if clip_value is not None:
                    clip_by_value(scaled, clip_value)
            bare_step(optimizer)()
            optimizer.grad_scale = optimizer.found_inf = None
        for master in bucket.masters:
            master.grad = None

    def _to_targets(self, bucket: Bucket, computed: Any) -> None:
        """Round the new weights to what the model computes with, and send them off."""
        with torch.no_grad():
            if self._delayed:
                self._late.append((bucket, self._rounded(bucket, self._late_rooms_of(bucket))))
                return
            if not self._lanes.separate or self._inline or bucket.targets[0].device.type == "cpu":
                for _, master, target in bucket.items():
                    target.copy_(master)
                return
            self._lanes.hold_back(computed)
            scratch = self._narrow[self._turn % _STAGES]
            self._turn += 1
            scratch.wait()
            self._send_back(bucket, self._rounded(bucket, scratch))
            scratch.mark = bucket.published

    def _late_rooms_of(self, bucket: Bucket) -> _Scratch:
        scratch = self._late_rooms.setdefault(id(bucket), _Scratch(self._lanes))
        if bucket.published is not None:
            bucket.published.synchronize()  # the last ones were still being copied
        return scratch

    def _rounded(self, bucket: Bucket, scratch: _Scratch) -> list[Tensor]:
        rooms = scratch.views(bucket.masters, [target.dtype for target in bucket.targets])
        for room, master in zip(rooms, bucket.masters, strict=True):
            room.copy_(master)
        return rooms

    def _send_back(self, bucket: Bucket, rooms: Sequence[Tensor]) -> None:
        with torch.no_grad(), self._lanes.backwards():
            for target, room in zip(bucket.targets, rooms, strict=True):
                target.copy_(room, non_blocking=True)
        bucket.published = self._lanes.mark_back()


class _Scratch:
    """Host memory that one bucket after another uses; it grows to the largest and is kept."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.mark: Any = None

    def wait(self) -> None:
        """Until the device has read what was here."""
        if self.mark is not None:
            self.mark.synchronize()
            self.mark = None

    def views(self, like: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """A tensor for each of `like`, of these dtypes, unfilled."""
        sizes = [-(-tensor.numel() * dtype.itemsize // 64) * 64 for tensor, dtype in zip(like, dtypes, strict=True)]
        if self._memory.numel() < sum(sizes):
            self._memory = self._lanes.room(torch.Size((sum(sizes),)), torch.uint8)
        pieces = self._memory[: sum(sizes)].split_with_sizes(sizes)
        return [
            piece[: tensor.numel() * dtype.itemsize].view(dtype).view(tensor.shape)
            for piece, tensor, dtype in zip(pieces, like, dtypes, strict=True)
        ]
