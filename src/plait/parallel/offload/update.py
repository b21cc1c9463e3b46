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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.ops import Crew
from plait.parallel.offload.buckets import Bucket, copy_options, twin
from plait.parallel.offload.lanes import Lanes, Scratch
from plait.parallel.offload.outbox import Sent
from plait.parallel.offload.passage import Passage
from plait.parallel.offload.step import step_bucket
from plait.parallel.offload.visit import Visits
from plait.torch_internals import storage_key

_STAGES = 2
"""Sets of pinned memory for weights on their way back: one is filled while the other is copied."""


class Updates:
    """Updates buckets and brings the model's weights up to date."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lanes: Lanes,
        passage: Passage | None,
        visits: Visits | None = None,
        *,
        delayed: bool,
    ) -> None:
        """`visits`: what updates on the device; without it the CPU does."""
        self._buckets = buckets
        self._lanes = lanes
        self._passage = passage
        self._visits = visits
        self._leaving: Bucket | None = None
        """A bucket of files that is on its way home from the device."""
        self._delayed = delayed
        self._optimizer: Optimizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plait-offload", initializer=lanes.enter_thread)
        self._crew = None if lanes.fake else Crew(torch.get_num_threads())
        self._wide = Scratch(lanes)
        self._narrow = [Scratch(lanes) for _ in range(_STAGES)]
        self._turn = 0
        self._late: list[tuple[Bucket, list[Tensor]]] = []
        """Updated weights that the model has not seen yet, with `delayed`."""
        self._late_rooms: dict[int, Scratch] = {}

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
        marks = self._lanes.mark(), self._lanes.mark_back()
        for bucket in self._buckets:
            assert bucket.optimizer is not None
            copy_options(self._optimizer, bucket.optimizer)
            grads = [sent[index] for index in bucket.span.indices]
            if bucket.span.home == "device":
                rooms = [None if _shares(master, target) else target for _, master, target in bucket.items()]
                step_bucket(bucket, [grad.tensor for grad in grads], rooms, factor, clip_value)
            else:
                bucket.update = self._submit(partial(self._update, bucket, grads, factor, clip_value, marks))

    def wait_for(self, bucket: Bucket, gathering: Any = None) -> None:
        """Until the model has a bucket's new weights; the device waits by itself for those that are on their way.

        `gathering` is a stream that reads them too.
        """
        if self._delayed:
            return
        if bucket.update is not None:
            bucket.update.result()
            bucket.update = None
        self._lanes.follow(bucket.published)
        if bucket.published is not None and gathering is not None:
            gathering.wait_event(bucket.published)
        bucket.published = None

    def finish(self) -> None:
        """Wait for the updates under way."""
        for bucket in self._buckets:
            if bucket.update is not None:
                bucket.update.result()
                bucket.update = None
        if self._visits is not None:
            self._visits.settle()
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
            self._deliver(bucket, rooms)
        for bucket, _ in late:
            self._lanes.follow(bucket.published)

    def publish(self) -> None:
        """Give the model all weights as they are in the masters: after they were made or loaded."""
        self._late = []
        if self._visits is not None:
            self._visits.forget()
        for bucket in self._buckets:
            weights: Sequence[Tensor] = bucket.masters
            if bucket.span.home == "nvme" and self._passage is not None:
                weights = self._passage.weights(bucket)
            with torch.no_grad():
                for target, sink, weight in zip(bucket.targets, bucket.sinks, weights, strict=True):
                    if sink is not None:
                        sink(weight.detach().to(target.dtype))
                    elif not _shares(weight, target):
                        target.copy_(weight)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if not self._lanes.fake:
            return self._thread.submit(work)
        done: Future[None] = Future()
        done.set_result(None)  # a plan: what the host does costs the device nothing
        return done

    # ---- on the thread of the updates

    def _update(
        self, bucket: Bucket, sent: Sequence[Sent], factor: float, clip_value: float | None, marks: tuple[Any, Any]
    ) -> None:
        computed, fetched = marks
        if fetched is not None:
            fetched.synchronize()  # weights that live on the host may have been on their way to the device
        files = self._passage if bucket.span.home == "nvme" else None
        if files is not None:
            files.enter(bucket)
        if self._visits is not None:
            self._visits.update(bucket, sent, factor, clip_value, computed)
            if files is not None:
                self._send_home(bucket, files)
            return
        rooms = self._rooms(bucket)
        step_bucket(bucket, self._arrived(bucket, sent, computed), rooms, factor, clip_value, self._crew)
        if files is not None:
            files.leave(bucket)
        if self._delayed:
            self._late.append((bucket, rooms))
        else:
            self._lanes.hold_back(computed)
            self._deliver(bucket, rooms)

    def _send_home(self, bucket: Bucket, files: Passage) -> None:
        """Let the bucket before go to its file, now that this one is on its way; the last one goes at once."""
        assert self._visits is not None
        waiting = [self._leaving] if self._leaving is not None else []
        self._leaving = bucket
        if files.is_last(bucket):
            waiting, self._leaving = [*waiting, bucket], None
        for each in waiting:
            if each.home is not None:
                each.home.synchronize()
            files.leave(each)

    def _arrived(self, bucket: Bucket, sent: Sequence[Sent], computed: Any) -> list[Tensor]:
        """The gradients on the host."""
        rooms = self._wide.views([(each.tensor.shape, each.tensor.dtype) for each in sent])
        grads: list[Tensor] = []
        for each, room in zip(sent, rooms, strict=True):
            if each.mark is not None:
                each.mark.synchronize()
            if each.tensor.device.type == "cpu":
                grads.append(each.tensor.contiguous())
            else:
                self._lanes.fetch(room, each.tensor, computed)
                grads.append(room)
        return grads

    def _rooms(self, bucket: Bucket) -> list[Tensor]:
        """Where the new weights are rounded to: what the model computes with, where that is host memory."""
        needed = [(target.shape, target.dtype) for target in bucket.targets]
        if self._delayed:
            if bucket.published is not None:
                bucket.published.synchronize()  # the last ones were still being copied
            return self._late_rooms.setdefault(id(bucket), Scratch(self._lanes)).views(needed)
        scratch = self._narrow[self._turn % _STAGES]
        self._turn += 1
        scratch.wait()
        rooms = scratch.views(needed)
        return [
            target if sink is None and target.device.type == "cpu" else room
            for target, sink, room in zip(bucket.targets, bucket.sinks, rooms, strict=True)
        ]

    def _deliver(self, bucket: Bucket, rooms: Sequence[Tensor]) -> None:
        with torch.no_grad(), self._lanes.backwards():
            for target, sink, room in zip(bucket.targets, bucket.sinks, rooms, strict=True):
                if sink is not None:
                    sink(room)
                elif target is not room:
                    target.copy_(room, non_blocking=True)
        bucket.published = self._lanes.mark_back()
        if not self._delayed:
            self._narrow[(self._turn - 1) % _STAGES].mark = bucket.published


def _shares(master: Tensor, target: Tensor) -> bool:
    return master.device == target.device and storage_key(master) == storage_key(target)
