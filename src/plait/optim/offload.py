"""Offloaded optimizer state: this rank's fp32 weights, gradients and optimizer states in host memory or in files.

Terms: *masters* are the fp32 weights that the optimizer updates; *states* are the optimizer's, such as Adam's moments.
Both are stored in *buckets* of several parameters, which are updated one at a time. The *home* of a bucket is where its
masters and states are stored: `device`, `cpu` (host memory) or `nvme` (files). `targets` are the weights that the model
computes with, into which updated masters are rounded.
"""

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

# The update of one bucket: by the optimizer itself, or by a kernel that also casts gradients and rounds weights.


@torch.no_grad()
def step_bucket(
    bucket: Bucket,
    grads: Sequence[Tensor],
    rounded: Sequence[Tensor | None],
    factor: float,
    clip_value: float | None,
    threads: ThreadPool | None = None,
) -> None:
    """Update the masters of a bucket with `grads` times `factor`; copy each to its tensor in `rounded`, unless None.

    `threads` run the one-pass CPU kernel, if it supports the optimizer (`_in_one_pass`).
    """
    optimizer = bucket.optimizer
    assert optimizer is not None
    if clip_value is None and _in_one_pass(optimizer, bucket, grads, rounded):
        _step_adam(optimizer, bucket, grads, rounded, factor, threads)
        return
    _step_any(optimizer, bucket, grads, factor, clip_value)
    for master, target in zip(bucket.masters, rounded, strict=True):
        if target is not None:
            target.copy_(master)


def _in_one_pass(
    optimizer: Optimizer, bucket: Bucket, grads: Sequence[Tensor], rounded: Sequence[Tensor | None]
) -> bool:
    """Whether to use the one-pass CPU kernel, which casts gradients to fp32, updates, and rounds weights in one loop.

    It supports Adam and AdamW with `fused`, and saves time only if gradients or weights are not fp32.
    """
    first = bucket.masters[0]
    if type(optimizer).step not in (Adam.step, AdamW.step) or first.device.type != "cpu":
        return False
    asked = all(
        group.get("fused") and not (group["amsgrad"] or group["maximize"] or group["capturable"])
        for group in optimizer.param_groups
    )
    narrow = any(grad.dtype != torch.float32 for grad in grads)
    narrow |= any(target is not None and target.dtype != torch.float32 for target in rounded)
    wide = all(master.dtype == torch.float32 and master.is_contiguous() for master in bucket.masters)
    return asked and narrow and wide


def _step_adam(
    optimizer: Optimizer,
    bucket: Bucket,
    grads: Sequence[Tensor],
    rounded: Sequence[Tensor | None],
    factor: float,
    threads: ThreadPool | None,
) -> None:
    by_master = {
        id(master): (grad, target) for master, grad, target in zip(bucket.masters, grads, rounded, strict=True)
    }
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            state["step"] += 1
            grad, target = by_master[id(master)]
            numbers = AdamNumbers(
                int(state["step"]),
                float(group["lr"]),
                (float(group["betas"][0]), float(group["betas"][1])),
                float(group["eps"]),
                float(group["weight_decay"]),
                decoupled=type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
                scale=factor,
            )
            adam_step(numbers, [master], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [target], pool=threads)


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


# The update of offloaded weights on the device: states are copied to it (H2D), updated, and copied back (D2H).
#
# [Note: why states travel] An update does a few operations per element, so its time is that of its memory accesses. On
# the CPU, AdamW reads and writes 28 bytes of host memory per element. With the update on the GPU, PCIe or NVLink moves
# 12 bytes to the GPU and 12 back, in both directions at the same time; with 8-bit moments, half of that. With these the
# GPU's arithmetic takes no extra time, while on the CPU it takes longer than the memory accesses. Also, the new weights
# are then already on the GPU.
#
# [Note: three device buffers] Tensors are copied in pieces of some rows, so the device memory for this does not grow
# with the model: one piece is copied in while another is updated and a third is copied back. CUDA events order the
# three streams; the host does not wait, except before it writes a bucket to its file.


PIECE = 1 << 24
"""The largest number of elements in one piece."""
DEVICE_BUFFERS = 3
_GRADIENT_BYTES = 4
"""Bytes per gradient element, at most: gradients summed over micro-batches or ranks are fp32."""
_ALIGNMENT = 512
"""Tensors in a buffer begin at multiples of this number of bytes, as in torch's allocator."""


