"""Forward and backward pass recorded as a CUDA graph, so that no Python stands between their kernels.

[Note: a pass that repeats itself] A small model keeps its device waiting: a kernel takes less time than Python needs to
ask for the next one. Recorded, all kernels of both passes are asked for at once. A recording reads its inputs where the
first ones lay, so each micro-batch is copied there, and leaves its gradients where the first ones were. It holds for
inputs of one kind: other shapes, and other numbers that are no tensors, have a recording of their own. Whatever
Python does on the way (a branch, a count, a hook) was done when it was recorded, and is not done again.

The first steps of each kind are not recorded: libraries choose their kernels and set themselves up in those. They run
on the stream that will be recorded, where autograd then finds everything that it keeps. Where nobody asked for a
recording, steps are as they would be without one until it is known that it pays. [See `starving`]
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.distributed import GradientBuckets, Gradients
from plait.engine.forward import LogFunction
from plait.engine.loss import WeightedLoss
from plait.kernels import record, recording_stream
from plait.monitor import MessageEvent
from plait.torch_internals import forward_hooks, is_hooked, tree_flatten, tree_unflatten

# Does a device wait for Python? Found out on the way, without waiting for the device.


IGNORED_STEPS = 3
"""Steps that show nothing: kernels are chosen, built and loaded in those."""
OBSERVED_STEPS = 8
"""Steps in a row after which the device must have had nothing left to do."""
MAX_MEMORY_SHARE = 0.4
"""Of the device's memory, what a run may have taken: recorded passes keep as much for themselves."""


class LaunchBoundDetector:
    """Looks at the first steps: was the device done with a step's passes when the host came with the next step?

    A device that is busy is about a step behind its host. One that waits for Python, or for data, is not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._mark: torch.cuda.Event | None = None
        self.launch_bound: bool | None = None
        """None as long as it is not known."""

    def passes_begin(self) -> None:
        """Look whether the device is done with those before."""
        if self.launch_bound is not None:
            return
        self._steps += 1
        if self._mark is not None and self._steps > IGNORED_STEPS + 1:
            if not self._mark.query():  # type: ignore[no-untyped-call]
                self.launch_bound = False
            elif self._steps > IGNORED_STEPS + OBSERVED_STEPS:
                self.launch_bound = self._has_memory()

    def passes_end(self) -> None:
        """Both were asked for."""
        if self.launch_bound is None:
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._mark.record(torch.cuda.current_stream(self._device))

    def _has_memory(self) -> bool:
        return (
            torch.cuda.max_memory_reserved(self._device) < MAX_MEMORY_SHARE * torch.cuda.mem_get_info(self._device)[1]
        )


def is_watched(modules: list[nn.Module]) -> bool:
    """Whether somebody wants to be told of passes, as no recording would."""
    return any(map(is_hooked, modules))


Passes = Callable[[Any, float, Tensor | float | None], WeightedLoss]
"""Both passes over inputs of so many samples, the loss multiplied by a scale; returns the loss, detached."""

Recording = Literal["always", "where it pays"]
"""`where it pays`: nobody asked for it. Not before the device was seen to wait; without a word where it cannot be."""

WARM_UP = 3
"""Steps of each kind before one is recorded. They count like any other."""
MAX_RECORDINGS = 8
"""Kinds of inputs that are recorded; each keeps a gradient for every parameter."""
MAX_AUTO_RECORDINGS = 2
"""The same where nobody asked: whole batches, and the rest of an epoch."""
CONSTANTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""What inputs may hold besides tensors."""


