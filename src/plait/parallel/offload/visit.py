"""The update of weights that live on the host, computed by the device: states come to it, and go home again.

[Note: why states travel] An update does a few operations on each number, so whoever carries its bytes fastest should
do it. Cores read and write 28 bytes of host memory for a number of AdamW. A link carries 12 to the device and 12 back,
both ways at once, with 8-bit moments half of that; there the arithmetic costs nothing, while cores are busy with it for
longer than with all of their memory. The new weights are on the device then, where the model wants them.

[Note: three rooms] Tensors travel in pieces of some rows, so the memory of the device for this does not grow with the
model: one piece comes while one is updated and one goes. Streams keep them in order; the host waits for nothing, except
where what goes home goes on to a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.parallel.offload.buckets import Bucket
from plait.parallel.offload.lanes import Lanes
from plait.parallel.offload.leaves import leaves, mapped
from plait.parallel.offload.outbox import Sent
from plait.parallel.offload.step import step_bucket

PIECE = 1 << 24
"""Numbers that travel as one."""
ROOMS = 3
_GRADIENT_BYTES = 4
"""Of a number's gradient at most: those that are summed over micro-batches or ranks come in fp32."""
_APART = 512
"""Tensors in a room begin at multiples of so many bytes, as those of an allocator do."""


class Part(NamedTuple):
    """Some rows of a bucket's tensor."""

    place: int
    """Which of the bucket's tensors."""
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """These rows; a number by itself has none, and is taken whole."""
        return tensor[self.rows] if tensor.ndim else tensor