class BucketRows(NamedTuple):
    """Some rows of one of a bucket's tensors."""

    tensor_index: int
    """The position of the tensor in the bucket."""
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of these rows of a tensor; a scalar is returned unchanged."""
        return tensor[self.rows] if tensor.ndim else tensor


def split_into_pieces(shapes: Sequence[torch.Size], most: int) -> list[list[BucketRows]]:
    """Split tensors of these shapes into pieces of at most `most` elements; return the rows that are in each piece.

    A row with more elements is a piece by itself; small tensors share a piece.
    """
    pieces: list[list[BucketRows]] = [[]]
    free = most
    for index, shape in enumerate(shapes):
        count = shape[0] if shape else 1
        width = max(shape.numel() // max(count, 1), 1)
        begin = 0
        while begin < count or count == 0:
            taken = min(count - begin, max(free // width, 0 if pieces[-1] else 1))
            if taken > 0 or count == 0:
                pieces[-1].append(BucketRows(index, slice(begin, begin + taken)))
                begin, free = begin + taken, free - taken * width
            if count == 0:
                break
            if begin < count:
                pieces.append([])
                free = most
    return [piece for piece in pieces if piece]


class _DeviceBuffer:
    """Device memory that is reused for one piece after another."""

    def __init__(self, streams: CopyStreams, size: int) -> None:
        self._streams = streams
        self._memory = torch.empty(size, dtype=torch.uint8, device=streams.device)
        self._taken = 0
        self.copied_back: Any = None
        """The event after the last piece in this buffer was copied back to the host."""

    def reserve(self, size: int) -> None:
        """Begin a new piece of `size` bytes, with a larger allocation if needed.

        The current stream must already wait for `copied_back`.
        """
        self._taken = 0
        if size > self._memory.numel():
            self.wait()
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._streams.device)

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host tensor in this buffer; it is copied asynchronously, on the current stream."""
        begin, size = self._taken, tensor.numel() * tensor.element_size()
        self._taken += -(-size // _ALIGNMENT) * _ALIGNMENT
        held = self._memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Block until the last piece was copied back."""
        if self.copied_back is not None:
            self.copied_back.synchronize()


def device_buffer_bytes(largest: float, state_bytes: float) -> float:
    """Return the bytes of device memory for `DeviceUpdates`, if a bucket has at most `largest` elements."""
    return DEVICE_BUFFERS * min(PIECE, largest) * (4 + state_bytes + _GRADIENT_BYTES)


class DeviceUpdates:
    """Computes the updates of buckets on the device, with states in host memory; see [Note: three device buffers]."""

    def __init__(self, streams: CopyStreams, *, largest: int, state_bytes: float) -> None:
        """`largest`: elements of the largest bucket; `state_bytes`: bytes of optimizer state per element."""
        self._streams = streams
        size = int(device_buffer_bytes(largest, state_bytes) / DEVICE_BUFFERS)
        self._buffers = [_DeviceBuffer(streams, size) for _ in range(DEVICE_BUFFERS)]
        self._h2d, self._compute, self._d2h = (streams.new_stream() for _ in range(3))
        streams.wait_on(self._h2d, streams.record())  # earlier kernels may still use the memory of the new buffers
        self._turn = 0
        self._constants: dict[tuple[int, torch.device], tuple[Any, Any]] = {}
        self._pinned_states: set[int] = set()
        """The `id`s of the masters whose state is known to be in pinned memory."""

    def forget(self) -> None:
        """Check again whether states are in pinned memory; call it after they were replaced (loaded)."""
        self._pinned_states.clear()

    def update(
        self, bucket: Bucket, sent: Sequence[OffloadedGradient], factor: float, clip_value: float | None, computed: Any
    ) -> None:
        """Start the update of a bucket with the gradients `sent` times `factor`, after the event `computed`.

        Returns before the update is done. Sets `bucket.published`, the event after the model's weights were written,
        and `bucket.home`, the event after masters and states were copied back to the host.
        """
        new: dict[int, dict[str, Any]] = {}
        scalars: dict[int, dict[str, Tensor]] = {}
        for piece in split_into_pieces([master.shape for master in bucket.masters], PIECE):
            self._update_piece(bucket, piece, sent, new, scalars, factor, clip_value, computed)
        assert bucket.optimizer is not None
        for index, master in enumerate(bucket.masters):
            state = bucket.optimizer.state[master]
            if index in new:
                state.clear()
                state.update(new[index])
            _keep_scalars(state, scalars[index])
        if bucket.span.home == "cpu":
            self._pinned_states.update(id(master) for master in bucket.masters)

    def settle(self) -> None:
        """Block until masters and states of all updates are copied back to the host."""
        for buffer in self._buffers:
            buffer.wait()

    def _update_piece(
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
        streams, optimizer = self._streams, bucket.optimizer
        assert optimizer is not None
        buffer = self._buffers[self._turn % DEVICE_BUFFERS]
        self._turn += 1
        states = [optimizer.state.get(bucket.masters[chunk.tensor_index], {}) for chunk in piece]
        streams.wait_on(self._h2d, buffer.copied_back)
        with torch.no_grad(), streams.use(self._h2d):
            buffer.reserve(sum(_buffer_sizes(bucket, piece, states, sent)))
            device_params = [
                nn.Parameter(buffer.copy_in(chunk.of(bucket.masters[chunk.tensor_index].data))) for chunk in piece
            ]
            device_states = [
                self._state_on_device(chunk, state, buffer) for chunk, state in zip(piece, states, strict=True)
            ]
            grads = [self._gradient(chunk, sent[chunk.tensor_index], buffer) for chunk in piece]
        arrived = streams.record_on(self._h2d)
        streams.wait_on(self._compute, arrived)
        streams.wait_on(self._compute, computed)
        device_optimizer = _optimizer_over(
            optimizer, {id(bucket.masters[p.tensor_index]): g for p, g in zip(piece, device_params, strict=True)}
        )
        with torch.no_grad(), streams.use(self._compute):
            for device_param, state in zip(device_params, device_states, strict=True):
                if state:
                    device_optimizer.state[device_param] = state | _scalars_on_device(
                        state, device_optimizer, device_param
                    )
            device_bucket = replace(bucket, masters=device_params, targets=[], sinks=[], optimizer=device_optimizer)
            targets = [chunk.of(bucket.targets[chunk.tensor_index]) for chunk in piece]
            step_bucket(device_bucket, grads, targets, factor, clip_value)
            for grad in grads:
                streams.keep_for(self._compute, grad)
        bucket.published = streams.record_on(self._compute)
        streams.wait_on(self._d2h, bucket.published)
        with torch.no_grad(), streams.use(self._d2h):
            for chunk, device_param in zip(piece, device_params, strict=True):
                state = device_optimizer.state[device_param]
                chunk.of(bucket.masters[chunk.tensor_index].data).copy_(device_param.data, non_blocking=True)
                host_state = self._host_state(bucket, chunk, state, new)
                scalars[chunk.tensor_index] = dict(_scalars(state))
                for key, leaf in state_tensors(state):
                    chunk.of(host_state[key]).copy_(leaf, non_blocking=True)
                    streams.keep_for(self._d2h, leaf)
        buffer.copied_back = bucket.home = streams.record_on(self._d2h)

    def _gradient(self, chunk: BucketRows, sent: OffloadedGradient, buffer: _DeviceBuffer) -> Tensor:
        if sent.tensor.device == self._streams.device and self._streams.separate:
            return chunk.of(sent.tensor)
        self._streams.wait_on(self._h2d, sent.event)
        return buffer.copy_in(chunk.of(sent.tensor))

    def _state_on_device(self, chunk: BucketRows, state: Mapping[str, Any], buffer: _DeviceBuffer) -> dict[str, Any]:
        """Return a device copy of these rows of a parameter's state."""
        return {
            key: map_state(value, lambda leaf: buffer.copy_in(chunk.of(leaf)), self._constant_on(self._streams.device))
            for key, value in state.items()
        }

    def _host_state(
        self, bucket: Bucket, chunk: BucketRows, state: Mapping[str, Any], new: dict[int, dict[str, Any]]
    ) -> Any:
        """Return the host tensors that a state is copied back to, by key.

        Those of the current state if dtypes match and they are pinned; else new ones, which are collected in `new`.
        """
        assert bucket.optimizer is not None
        master = bucket.masters[chunk.tensor_index]
        if chunk.tensor_index not in new:
            known = dict(state_tensors(bucket.optimizer.state.get(master, {})))
            wanted = {key: leaf.dtype for key, leaf in state_tensors(state)}
            if {key: leaf.dtype for key, leaf in known.items()} == wanted and self._is_pinned(bucket, master, known):
                return known
            rows = master.shape[:1]

            def make(leaf: Tensor) -> Tensor:
                shape = torch.Size((*rows, *leaf.shape[1:]))
                pinned = bucket.span.home == "cpu"
                return self._streams.host_tensor(shape, leaf.dtype) if pinned else torch.empty(shape, dtype=leaf.dtype)

            constant = self._constant_on(torch.device("cpu"))
            new[chunk.tensor_index] = dict(_scalars(bucket.optimizer.state.get(master, {})))
            new[chunk.tensor_index] |= {
                key: map_state(state[key], make, constant) for key in state.keys() - dict(_scalars(state))
            }
        return dict(state_tensors(new[chunk.tensor_index]))

    def _is_pinned(self, bucket: Bucket, master: Tensor, known: Mapping[str, Tensor]) -> bool:
        """Whether a state is in pinned memory; a state loaded from a checkpoint is not."""
        if bucket.span.home != "cpu" or id(master) in self._pinned_states:
            return True
        return all(self._streams.copies_asynchronously(leaf) for leaf in known.values())

    def _constant_on(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that copies the lookup tables of 8-bit states to a device; each table is copied once."""

        def move(value: Any) -> Any:
            key = id(value), device
            if key not in self._constants:
                there = type(value)(*(field.to(device) if isinstance(field, Tensor) else field for field in value))
                self._constants[key] = value, there  # the key's object is kept alive so that its id stays unique
            return self._constants[key][1]

        return move


def _buffer_sizes(
    bucket: Bucket, piece: Sequence[BucketRows], states: Sequence[Mapping[str, Any]], sent: Sequence[OffloadedGradient]
) -> Iterator[int]:
    """Yield the bytes that each tensor of a piece may take in a device buffer."""
    for chunk, state in zip(piece, states, strict=True):
        tensors = [
            bucket.masters[chunk.tensor_index].data,
            sent[chunk.tensor_index].tensor,
            *(leaf for _, leaf in state_tensors(state)),
        ]
        for tensor in tensors:
            rows = chunk.of(tensor)
            yield -(-rows.numel() * rows.element_size() // _ALIGNMENT) * _ALIGNMENT


def _optimizer_over(optimizer: Optimizer, device_params: Mapping[int, nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer, without state, that updates only the parameters in `device_params`.

    `device_params` has the device copies by the `id` of the optimizer's parameters.
    """
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [
        {**group, "params": [device_params[id(param)] for param in group["params"] if id(param) in device_params]}
        for group in optimizer.param_groups
    ]
    other.state = defaultdict(dict)
    return other


def _scalars(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the scalars of a state, such as the step count."""
    return ((key, value) for key, value in state.items() if isinstance(value, Tensor) and value.ndim == 0)


def _scalars_on_device(state: Mapping[str, Any], optimizer: Optimizer, device_param: nn.Parameter) -> dict[str, Tensor]:
    """Return copies of a state's scalars on the device where the optimizer needs them; each piece has its own."""
    group = next(
        candidate for candidate in optimizer.param_groups if any(param is device_param for param in candidate["params"])
    )
    device = device_param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {key: torch.full((), value.item(), dtype=value.dtype, device=device) for key, value in _scalars(state)}


def _keep_scalars(state: dict[str, Any], counted: Mapping[str, Tensor]) -> None:
    """Copy the scalars of a piece to the state; a step count on the device is not read: one is added instead."""
    for key, value in counted.items():
        known = state.setdefault(key, torch.zeros((), dtype=value.dtype))
        if key == "step" and value.device != known.device:
            known += 1
        else:
            known.copy_(value)


# The update of offloaded weights: bucket by bucket, on a separate thread.
#
# [Note: what overlaps with what] Gradients are copied from the device while the backward pass still runs. The update
# begins after the last gradient, since the norm of all of them is needed for clipping and to skip non-finite steps.
# Then the buckets are updated one after another, in the order in which the next forward pass uses their weights. While
# one bucket is updated, the weights of the previous one are copied to the device, and the files of the next one are
# read. The next forward pass begins at once; each wrapped module waits for the buckets that contain its weights.


_WEIGHT_SCRATCHES = 2
"""Pinned buffers for updated weights: one is filled while the other is copied to the device."""


class BucketUpdates:
    """Updates all buckets of a step on a separate thread, and copies the new weights to the model."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        streams: CopyStreams,
        swapper: NvmeSwapper | None,
        device_updates: DeviceUpdates | None = None,
        *,
        delayed: bool,
    ) -> None:
        """`swapper` reads and writes buckets in files. `device_updates` computes updates on the device; None: the CPU.

        `delayed`: the update of a step runs while the next step computes, and the model gets the new weights only
        after that step; see `strategy.offload.delayed`.
        """
        self._buckets = buckets
        self._streams = streams
        self._swapper = swapper
        self._device_updates = device_updates
        self._writing_back: Bucket | None = None
        """A bucket in files that is being copied back from the device, and must then be written to its file."""
        self._delayed = delayed
        self._optimizer: Optimizer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plait-offload", initializer=streams.enter_thread)
        self._threads = None if streams.fake else ThreadPool(torch.get_num_threads())
        self._gradient_scratch = Scratch(streams)
        self._weight_scratch = [Scratch(streams) for _ in range(_WEIGHT_SCRATCHES)]
        self._turn = 0
        self._delayed_weights: list[tuple[Bucket, list[Tensor]]] = []
        """Updated weights that the model does not have yet, with `delayed`."""
        self._delayed_scratch: dict[int, Scratch] = {}

    def attach(self, optimizer: Optimizer) -> None:
        """Set the optimizer; each bucket gets a copy of it that updates the bucket's masters."""
        self._optimizer = optimizer
        for bucket in self._buckets:
            bucket.optimizer = optimizer_for(optimizer, bucket.masters)

    # ---- on the thread of the training loop

    def begin(self, sent: dict[int, OffloadedGradient], factor: float, clip_value: float | None) -> None:
        """Start the update of all buckets with the gradients `sent` (by parameter index) times `factor`."""
        assert self._optimizer is not None
        self.finish()
        self.publish_delayed()
        events = self._streams.record(), self._streams.record_h2d()
        for bucket in self._buckets:
            assert bucket.optimizer is not None
            copy_options(self._optimizer, bucket.optimizer)
            grads = [sent[index] for index in bucket.span.indices]
            if bucket.span.home == "device":
                targets = [None if _shares(master, target) else target for _, master, target in bucket.items()]
                step_bucket(bucket, [grad.tensor for grad in grads], targets, factor, clip_value)
            else:
                bucket.update = self._submit(partial(self._update, bucket, grads, factor, clip_value, events))

    def wait_for(self, bucket: Bucket, gathering: Any = None) -> None:
        """Block until a bucket is updated on the host; have the current stream wait until its weights are copied.

        `gathering` is another stream that reads the weights (FSDP's all-gather), and waits too. With `delayed`, does
        nothing.
        """
        if self._delayed:
            return
        if bucket.update is not None:
            bucket.update.result()
            bucket.update = None
        self._streams.wait(bucket.published)
        if bucket.published is not None and gathering is not None:
            gathering.wait_event(bucket.published)
        bucket.published = None

    def finish(self) -> None:
        """Block until no update is pending and files are written."""
        for bucket in self._buckets:
            if bucket.update is not None:
                bucket.update.result()
                bucket.update = None
        if self._device_updates is not None:
            self._device_updates.settle()
        if self._swapper is not None:
            self._swapper.settle()

    def settle(self) -> None:
        """Block until no update is pending and files are written, and have the current stream wait for new weights."""
        self.finish()
        self.publish_delayed()
        for bucket in self._buckets:
            self._streams.wait(bucket.published)
            bucket.published = None

    def publish_delayed(self) -> None:
        """Copy the weights of the previous, delayed update to the model."""
        delayed, self._delayed_weights = self._delayed_weights, []
        self._streams.h2d_wait(self._streams.record())
        for bucket, weights in delayed:
            self._copy_to_model(bucket, weights)
        for bucket, _ in delayed:
            self._streams.wait(bucket.published)

    def publish(self) -> None:
        """Copy all masters to the model; called after they were initialized or loaded."""
        self._delayed_weights = []
        if self._device_updates is not None:
            self._device_updates.forget()
        for bucket in self._buckets:
            weights: Sequence[Tensor] = bucket.masters
            if bucket.span.home == "nvme" and self._swapper is not None:
                weights = self._swapper.weights(bucket)
            with torch.no_grad():
                for target, sink, weight in zip(bucket.targets, bucket.sinks, weights, strict=True):
                    if sink is not None:
                        sink(weight.detach().to(target.dtype))
                    elif not _shares(weight, target):
                        target.copy_(weight)

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if not self._streams.fake:
            return self._thread.submit(work)
        done: Future[None] = Future()
        done.set_result(None)  # in a plan the work is not done: it takes no time on the device
        return done

    # ---- on the thread of the updates

    def _update(
        self,
        bucket: Bucket,
        sent: Sequence[OffloadedGradient],
        factor: float,
        clip_value: float | None,
        events: tuple[Any, Any],
    ) -> None:
        computed, fetched = events
        if fetched is not None:
            fetched.synchronize()  # the update overwrites weights on the host, which may still be copied to the device
        files = self._swapper if bucket.span.home == "nvme" else None
        if files is not None:
            files.swap_in(bucket)
        if self._device_updates is not None:
            self._device_updates.update(bucket, sent, factor, clip_value, computed)
            if files is not None:
                self._write_back(bucket, files)
            return
        targets = self._rounded_outputs(bucket)
        step_bucket(bucket, self._gradients_on_host(bucket, sent, computed), targets, factor, clip_value, self._threads)
        if files is not None:
            files.swap_out(bucket)
        if self._delayed:
            self._delayed_weights.append((bucket, targets))
        else:
            self._streams.h2d_wait(computed)
            self._copy_to_model(bucket, targets)

    def _write_back(self, bucket: Bucket, files: NvmeSwapper) -> None:
        """Write the previously updated bucket to its file, while this one is updated on the device.

        If this one is the last, write it too.
        """
        assert self._device_updates is not None
        waiting = [self._writing_back] if self._writing_back is not None else []
        self._writing_back = bucket
        if files.is_last(bucket):
            waiting, self._writing_back = [*waiting, bucket], None
        for written in waiting:
            if written.home is not None:
                written.home.synchronize()
            files.swap_out(written)

    def _gradients_on_host(self, bucket: Bucket, sent: Sequence[OffloadedGradient], computed: Any) -> list[Tensor]:
        """Return the gradients as host tensors; those still on the device are copied to a scratch buffer."""
        scratch = self._gradient_scratch.views([(gradient.tensor.shape, gradient.tensor.dtype) for gradient in sent])
        grads: list[Tensor] = []
        for gradient, copy in zip(sent, scratch, strict=True):
            if gradient.event is not None:
                gradient.event.synchronize()
            if gradient.tensor.device.type == "cpu":
                grads.append(gradient.tensor.contiguous())
            else:
                self._streams.copy_to_host_after(copy, gradient.tensor, computed)
                grads.append(copy)
        return grads

    def _rounded_outputs(self, bucket: Bucket) -> list[Tensor]:
        """Return the host tensors that new weights are rounded into.

        The model's own weights if they are on the host; else views of a pinned buffer, to be copied to the device.
        """
        needed = [(target.shape, target.dtype) for target in bucket.targets]
        if self._delayed:
            if bucket.published is not None:
                bucket.published.synchronize()  # the buffer's previous weights may still be copied to the device
            return self._delayed_scratch.setdefault(id(bucket), Scratch(self._streams)).views(needed)
        scratch = self._weight_scratch[self._turn % _WEIGHT_SCRATCHES]
        self._turn += 1
        scratch.wait()
        outputs = scratch.views(needed)
        return [
            target if sink is None and target.device.type == "cpu" else output
            for target, sink, output in zip(bucket.targets, bucket.sinks, outputs, strict=True)
        ]

    def _copy_to_model(self, bucket: Bucket, weights: Sequence[Tensor]) -> None:
        with torch.no_grad(), self._streams.h2d():
            for target, sink, weight in zip(bucket.targets, bucket.sinks, weights, strict=True):
                if sink is not None:
                    sink(weight)
                elif target is not weight:
                    target.copy_(weight, non_blocking=True)
        bucket.published = self._streams.record_h2d()
        if not self._delayed:
            self._weight_scratch[(self._turn - 1) % _WEIGHT_SCRATCHES].event = bucket.published


def _shares(master: Tensor, target: Tensor) -> bool:
    return master.device == target.device and storage_key(master) == storage_key(target)


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of `Offload`."""

    home: Home
    """Where buckets are stored by default: `cpu` or `nvme`."""
    limit: int
    """The largest number of elements in one bucket."""
    ratio: float = 0.0
    """The fraction of elements whose masters and states stay on the device."""
    host_ratio: float = 0.0
    """With the home `nvme`: the fraction of elements whose masters and states are in host memory instead."""
    state_bytes: float = 8.0
    """Bytes of optimizer state per element."""
    delayed: bool = False
    """Whether the model gets the weights of an update one step later; see `BucketUpdates`."""
    on_device: bool = False
    """Whether the device computes the update."""
    folder: Path | None = None
    """The folder of the files; only with the home `nvme`."""


class Offload:
    """The offloaded masters, gradients and optimizer states of this rank's trainable parameters.

    `masters` are the tensors that the optimizer updates, in the order of `params`. A step queues gradients in
    `gradient_queue`, and calls `begin`; the update then runs in the background, in the order of `order` (parameter
    indices), which should be that in which the forward pass uses the parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        *,
        order: Sequence[int],
        streams: CopyStreams,
        options: OffloadOptions,
        stream: ParamStream | None = None,
        log: Callable[[str], None],
    ) -> None:
        """`dtypes` are those of the masters. `stream` copies offloaded model weights to the device."""
        with torch.no_grad():
            targets = [to_local(param.detach()) for param in params]
        sinks: list[Sink | None] = [None] * len(params)
        self.stream = stream
        if stream is not None:
            for index, param in enumerate(params):
                if (location := stream.location_of(param)) is not None:
                    targets[index] = stream.target(location, targets[index].shape)
                    sinks[index] = None if not stream.in_files else partial(stream.put, location)
        # The same streams as in `stream`: an update of weights on the host must wait for copies that still read them.
        self.streams = streams
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
        self._swapper: NvmeSwapper | None = None
        in_files = [bucket for bucket in self.buckets if bucket.span.home == "nvme"]
        if in_files and not self.streams.fake:
            assert options.folder is not None
            self._swapper = NvmeSwapper(
                in_files, options.folder, log, pinned=options.on_device and self.streams.separate
            )
        self.stand_in = torch.empty(int(self._states_on_host()) if self.streams.fake else 0, dtype=torch.uint8)
        """In a plan no states are allocated; this (fake) tensor has their size, so that they are counted on a CPU."""
        self.gradient_queue = GradientOffloadQueue(self.buckets, self.streams, sets=2 if options.delayed else 1)
        away = (bucket.numel for bucket in self.buckets if bucket.span.home != "device")
        largest = max(away, default=0)  # a rank may have no shard of a small model
        device_updates = (
            DeviceUpdates(self.streams, largest=largest, state_bytes=options.state_bytes) if options.on_device else None
        )
        self._updates = BucketUpdates(
            self.buckets, self.streams, self._swapper, device_updates, delayed=options.delayed
        )
        if stream is not None:
            of_param = {id(param): self.bucket_of[index] for index, param in enumerate(params)}
            stream.follow_updates(of_param, self._updates.wait_for)

    def _master(self, span: BucketSpan, target: Tensor, dtype: torch.dtype) -> nn.Parameter:
        if span.home == "device":
            same = target.dtype == dtype
            return nn.Parameter(target if same else torch.empty_like(target, dtype=dtype))
        if span.home == "cpu":
            if self.options.on_device:
                return nn.Parameter(self.streams.host_tensor(target.shape, dtype))
            return nn.Parameter(host_empty(*target.shape, dtype=dtype))
        return nn.Parameter(torch.empty((), dtype=dtype).expand(target.shape))

    def host_bytes(self) -> float:
        """Return the bytes of host memory for masters, states, queued gradients, and buffers for files."""
        on_host = [bucket for bucket in self.buckets if bucket.span.home == "cpu"]
        grads = sum(target.nbytes for bucket in on_host for target in bucket.targets)
        return self.built_bytes() + self._states_on_host() + grads * (3 if self.options.delayed else 1)

    def built_bytes(self) -> float:
        """Return the part of `host_bytes` allocated before the first step: masters, and offloaded model weights."""
        masters = (bucket.masters for bucket in self.buckets if bucket.span.home == "cpu")
        return sum(master.nbytes for bucket_masters in masters for master in bucket_masters) + (
            self.stream.host_bytes() if self.stream else 0
        )

    def _states_on_host(self) -> float:
        """Return the part of `host_bytes` for optimizer states and file buffers."""
        states = sum(bucket.numel for bucket in self.buckets if bucket.span.home == "cpu") * self.options.state_bytes
        return states + self.host_buffer_bytes()

    def host_buffer_bytes(self) -> float:
        """Return the part of `host_bytes` for file buffers."""
        in_files = sorted((bucket.numel for bucket in self.buckets if bucket.span.home == "nvme"), reverse=True)
        return sum(in_files[:HOST_BUFFERS]) * (4 + self.options.state_bytes)

    # ---- at the start

    def keep(self, index: int, values: Tensor) -> None:
        """Set the master of one parameter: the fp32 values of this rank's shard."""
        bucket = self.bucket_of[index]
        master = self.masters[index]
        with torch.no_grad():
            if bucket.span.home == "nvme":
                if self._swapper is not None:  # not in a plan
                    self._swapper.put_weight(bucket, index, values.detach().to("cpu", master.dtype))
            else:
                master.copy_(values)

    def attach(self, optimizer: Optimizer) -> None:
        """Set the optimizer that updates the masters."""
        self._updates.attach(optimizer)
        if self._swapper is not None:
            self._swapper.attach(optimizer)

    # ---- a step

    def begin(self, factor: float, clip_value: float | None) -> None:
        """Start the update of all masters with the queued gradients times `factor`."""
        if self.stream is not None:
            self.stream.restart()
        self._updates.begin(self.gradient_queue.take_all(), factor, clip_value)

    def wait_for(self, buckets: Sequence[Bucket], gathering: Any = None) -> None:
        """Wait until the model has the new weights of these buckets; see `BucketUpdates.wait_for`."""
        for bucket in buckets:
            self._updates.wait_for(bucket, gathering)

    def finish(self) -> None:
        """Block until no update is pending; with `delayed`, the model may not have the new weights yet."""
        self._updates.finish()

    def settle(self) -> None:
        """Block until no update is pending and the model has all new weights."""
        self._updates.settle()

    def publish(self) -> None:
        """Copy the masters to the model, after they were loaded or written to."""
        self._updates.finish()
        if self._swapper is not None:
            self._swapper.sync_files()
        self._updates.publish()
        if self.stream is not None:
            self.stream.restart()

    # ---- for checkpoints

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Within the block, masters and optimizer state can be read; those in files are memory maps."""
        self.settle()
        if self._swapper is None:
            yield
            return
        self._swapper.map_files()
        try:
            yield
        finally:
            self._swapper.unmap_files()

    def weight(self, index: int) -> Tensor:
        """Return the fp32 weights of one parameter; those in a file as a memory map."""
        self.settle()
        bucket = self.bucket_of[index]
        if self._swapper is not None and bucket.span.home == "nvme":
            return self._swapper.weight(bucket, index)
        return self.masters[index].detach()

    def in_files(self, index: int) -> bool:
        """Whether the state of a parameter lies in files."""
        return self._swapper is not None and self.bucket_of[index].span.home == "nvme"

    def allocate_states(self, wanted: Mapping[int, Mapping[str, MakeState]]) -> None:
        """Create the files of the optimizer states of parameters that are stored in files."""
        self.settle()
        if self._swapper is not None:
            self._swapper.allocate_states(wanted)
