"""This rank's trainable weights beyond the device: made, updated, saved and loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from plait.distributed import (
    Bucket,
    BucketSpan,
    CopyStreams,
    GradientOffloadQueue,
    Home,
    OffloadedGradient,
    ParamStream,
    Scratch,
    Sink,
    copy_options,
    map_state,
    optimizer_for,
    plan_spans,
    state_tensors,
    to_local,
)
from plait.kernels import AdamNumbers, ThreadPool, adam_step, host_empty
from plait.optim.base import MakeState
from plait.optim.clip import clip_by_value
from plait.optim.optimizers import supports_grad_scale
from plait.optim.swapper import HOST_BUFFERS, NvmeSwapper
from plait.optim.wrap import bare_step
from plait.torch_internals import foreach_mul_, storage_key

# One bucket's update, by the optimizer itself or by the kernel that does the same in one pass.


@torch.no_grad()
def step_bucket(
    bucket: Bucket,
    grads: Sequence[Tensor],
    rooms: Sequence[Tensor | None],
    factor: float,
    clip_value: float | None,
    crew: ThreadPool | None = None,
) -> None:
    """Update the masters of a bucket with `grads` times `factor`, and round each to its room, where it has one.

    `crew`: the threads that do it, where the kernel of one pass can.
    """
    optimizer = bucket.optimizer
    assert optimizer is not None
    if clip_value is None and _in_one_pass(optimizer, bucket, grads, rooms):
        _step_adam(optimizer, bucket, grads, rooms, factor, crew)
        return
    _step_any(optimizer, bucket, grads, factor, clip_value)
    for master, room in zip(bucket.masters, rooms, strict=True):
        if room is not None:
            room.copy_(master)


def _in_one_pass(optimizer: Optimizer, bucket: Bucket, grads: Sequence[Tensor], rooms: Sequence[Tensor | None]) -> bool:
    """Whether the kernel that widens gradients and rounds weights as it goes can do it, and has something to do."""
    first = bucket.masters[0]
    if type(optimizer).step not in (Adam.step, AdamW.step) or first.device.type != "cpu":
        return False
    asked = all(
        group.get("fused") and not (group["amsgrad"] or group["maximize"] or group["capturable"])
        for group in optimizer.param_groups
    )
    narrow = any(grad.dtype != torch.float32 for grad in grads)
    narrow |= any(room is not None and room.dtype != torch.float32 for room in rooms)
    wide = all(master.dtype == torch.float32 and master.is_contiguous() for master in bucket.masters)
    return asked and narrow and wide


def _step_adam(
    optimizer: Optimizer,
    bucket: Bucket,
    grads: Sequence[Tensor],
    rooms: Sequence[Tensor | None],
    factor: float,
    crew: ThreadPool | None,
) -> None:
    given = {id(master): (grad, room) for master, grad, room in zip(bucket.masters, grads, rooms, strict=True)}
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            state["step"] += 1
            grad, room = given[id(master)]
            numbers = AdamNumbers(
                int(state["step"]),
                float(group["lr"]),
                (float(group["betas"][0]), float(group["betas"][1])),
                float(group["eps"]),
                float(group["weight_decay"]),
                decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
                scale=factor,
            )
            adam_step(numbers, [master], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [room], pool=crew)


def _step_any(optimizer: Any, bucket: Bucket, grads: Sequence[Tensor], factor: float, clip_value: float | None) -> None:
    for master, grad in zip(bucket.masters, grads, strict=True):
        master.grad = grad.to(master.device, master.dtype)
    if supports_grad_scale(optimizer) and clip_value is None:
        if factor != 1.0:
            device = bucket.masters[0].device
            optimizer.grad_scale = torch.full((), 1.0 / factor, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
    else:
        scaled = [master.grad for master in bucket.masters if master.grad is not None]
        if factor != 1.0:
            foreach_mul_(scaled, factor)
        if clip_value is not None:
            clip_by_value(scaled, clip_value)
    bare_step(optimizer)()
    optimizer.grad_scale = optimizer.found_inf = None
    for master in bucket.masters:
        master.grad = None


# The update of weights that live on the host, computed by the device: states come to it, and go home again.
#
# [Note: why states travel] An update does a few operations on each number, so whoever carries its bytes fastest should
# do it. Cores read and write 28 bytes of host memory for a number of AdamW. A link carries 12 to the device and 12
# back, both ways at once, with 8-bit moments half of that; there the arithmetic costs nothing, while cores are busy
# with it for longer than with all of their memory. The new weights are on the device then, where the model wants them.
#
# [Note: three rooms] Tensors travel in pieces of some rows, so the memory of the device for this does not grow with the
# model: one piece comes while one is updated and one goes. Streams keep them in order; the host waits for nothing,
# except where what goes home goes on to a file.


PIECE = 1 << 24
"""Numbers that travel as one."""
DEVICE_BUFFERS = 3
_GRADIENT_BYTES = 4
"""Of a number's gradient at most: those that are summed over micro-batches or ranks come in fp32."""
_APART = 512
"""Tensors in a room begin at multiples of so many bytes, as those of an allocator do."""