@dataclass(frozen=True, slots=True)
class CapturedPasses:
    """Both passes over inputs of one kind, and the tensors that they read and write."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    scale: Tensor | None
    loss: WeightedLoss
    gradients: list[tuple[nn.Parameter, Tensor]]
    notify_collector: Callable[[], None]
    """Lets whoever collects gradients know that there are some."""

    def replay(self, inputs: list[Tensor], scale: float | None) -> WeightedLoss:
        """Do both passes over these inputs."""
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor, non_blocking=True)
        if self.scale is not None and scale is not None:
            self.scale.fill_(scale)
        self.graph.replay()
        for param, gradient in self.gradients:
            param.grad = gradient
        self.notify_collector()
        return self.loss


class RecordedPasses:
    """Both passes of steps with one micro-batch: done as they are at first, then repeated from a recording."""

    def __init__(
        self,
        passes: Passes,
        model: nn.Module,
        gradients: Gradients | None,
        device: torch.device,
        recording: Recording,
        log: LogFunction,
    ) -> None:
        """`gradients`: what collects them, if anything does; of one process."""
        self._passes = passes
        self._gradients = gradients
        self._modules = list(model.modules())
        self._device = device
        self._log = log
        self._launch_bound = None if recording == "always" else LaunchBoundDetector(device)
        self._on = True
        self._warned = False
        self._seen: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, CapturedPasses] = {}
        self._facts: list[Hashable] = []

    @property
    def asked_for(self) -> bool:
        """Whether the user did."""
        return self._launch_bound is None

    def __call__(self, inputs: Any, samples: float, scale: float | None) -> WeightedLoss:
        """Both passes over inputs that are ready."""
        if self._on and self._launch_bound is not None and self._launch_bound.launch_bound is None:
            self._launch_bound.passes_begin()
            if not self._launch_bound.launch_bound:
                loss = self._passes(inputs, samples, scale)
                self._launch_bound.passes_end()
                self._on = self._launch_bound.launch_bound is None
                return loss
            if is_watched(self._modules):
                self._on = False
        leaves, tree = tree_flatten(inputs)
        other = next((leaf for leaf in leaves if not _is_plain(leaf) and not isinstance(leaf, CONSTANTS)), None)
        if self._on and other is not None:
            self._give_up(f"micro-batches hold a {type(other).__name__}, which is no plain tensor, number or text")
        if not self._on:
            return self._run_passes(inputs, samples, scale)
        if (
            self._recordings and self._facts != self._recorded_facts()
        ):  # something was moved, frozen or thawed since then
            self._recordings.clear()
            self._seen.clear()
            if not self.asked_for and is_watched(self._modules):
                self._on = False
                return self._run_passes(inputs, samples, scale)
        signature = (tree, samples, *map(_signature, leaves))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        recorded = self._recordings.get(signature)
        if recorded is None:
            self._seen[signature] += 1
            if self._seen[signature] <= WARM_UP or self._is_full():
                return self._run_passes(inputs, samples, scale)
            try:
                recorded = self._recordings[signature] = self._record(leaves, tree, samples, scale)
            except Exception as error:  # whatever is wrong with the inputs themselves comes up again right away
                self._give_up(_first_line(error))
                return self._run_passes(inputs, samples, scale)
        return recorded.replay(tensors, scale)

    def _is_full(self) -> bool:
        full = len(self._recordings) == (MAX_RECORDINGS if self.asked_for else MAX_AUTO_RECORDINGS)
        if full and self.asked_for and not self._warned:
            self._warned = True
            self._log(f"strategy.graphs: {MAX_RECORDINGS} kinds of micro-batches are recorded, further ones are not")
        return full

    def _run_passes(self, inputs: Any, samples: float, scale: float | None) -> WeightedLoss:
        with self._on_recording_stream():
            return self._passes(inputs, samples, scale)

    @contextmanager
    def _on_recording_stream(self) -> Iterator[None]:
        """What is done here is done on the stream of recordings, behind all work so far, before all that follows."""
        if not self._on or self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        recording = recording_stream(torch.cuda.current_device())
        recording.wait_stream(current)
        with torch.cuda.stream(recording):
            yield
        current.wait_stream(recording)

    def _record(self, leaves: list[Any], tree: Any, samples: float, scale: float | None) -> CapturedPasses:
        """Record both passes; nothing is computed yet, and gradients are left where a replay will write them."""
        self._release_cached_memory()
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        factor = None if scale is None else torch.empty((), device=self._device)
        losses: list[WeightedLoss] = []
        pool_of = next((recorded.graph for recorded in self._recordings.values()), None)
        graph = record(lambda: losses.append(self._passes(tree_unflatten(static, tree), samples, factor)), pool_of)
        self._facts = self._recorded_facts()
        if not self.asked_for and not self._recordings:
            message = "the device waits for Python: both passes are recorded from now on (strategy.graphs: auto)"
            self._log(MessageEvent(message))
        return CapturedPasses(
            graph,
            [tensor for tensor in static if isinstance(tensor, Tensor)],
            factor,
            losses[0],
            [(param, param.grad) for param in self._parameters() if param.grad is not None],
            self._gradients.collected() if isinstance(self._gradients, GradientBuckets) else _no_collector,
        )

    def _release_cached_memory(self) -> None:
        """Give back what the steps before kept for themselves: a recording has memory of its own."""
        gc.collect()  # also, nothing may be freed while the device is recorded that it has yet to be asked about
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self._on = False
        self._recordings.clear()
        for param in self._parameters():
            param.grad = None  # perhaps half recorded
        if self._gradients is not None:
            self._gradients.finish()  # forgets whose gradients it was told of meanwhile
        if self.asked_for:
            message = f"strategy.graphs is on, but the passes cannot be recorded: {reason}. Training goes on without it"
            self._log(message)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (param for module in self._modules for param in module._parameters.values() if param is not None)

    def _recorded_facts(self) -> list[Hashable]:
        """What a recording takes for granted: modes, who listens, what is trained, and where everything lies."""
        facts: list[Hashable] = []
        for module in self._modules:
            facts.append((module.training, *forward_hooks(module)))
            facts += [
                (tensor.requires_grad, tensor.data_ptr())
                for tensor in module._parameters.values()
                if tensor is not None
            ]
            facts += [tensor.data_ptr() for tensor in module._buffers.values() if tensor is not None]
        return facts


def _no_collector() -> None:
    """Gradients are found where they are, on the parameters."""


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad


def _signature(leaf: Any) -> Hashable:
    """What a recording knows of an input for good. `1`, `1.0` and `True` are equal, and not the same."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _first_line(error: BaseException) -> str:
    """Of the error that came first: the end of a recording that failed raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