def cut(shapes: Sequence[torch.Size], most: int) -> list[list[Part]]:
    """Cut tensors into pieces of at most `most` numbers, or of one row that has more; small ones travel together."""
    pieces: list[list[Part]] = [[]]
    room = most
    for place, shape in enumerate(shapes):
        count = shape[0] if shape else 1
        width = max(shape.numel() // max(count, 1), 1)
        begin = 0
        while begin < count or count == 0:
            taken = min(count - begin, max(room // width, 0 if pieces[-1] else 1))
            if taken > 0 or count == 0:
                pieces[-1].append(Part(place, slice(begin, begin + taken)))
                begin, room = begin + taken, room - taken * width
            if count == 0:
                break
            if begin < count:
                pieces.append([])
                room = most
    return [piece for piece in pieces if piece]


class _Room:
    """Memory of the device for one piece at a time."""

    def __init__(self, lanes: Lanes, size: int) -> None:
        self._lanes = lanes
        self._memory = torch.empty(size, dtype=torch.uint8, device=lanes.device)
        self._taken = 0
        self.left: Any = None
        """A mark: all that was here is at home."""

    def fit(self, size: int) -> None:
        """See that there is room for so many bytes; what was here must have left."""
        self._taken = 0
        if size > self._memory.numel():
            self.wait()
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._lanes.device)

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the host, on its way."""
        begin, size = self._taken, tensor.numel() * tensor.element_size()
        self._taken += -(-size // _APART) * _APART
        held = self._memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Until what was here is at home."""
        if self.left is not None:
            self.left.synchronize()


def room_bytes(largest: float, state_bytes: float) -> float:
    """Memory of the device that visits take, where a bucket has at most so many numbers."""
    return ROOMS * min(PIECE, largest) * (4 + state_bytes + _GRADIENT_BYTES)


class Visits:
    """Updates buckets whose state is in host memory, on the device; see [Note: three rooms]."""

    def __init__(self, lanes: Lanes, *, largest: int, state_bytes: float) -> None:
        """`largest`: numbers of the largest bucket; `state_bytes`: what the optimizer keeps for each."""
        self._lanes = lanes
        size = int(room_bytes(largest, state_bytes) / ROOMS)
        self._rooms = [_Room(lanes, size) for _ in range(ROOMS)]
        self._come, self._work, self._go = (lanes.stream() for _ in range(3))
        lanes.order(self._come, lanes.mark())  # the rooms' memory may have been somebody else's until now
        self._turn = 0
        self._constants: dict[tuple[int, torch.device], tuple[Any, Any]] = {}
        self._at_home: set[int] = set()
        """Parameters whose state lies where copies need not be waited for."""

    def forget(self) -> None:
        """Somebody has set states: look again where they lie."""
        self._at_home.clear()

    def update(
        self, bucket: Bucket, sent: Sequence[Sent], factor: float, clip_value: float | None, computed: Any
    ) -> None:
        """Update a bucket with these gradients times `factor`, once `computed` has passed; returns before it is done.

        The model's own weights are written by then, too: `bucket.published` marks it.
        """
        new: dict[int, dict[str, Any]] = {}
        scalars: dict[int, dict[str, Tensor]] = {}
        for piece in cut([master.shape for master in bucket.masters], PIECE):
            self._visit(bucket, piece, sent, new, scalars, factor, clip_value, computed)
        assert bucket.optimizer is not None
        for place, master in enumerate(bucket.masters):
            state = bucket.optimizer.state[master]
            if place in new:
                state.clear()
                state.update(new[place])
            _keep_scalars(state, scalars[place])
        if bucket.span.home == "cpu":
            self._at_home.update(id(master) for master in bucket.masters)

    def settle(self) -> None:
        """Wait until everything is at home."""
        for room in self._rooms:
            room.wait()

    def _visit(
        self,
        bucket: Bucket,
        piece: Sequence[Part],
        sent: Sequence[Sent],
        new: dict[int, dict[str, Any]],
        scalars: dict[int, dict[str, Tensor]],
        factor: float,
        clip_value: float | None,
        computed: Any,
    ) -> None:
        lanes, optimizer = self._lanes, bucket.optimizer
        assert optimizer is not None
        room = self._rooms[self._turn % ROOMS]
        self._turn += 1
        states = [optimizer.state.get(bucket.masters[part.place], {}) for part in piece]
        lanes.order(self._come, room.left)
        with torch.no_grad(), lanes.on(self._come):
            room.fit(sum(_sizes(bucket, piece, states, sent)))
            guests = [nn.Parameter(room.hold(part.of(bucket.masters[part.place].data))) for part in piece]
            held = [self._held(part, state, room) for part, state in zip(piece, states, strict=True)]
            grads = [self._gradient(part, sent[part.place], room) for part in piece]
        arrived = lanes.mark_of(self._come)
        lanes.order(self._work, arrived)
        lanes.order(self._work, computed)
        visitor = _visitor(optimizer, {id(bucket.masters[p.place]): g for p, g in zip(piece, guests, strict=True)})
        with torch.no_grad(), lanes.on(self._work):
            for guest, state in zip(guests, held, strict=True):
                if state:
                    visitor.state[guest] = state | _own_scalars(state, visitor, guest)
            there = replace(bucket, masters=guests, targets=[], sinks=[], optimizer=visitor)
            rooms = [part.of(bucket.targets[part.place]) for part in piece]
            step_bucket(there, grads, rooms, factor, clip_value)
            for grad in grads:
                lanes.used_by(self._work, grad)
        bucket.published = lanes.mark_of(self._work)
        lanes.order(self._go, bucket.published)
        with torch.no_grad(), lanes.on(self._go):
            for part, guest in zip(piece, guests, strict=True):
                state = visitor.state[guest]
                part.of(bucket.masters[part.place].data).copy_(guest.data, non_blocking=True)
                home = self._home(bucket, part, state, new)
                scalars[part.place] = dict(_scalars(state))
                for key, leaf in leaves(state):
                    part.of(home[key]).copy_(leaf, non_blocking=True)
                    lanes.used_by(self._go, leaf)
        room.left = bucket.home = lanes.mark_of(self._go)

    def _gradient(self, part: Part, sent: Sent, room: _Room) -> Tensor:
        if sent.tensor.device == self._lanes.device and self._lanes.separate:
            return part.of(sent.tensor)
        self._lanes.order(self._come, sent.mark)
        return room.hold(part.of(sent.tensor))

    def _held(self, part: Part, state: Mapping[str, Any], room: _Room) -> dict[str, Any]:
        """A parameter's state as the device sees it."""
        return {
            key: mapped(value, lambda leaf: room.hold(part.of(leaf)), self._constant_on(self._lanes.device))
            for key, value in state.items()
        }

    def _home(self, bucket: Bucket, part: Part, state: Mapping[str, Any], new: dict[int, dict[str, Any]]) -> Any:
        """Where each tensor of a state belongs: to what is there, or to new memory for all of it."""
        assert bucket.optimizer is not None
        master = bucket.masters[part.place]
        if part.place not in new:
            known = dict(leaves(bucket.optimizer.state.get(master, {})))
            wanted = {key: leaf.dtype for key, leaf in leaves(state)}
            if {key: leaf.dtype for key, leaf in known.items()} == wanted and self._lies_well(bucket, master, known):
                return known
            rows = master.shape[:1]

            def make(leaf: Tensor) -> Tensor:
                shape = torch.Size((*rows, *leaf.shape[1:]))
                pinned = bucket.span.home == "cpu"
                return self._lanes.room(shape, leaf.dtype) if pinned else torch.empty(shape, dtype=leaf.dtype)

            constant = self._constant_on(torch.device("cpu"))
            new[part.place] = dict(_scalars(bucket.optimizer.state.get(master, {})))
            new[part.place] |= {key: mapped(state[key], make, constant) for key in state.keys() - dict(_scalars(state))}
        return dict(leaves(new[part.place]))

    def _lies_well(self, bucket: Bucket, master: Tensor, known: Mapping[str, Tensor]) -> bool:
        """Whether a state is where a device copies from without waiting; one that was loaded is not."""
        if bucket.span.home != "cpu" or id(master) in self._at_home:
            return True
        return all(self._lanes.is_room(leaf) for leaf in known.values())

    def _constant_on(self, device: torch.device) -> Callable[[Any], Any]:
        """Tables that states refer to, moved once."""

        def move(value: Any) -> Any:
            key = id(value), device
            if key not in self._constants:
                there = type(value)(*(each.to(device) if isinstance(each, Tensor) else each for each in value))
                self._constants[key] = value, there  # the first is kept so that its id stays its own
            return self._constants[key][1]

        return move


def _sizes(
    bucket: Bucket, piece: Sequence[Part], states: Sequence[Mapping[str, Any]], sent: Sequence[Sent]
) -> Iterator[int]:
    """Bytes of a room that each tensor takes at most."""
    for part, state in zip(piece, states, strict=True):
        wholes = [bucket.masters[part.place].data, sent[part.place].tensor, *(leaf for _, leaf in leaves(state))]
        for whole in wholes:
            some = part.of(whole)
            yield -(-some.numel() * some.element_size() // _APART) * _APART


def _visitor(optimizer: Optimizer, guests: Mapping[int, nn.Parameter]) -> Optimizer:
    """The same optimizer for parameters that stand for some of its own, with a state of its own."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [
        {**group, "params": [guests[id(param)] for param in group["params"] if id(param) in guests]}
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    return other


def _scalars(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What a state counts: one number for a whole parameter."""
    return ((key, value) for key, value in state.items() if isinstance(value, Tensor) and value.ndim == 0)


def _own_scalars(state: Mapping[str, Any], optimizer: Optimizer, guest: nn.Parameter) -> dict[str, Tensor]:
    """Copies of what a state counts, where the optimizer wants them: each piece of a parameter counts by itself."""
    group = next(each for each in optimizer.param_groups if any(param is guest for param in each["params"]))
    there = guest.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {key: torch.full((), value.item(), dtype=value.dtype, device=there) for key, value in _scalars(state)}


def _keep_scalars(state: dict[str, Any], counted: Mapping[str, Tensor]) -> None:
    """Take over what a piece has counted; the number of steps is known without asking the device for it."""
    for key, value in counted.items():
        known = state.setdefault(key, torch.zeros((), dtype=value.dtype))
        if key == "step" and value.device != known.device:
            known += 1
        else:
            known.copy_(value)