class BucketRows(NamedTuple):
    """Some rows of a bucket's tensor."""

    place: int
    """Which of the bucket's tensors."""
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """These rows; a number by itself has none, and is taken whole."""
        return tensor[self.rows] if tensor.ndim else tensor


def cut(shapes: Sequence[torch.Size], most: int) -> list[list[BucketRows]]:
    """Cut tensors into pieces of at most `most` numbers, or of one row that has more; small ones travel together."""
    pieces: list[list[BucketRows]] = [[]]
    room = most
    for place, shape in enumerate(shapes):
        count = shape[0] if shape else 1
        width = max(shape.numel() // max(count, 1), 1)
        begin = 0
        while begin < count or count == 0:
            taken = min(count - begin, max(room // width, 0 if pieces[-1] else 1))
            if taken > 0 or count == 0:
                pieces[-1].append(BucketRows(place, slice(begin, begin + taken)))
                begin, room = begin + taken, room - taken * width
            if count == 0:
                break
            if begin < count:
                pieces.append([])
                room = most
    return [piece for piece in pieces if piece]


class _DeviceBuffer:
    """Memory of the device for one piece at a time."""

    def __init__(self, lanes: CopyStreams, size: int) -> None:
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
    return DEVICE_BUFFERS * min(PIECE, largest) * (4 + state_bytes + _GRADIENT_BYTES)


class DeviceUpdates:
    """Updates buckets whose state is in host memory, on the device; see [Note: three rooms]."""

    def __init__(self, lanes: CopyStreams, *, largest: int, state_bytes: float) -> None:
        """`largest`: numbers of the largest bucket; `state_bytes`: what the optimizer keeps for each."""
        self._lanes = lanes
        size = int(room_bytes(largest, state_bytes) / DEVICE_BUFFERS)
        self._rooms = [_DeviceBuffer(lanes, size) for _ in range(DEVICE_BUFFERS)]
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
        self, bucket: Bucket, sent: Sequence[OffloadedGradient], factor: float, clip_value: float | None, computed: Any
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
        piece: Sequence[BucketRows],
        sent: Sequence[OffloadedGradient],
        new: dict[int, dict[str, Any]],
        scalars: dict[int, dict[str, Tensor]],
        factor: float,
        clip_value: float | None,
        computed: Any,
    ) -> None:
        lanes, optimizer = self._lanes, bucket.optimizer
        assert optimizer is not None
        room = self._rooms[self._turn % DEVICE_BUFFERS]
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
                for key, leaf in state_tensors(state):
                    part.of(home[key]).copy_(leaf, non_blocking=True)
                    lanes.used_by(self._go, leaf)
        room.left = bucket.home = lanes.mark_of(self._go)

    def _gradient(self, part: BucketRows, sent: OffloadedGradient, room: _DeviceBuffer) -> Tensor:
        if sent.tensor.device == self._lanes.device and self._lanes.separate:
            return part.of(sent.tensor)
        self._lanes.order(self._come, sent.mark)
        return room.hold(part.of(sent.tensor))

    def _held(self, part: BucketRows, state: Mapping[str, Any], room: _DeviceBuffer) -> dict[str, Any]:
        """A parameter's state as the device sees it."""
        return {
            key: map_state(value, lambda leaf: room.hold(part.of(leaf)), self._constant_on(self._lanes.device))
            for key, value in state.items()
        }

    def _home(self, bucket: Bucket, part: BucketRows, state: Mapping[str, Any], new: dict[int, dict[str, Any]]) -> Any:
        """Where each tensor of a state belongs: to what is there, or to new memory for all of it."""
        assert bucket.optimizer is not None
        master = bucket.masters[part.place]
        if part.place not in new:
            known = dict(state_tensors(bucket.optimizer.state.get(master, {})))
            wanted = {key: leaf.dtype for key, leaf in state_tensors(state)}
            if {key: leaf.dtype for key, leaf in known.items()} == wanted and self._lies_well(bucket, master, known):
                return known
            rows = master.shape[:1]

            def make(leaf: Tensor) -> Tensor:
                shape = torch.Size((*rows, *leaf.shape[1:]))
                pinned = bucket.span.home == "cpu"
                return self._lanes.host_tensor(shape, leaf.dtype) if pinned else torch.empty(shape, dtype=leaf.dtype)

            constant = self._constant_on(torch.device("cpu"))
            new[part.place] = dict(_scalars(bucket.optimizer.state.get(master, {})))
            new[part.place] |= {
                key: map_state(state[key], make, constant) for key in state.keys() - dict(_scalars(state))
            }
        return dict(state_tensors(new[part.place]))

    def _lies_well(self, bucket: Bucket, master: Tensor, known: Mapping[str, Tensor]) -> bool:
        """Whether a state is where a device copies from without waiting; one that was loaded is not."""
        if bucket.span.home != "cpu" or id(master) in self._at_home:
            return True
        return all(self._lanes.copies_asynchronously(leaf) for leaf in known.values())

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
    bucket: Bucket, piece: Sequence[BucketRows], states: Sequence[Mapping[str, Any]], sent: Sequence[OffloadedGradient]
) -> Iterator[int]:
    """Bytes of a room that each tensor takes at most."""
    for part, state in zip(piece, states, strict=True):
        wholes = [bucket.masters[part.place].data, sent[part.place].tensor, *(leaf for _, leaf in state_tensors(state))]
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


# The update of offloaded weights: bucket by bucket, on a thread of its own.
#
# [Note: what overlaps with what] Gradients leave the device while the backward pass still runs. Whether a step may be
# applied at all is known when the last of them is there: its norm is needed, to clip and to skip what is not finite.
# From then on the buckets are updated one after another, in the order in which the next forward pass wants them. While
# one is computed, the weights of the one before travel to the device, and files of the next are read. The next forward
# pass begins at once, and waits for each unit's buckets when it comes to the unit.


_STAGES = 2
"""Sets of pinned memory for weights on their way back: one is filled while the other is copied."""


class Updates:
    """Updates buckets and brings the model's weights up to date."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lanes: CopyStreams,
        passage: NvmeSwapper | None,
        visits: DeviceUpdates | None = None,
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
        self._crew = None if lanes.fake else ThreadPool(torch.get_num_threads())
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
            bucket.optimizer = optimizer_for(optimizer, bucket.masters)

    # ---- on the thread of the training loop

    def begin(self, sent: dict[int, OffloadedGradient], factor: float, clip_value: float | None) -> None:
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
        self,
        bucket: Bucket,
        sent: Sequence[OffloadedGradient],
        factor: float,
        clip_value: float | None,
        marks: tuple[Any, Any],
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

    def _send_home(self, bucket: Bucket, files: NvmeSwapper) -> None:
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

    def _arrived(self, bucket: Bucket, sent: Sequence[OffloadedGradient], computed: Any) -> list[Tensor]:
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
        with torch.no_grad(), self._lanes.to_device():
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


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """How `Offload` works."""

    home: Home
    limit: int
    """Numbers in one bucket."""
    ratio: float = 0.0
    """Share whose state stays on the device."""
    host_ratio: float = 0.0
    """Share whose state stays in host memory, with the home `nvme`."""
    state_bytes: float = 8.0
    """What the optimizer keeps for each number."""
    delayed: bool = False
    on_device: bool = False
    """Whether the device computes the update."""
    folder: Path | None = None
    """For files; only with the home `nvme`."""


class Offload:
    """fp32 weights, gradients and optimizer state of the trainable parameters, away from the device.

    `masters` are what the optimizer updates. The order in which `order` names the parameters is the order in which
    they are updated, and should be that in which the forward pass wants them.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        *,
        order: Sequence[int],
        lanes: CopyStreams,
        options: OffloadOptions,
        stream: ParamStream | None = None,
        say: Callable[[str], None],
    ) -> None:
        """`dtypes`: of the masters; `stream`: of weights that do not live on the device."""
        with torch.no_grad():
            targets = [to_local(param.detach()) for param in params]
        sinks: list[Sink | None] = [None] * len(params)
        self.stream = stream
        if stream is not None:
            for index, param in enumerate(params):
                if (place := stream.location_of(param)) is not None:
                    targets[index] = stream.target(place, targets[index].shape)
                    sinks[index] = None if not stream.in_files else partial(stream.put, place)
        # Those of `stream`, too: whoever writes weights on the host must know what still reads them.
        self.lanes = lanes
        self.options = options
        shares: list[tuple[Home, float]] = [("device", options.ratio), ("cpu", options.host_ratio), (options.home, 1.0)]
        spans = plan_spans([target.numel() for target in targets], order, limit=options.limit, shares=shares)
        self.buckets = [
            Bucket(
                span,
                [targets[index] for index in span.indices],
                [self._master(span, targets[index], dtypes[index]) for index in span.indices],
                [sinks[index] for index in span.indices],
            )
            for span in spans
        ]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.span.indices}
        masters = {index: master for bucket in self.buckets for index, master, _ in bucket.items()}
        self.masters = [masters[index] for index in range(len(params))]
        self._passage: NvmeSwapper | None = None
        in_files = [bucket for bucket in self.buckets if bucket.span.home == "nvme"]
        if in_files and not self.lanes.fake:
            assert options.folder is not None
            self._passage = NvmeSwapper(in_files, options.folder, say, pinned=options.on_device and self.lanes.separate)
        self.stand_in = torch.empty(int(self._states_on_host()) if self.lanes.fake else 0, dtype=torch.uint8)
        """A plan makes no states; on a CPU their memory counts all the same."""
        self.outbox = GradientOffloadQueue(self.buckets, self.lanes, sets=2 if options.delayed else 1)
        away = (bucket.numel for bucket in self.buckets if bucket.span.home != "device")
        largest = max(away, default=0)  # a rank of many may have nothing of a small model
        visits = (
            DeviceUpdates(self.lanes, largest=largest, state_bytes=options.state_bytes) if options.on_device else None
        )
        self._updates = Updates(self.buckets, self.lanes, self._passage, visits, delayed=options.delayed)
        if stream is not None:
            of_param = {id(param): self.bucket_of[index] for index, param in enumerate(params)}
            stream.follow_updates(of_param, self._updates.wait_for)

    def _master(self, span: BucketSpan, target: Tensor, dtype: torch.dtype) -> nn.Parameter:
        if span.home == "device":
            same = target.dtype == dtype
            return nn.Parameter(target if same else torch.empty_like(target, dtype=dtype))
        if span.home == "cpu":
            if self.options.on_device:
                return nn.Parameter(self.lanes.host_tensor(target.shape, dtype))
            return nn.Parameter(host_empty(*target.shape, dtype=dtype))
        return nn.Parameter(torch.empty((), dtype=dtype).expand(target.shape))

    def host_bytes(self) -> float:
        """Host memory that this takes: masters, states, gradients on their way, and rooms for what is in files."""
        on_host = [bucket for bucket in self.buckets if bucket.span.home == "cpu"]
        grads = sum(target.nbytes for bucket in on_host for target in bucket.targets)
        return self.built_bytes() + self._states_on_host() + grads * (3 if self.options.delayed else 1)

    def built_bytes(self) -> float:
        """Of that, what is there before the first step: masters, and weights that do not live on the device."""
        masters = (bucket.masters for bucket in self.buckets if bucket.span.home == "cpu")
        return sum(master.nbytes for each in masters for master in each) + (
            self.stream.host_bytes() if self.stream else 0
        )

    def _states_on_host(self) -> float:
        """Of that, the states, and the rooms."""
        states = sum(bucket.numel for bucket in self.buckets if bucket.span.home == "cpu") * self.options.state_bytes
        return states + self.room_bytes()

    def room_bytes(self) -> float:
        """Of that, the rooms: as much for a few numbers in files as for many."""
        in_files = sorted((bucket.numel for bucket in self.buckets if bucket.span.home == "nvme"), reverse=True)
        return sum(in_files[:HOST_BUFFERS]) * (4 + self.options.state_bytes)

    # ---- at the start

    def keep(self, index: int, values: Tensor) -> None:
        """Set the fp32 weights of one parameter: this rank's part of them."""
        bucket = self.bucket_of[index]
        master = self.masters[index]
        with torch.no_grad():
            if bucket.span.home == "nvme":
                if self._passage is not None:  # not in a plan
                    self._passage.put_weight(bucket, index, values.detach().to("cpu", master.dtype))
            else:
                master.copy_(values)

    def attach(self, optimizer: Optimizer) -> None:
        """Learn what updates the masters."""
        self._updates.attach(optimizer)
        if self._passage is not None:
            self._passage.attach(optimizer)

    # ---- a step

    def begin(self, factor: float, clip_value: float | None) -> None:
        """Update all weights with the gradients in the outbox times `factor`; it goes on while this returns."""
        if self.stream is not None:
            self.stream.restart()
        self._updates.begin(self.outbox.take_all(), factor, clip_value)

    def wait_for(self, buckets: Sequence[Bucket], gathering: Any = None) -> None:
        """Until the model has the new weights of these buckets; `gathering` is a stream that reads them too."""
        for bucket in buckets:
            self._updates.wait_for(bucket, gathering)

    def finish(self) -> None:
        """Until no update is under way; the model may not have seen all of its weights."""
        self._updates.finish()

    def settle(self) -> None:
        """Until no update is under way and the model has all new weights."""
        self._updates.settle()

    def publish(self) -> None:
        """Bring the model up to date with the masters, which somebody has set."""
        self._updates.finish()
        if self._passage is not None:
            self._passage.loaded()
        self._updates.publish()
        if self.stream is not None:
            self.stream.restart()

    # ---- for checkpoints

    @contextmanager
    def revealed(self) -> Iterator[None]:
        """Masters and optimizer state are ordinary tensors meanwhile, those in files as memory of the files."""
        self.settle()
        if self._passage is None:
            yield
            return
        self._passage.reveal()
        try:
            yield
        finally:
            self._passage.hide()

    def weight(self, index: int) -> Tensor:
        """The fp32 weights of one parameter; those in a file as memory of the file."""
        self.settle()
        bucket = self.bucket_of[index]
        if self._passage is not None and bucket.span.home == "nvme":
            return self._passage.weight(bucket, index)
        return self.masters[index].detach()

    def in_files(self, index: int) -> bool:
        """Whether the state of a parameter lies in files."""
        return self._passage is not None and self.bucket_of[index].span.home == "nvme"

    def make_room(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> None:
        """Make files for the optimizer state of parameters."""
        self.settle()
        if self._passage is not None:
            self._passage.make_room(wanted)
