"""Gradients on their way to where the update is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.parallel.offload.buckets import Bucket
from plait.parallel.offload.lanes import Lanes
from plait.torch_internals import foreach_norm


class Sent(NamedTuple):
    """A gradient for the update: on the host once the mark has passed, or still on the device."""

    tensor: Tensor
    mark: Any


class Outbox:
    """Takes each parameter's complete gradient as soon as there is one, in any order, beside the backward pass.

    Gradients of parameters whose state is in host memory go there at once, so that the device is rid of them. Those of
    a bucket in files stay on the device until its turn comes: host memory is what files are to spare.
    """

    def __init__(self, buckets: Sequence[Bucket], lanes: Lanes, *, sets: int) -> None:
        """`sets`: of host memory; two where one is still read while the next backward pass fills the other."""
        self._lanes = lanes
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.span.indices}
        self._rooms: list[dict[int, Tensor]] = [{} for _ in range(sets)]
        self._sent: dict[int, Sent] = {}
        self._norms: dict[int, Tensor] = {}

    def take(self, index: int, grad: Tensor) -> None:
        """Send a complete gradient off. Its norm is computed where it is."""
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        self._norms[index] = foreach_norm([grad], 2, dtype=wide)[0]
        bucket = self._bucket_of[index]
        if bucket.span.home != "cpu":
            self._sent[index] = Sent(grad, None)
            return
        if len(self._rooms) == 1:  # of a parameter that took no part since, an update may still read the room
            if bucket.update is not None:
                bucket.update.result()
            self._lanes.follow(bucket.published)
        room = self._room(index, grad)
        self._sent[index] = Sent(room, self._lanes.out(room, grad))

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

    def hand_over(self) -> dict[int, Sent]:
        """All gradients, for an update; the next ones go to another set of rooms, where there are two."""
        sent, self._sent = self._sent, {}
        self._norms = {}
        self._rooms.append(self._rooms.pop(0))
        return sent

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped."""
        self._sent, self._norms = {}, {}
