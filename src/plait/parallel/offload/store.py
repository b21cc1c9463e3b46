"""This rank's trainable weights beyond the device: made, updated, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.ops import host_empty
from plait.optim import MakeState
from plait.parallel.offload.buckets import Bucket, Home, Sink, Span, plan_spans
from plait.parallel.offload.lanes import Lanes
from plait.parallel.offload.outbox import Outbox
from plait.parallel.offload.params import ParamStream
from plait.parallel.offload.passage import ROOMS, Passage
from plait.parallel.offload.update import Updates
from plait.parallel.offload.visit import Visits
from plait.world import local_part


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
        lanes: Lanes,
        options: OffloadOptions,
        stream: ParamStream | None = None,
        say: Callable[[str], None],
    ) -> None:
        """`dtypes`: of the masters; `stream`: of weights that do not live on the device."""
        with torch.no_grad():
            targets = [local_part(param.detach()) for param in params]
        sinks: list[Sink | None] = [None] * len(params)
        self.stream = stream
        if stream is not None:
            for index, param in enumerate(params):
                if (place := stream.place_of(param)) is not None:
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
        self._passage: Passage | None = None
        in_files = [bucket for bucket in self.buckets if bucket.span.home == "nvme"]
        if in_files and not self.lanes.fake:
            assert options.folder is not None
            self._passage = Passage(in_files, options.folder, say, pinned=options.on_device and self.lanes.separate)
        self.stand_in = torch.empty(int(self._states_on_host()) if self.lanes.fake else 0, dtype=torch.uint8)
        """A plan makes no states; on a CPU their memory counts all the same."""
        self.outbox = Outbox(self.buckets, self.lanes, sets=2 if options.delayed else 1)
        away = (bucket.numel for bucket in self.buckets if bucket.span.home != "device")
        largest = max(away, default=0)  # a rank of many may have nothing of a small model
        visits = Visits(self.lanes, largest=largest, state_bytes=options.state_bytes) if options.on_device else None
        self._updates = Updates(self.buckets, self.lanes, self._passage, visits, delayed=options.delayed)
        if stream is not None:
            of_param = {id(param): self.bucket_of[index] for index, param in enumerate(params)}
            stream.follow_updates(of_param, self._updates.wait_for)

    def _master(self, span: Span, target: Tensor, dtype: torch.dtype) -> nn.Parameter:
        if span.home == "device":
            same = target.dtype == dtype
            return nn.Parameter(target if same else torch.empty_like(target, dtype=dtype))
        if span.home == "cpu":
            if self.options.on_device:
                return nn.Parameter(self.lanes.room(target.shape, dtype))
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
        return sum(in_files[:ROOMS]) * (4 + self.options.state_bytes)

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
        self._updates.begin(self.outbox.hand_over(), factor, clip_value)

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
