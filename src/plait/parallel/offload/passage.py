"""Buckets in files pass through a few rooms of host memory.

[Note: rooms] While one bucket is updated, the next is being read and the one before is being written: three rooms, in
turn. They are all the host memory that the state of any number of parameters takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.ops import FileQueue, Transfer, host_empty
from plait.optim import MakeState
from plait.parallel.offload.buckets import Bucket
from plait.parallel.offload.leaves import PART, leaves
from plait.parallel.offload.shelf import Key, Shelf

ROOMS = 3
_WEIGHT = "weight"


class _Room:
    """Host memory for one bucket at a time."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory: list[Tensor] = []
        self.under_way: list[Transfer] = []
        self.bucket: int | None = None

    def memory(self, number: int, size: int) -> Tensor:
        while len(self._memory) <= number:
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[number].numel() < size:
            self._memory[number] = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory[number] = host_empty(size, dtype=torch.uint8, pinned=self._pinned)
        return self._memory[number]

    def wait(self) -> None:
        transfers, self.under_way = self.under_way, []
        for transfer in transfers:
            transfer.wait()


class Passage:
    """The fp32 weights and optimizer state of buckets in files. Between their turns the tensors have no memory."""

    def __init__(
        self, buckets: Sequence[Bucket], folder: Path, say: Callable[[str], None], *, pinned: bool = False
    ) -> None:
        """`pinned`: a device copies from and to the rooms."""
        self._folder = folder
        self._queue = FileQueue()
        self._buckets = list(buckets)
        self._number = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._weights = [
            Shelf(
                self._queue,
                folder,
                [((index, _WEIGHT), master.dtype, master.shape) for index, master, _ in bucket.items()],
            )
            for bucket in self._buckets
        ]
        self._states: list[Shelf | None] = [None] * len(self._buckets)
        self._packed: dict[Key, Any] = {}
        """States that are several tensors: what they are made of, without the tensors."""
        self._rooms = [_Room(pinned=pinned) for _ in range(ROOMS)]
        self._optimizer: Optimizer | None = None
        for bucket in self._buckets:
            self._hide(bucket)
        if self._weights and not self._weights[0].file.direct:
            why = self._weights[0].file.buffered_because
            say(f"offload: files in {folder} go through the page cache, which is slower: {why}")

    # ---- weights at the start

    def put_weight(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Store the fp32 weights of one parameter."""
        self._weights[self._number[id(bucket)]].put((index, _WEIGHT), values.contiguous()).wait()

    def attach(self, optimizer: Optimizer) -> None:
        """Take over what state the optimizer has from the start."""
        self._optimizer = optimizer
        for number, bucket in enumerate(self._buckets):
            if self._tensors(bucket):
                self._store_states(number, bucket)
                self._hide(bucket)

    # ---- one bucket's turn

    def enter(self, bucket: Bucket) -> None:
        """Give a bucket its tensors, and begin to read the next."""
        number = self._number[id(bucket)]
        room = self._fetch(number)
        room.wait()
        self._show(bucket, self._views(number, room))
        if number + 1 < len(self._buckets):
            self._fetch(number + 1)

    def leave(self, bucket: Bucket) -> None:
        """Begin to write a bucket's tensors back, and take them away."""
        number = self._number[id(bucket)]
        room = self._rooms[number % ROOMS]
        states = self._states[number]
        weights = self._weights[number]
        room.under_way.append(weights.write(room.memory(0, weights.size)))
        if states is None or {key for key, _ in self._tensors(bucket)} != states.places.keys():
            self._store_states(number, bucket)  # the first update has made some, in memory of their own
        else:
            room.under_way.append(states.write(room.memory(1, states.size)))
        room.bucket = None
        self._hide(bucket)

    def is_last(self, bucket: Bucket) -> bool:
        """Whether no other one has its turn after it."""
        return bucket is self._buckets[-1]

    def weights(self, bucket: Bucket) -> list[Tensor]:
        """A bucket's fp32 weights, until the next call: for bringing the model up to date outside of an update."""
        number = self._number[id(bucket)]
        room, shelf = self._rooms[number % ROOMS], self._weights[number]
        room.wait()
        room.bucket = None
        memory = room.memory(0, shelf.size)
        shelf.read(memory).wait()
        return list(shelf.views(memory).values())

    def weight(self, bucket: Bucket, index: int) -> Tensor:
        """The fp32 weights of one parameter, as memory of their file. Nothing may be under way."""
        return self._weights[self._number[id(bucket)]].mapped()[index, _WEIGHT]

    def settle(self) -> None:
        """Wait until the files hold everything."""
        for room in self._rooms:
            room.wait()
            room.bucket = None

    def _fetch(self, number: int) -> _Room:
        room = self._rooms[number % ROOMS]
        if room.bucket != number:
            room.wait()  # for the writing of the bucket that was here
            weights, states = self._weights[number], self._states[number]
            room.under_way.append(weights.read(room.memory(0, weights.size)))
            if states is not None:
                room.under_way.append(states.read(room.memory(1, states.size)))
            room.bucket = number
        return room

    def _views(self, number: int, room: _Room) -> dict[Key, Tensor]:
        weights, states = self._weights[number], self._states[number]
        found = weights.views(room.memory(0, weights.size))
        return found if states is None else found | states.views(room.memory(1, states.size))

    # ---- for checkpoints

    def reveal(self) -> None:
        """Give every bucket its tensors as memory of the files; `hide` takes them away again."""
        self.settle()
        for number, bucket in enumerate(self._buckets):
            for shelf in (self._weights[number], self._states[number]):
                if shelf is not None:
                    self._show(bucket, shelf.mapped())

    def loaded(self) -> None:
        """Somebody wrote into revealed tensors: let the disk have it, past which direct requests would not see it."""
        for shelf in (*self._weights, *self._states):
            if shelf is not None:
                shelf.sync()

    def hide(self) -> None:
        """Take the tensors away; whoever holds one can still use it."""
        for bucket in self._buckets:
            self._hide(bucket)

    def make_room(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> None:
        """Files for the state that a checkpoint is about to fill: for each parameter, what makes each of its states."""
        for number, bucket in enumerate(self._buckets):
            tensors = []
            for index, master, _ in bucket.items():
                whole = torch.empty(master.shape, dtype=master.dtype)
                state = {key: make(whole) for key, make in wanted.get(index, {}).items()}
                tensors += [((index, key), leaf.dtype, leaf.shape) for key, leaf in leaves(state)]
                self._remember(index, state)
            self._states[number] = Shelf(self._queue, self._folder, tensors) if tensors else None

    # ---- the tensors that the optimizer knows

    def _tensors(self, bucket: Bucket) -> list[tuple[Key, Tensor]]:
        assert self._optimizer is not None
        return [
            ((index, key), value)
            for index, master, _ in bucket.items()
            for key, value in leaves(self._optimizer.state.get(master, {}))
        ]

    def _store_states(self, number: int, bucket: Bucket) -> None:
        tensors = self._tensors(bucket)
        shelf = Shelf(self._queue, self._folder, [(key, value.dtype, value.shape) for key, value in tensors])
        for transfer in [shelf.put(key, value.contiguous()) for key, value in tensors]:
            transfer.wait()
        self._states[number] = shelf
        assert self._optimizer is not None
        for index, master, _ in bucket.items():
            self._remember(index, self._optimizer.state[master])

    def _remember(self, index: int, state: Mapping[str, Any]) -> None:
        """What the states of a parameter are made of, for when their tensors come back."""
        for name, value in state.items():
            if hasattr(value, "_replace"):
                empty = {field: None for field in value._fields if isinstance(getattr(value, field), Tensor)}
                self._packed[index, name] = value._replace(**empty)

    def _show(self, bucket: Bucket, tensors: Mapping[Key, Tensor]) -> None:
        masters = dict(zip(bucket.span.indices, bucket.masters, strict=True))
        for (index, key), tensor in tensors.items():
            if key == _WEIGHT:
                masters[index].data = tensor
            else:
                assert self._optimizer is not None
                state = self._optimizer.state[masters[index]]
                name, _, part = key.partition(PART)
                if part:
                    whole = state[name] if hasattr(state.get(name), "_replace") else self._packed[index, name]
                    state[name] = whole._replace(**{part: tensor})
                else:
                    state[name] = tensor

    def _hide(self, bucket: Bucket) -> None:
        for _, master, _ in bucket.items():
            # The right shape, and no memory.
            master.data = torch.empty((), dtype=master.dtype).expand(master.shape)
            state = self._optimizer.state.get(master, {}) if self._optimizer is not None else {}
            for key in {key.partition(PART)[0] for key, _ in leaves(state)}:
                del state[key]
