"""Forward and backward pass captured as a CUDA graph, without Python between their kernels.

[Note: a pass that repeats itself] A small model is launch-bound: a kernel takes less time than Python needs to launch
the next one. A graph launches all kernels of both passes at once. It reads its inputs from static tensors, into which
each micro-batch is copied, and writes its gradients to static tensors. A graph is for one input signature: other
shapes, and other values that are not tensors, have a graph of their own. What Python does on the way (a branch, a
count, a hook) was done during capture, and is not repeated.

The first steps of each signature are not captured: libraries choose and initialize their kernels in those. They run on
the stream of the capture, where autograd keeps its buffers. Unless `strategy.graphs` asks for it, steps run as without
graphs until the model is known to be launch-bound (`LaunchBoundDetector`).
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
from plait.kernels import capture_graph, capture_stream
from plait.monitor import MessageEvent
from plait.torch_internals import forward_hooks, is_hooked, tree_flatten, tree_unflatten

IGNORED_STEPS = 3
"""First steps, which are not looked at: kernels are chosen, built and loaded in those."""
OBSERVED_STEPS = 8
"""Steps in a row in which the device must have been idle."""
MAX_MEMORY_SHARE = 0.4
"""The largest share of the device's memory that a run may use: captured passes take as much again."""


class LaunchBoundDetector:
    """Checks in the first steps whether the device is done with a step's passes when the host begins the next step.

    A busy device is about a step behind its host. One that waits for Python, or for data, is not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._mark: torch.cuda.Event | None = None
        self.launch_bound: bool | None = None
        """None until it is known."""

    def passes_begin(self) -> None:
        """Check whether the device is done with the passes before."""
        if self.launch_bound is not None:
            return
        self._steps += 1
        if self._mark is not None and self._steps > IGNORED_STEPS + 1:
            if not self._mark.query():  # type: ignore[no-untyped-call]
                self.launch_bound = False
            elif self._steps > IGNORED_STEPS + OBSERVED_STEPS:
                self.launch_bound = self._has_memory()

    def passes_end(self) -> None:
        """Record an event after both passes were launched."""
        if self.launch_bound is None:
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._mark.record(torch.cuda.current_stream(self._device))

    def _has_memory(self) -> bool:
        return (
            torch.cuda.max_memory_reserved(self._device) < MAX_MEMORY_SHARE * torch.cuda.mem_get_info(self._device)[1]
        )


def is_watched(modules: list[nn.Module]) -> bool:
    """Whether modules have hooks, which a graph would not call."""
    return any(map(is_hooked, modules))


Passes = Callable[[Any, float, Tensor | float | None], WeightedLoss]
"""Both passes over inputs of so many samples, the loss multiplied by a scale; returns the loss, detached."""

Recording = Literal["always", "where it pays"]
"""`where it pays`: not configured; captured only if launch-bound, and without a message if that fails."""

WARM_UP = 3
"""Steps of each signature before the capture. They train like any other."""
MAX_RECORDINGS = 8
"""Signatures that are captured; each keeps a gradient for every parameter."""
MAX_AUTO_RECORDINGS = 2
"""The same if not configured: full batches, and the rest of an epoch."""
CONSTANTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types that inputs may hold besides tensors."""


@dataclass(frozen=True, slots=True)
class CapturedPasses:
    """The graph of both passes for one signature, and the static tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    scale: Tensor | None
    loss: WeightedLoss
    gradients: list[tuple[nn.Parameter, Tensor]]
    notify_collector: Callable[[], None]
    """Tells the gradient collector that gradients exist."""

    def replay(self, inputs: list[Tensor], scale: float | None) -> WeightedLoss:
        """Run both passes over these inputs."""
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
    """Both passes of steps with one micro-batch: run eagerly at first, then replayed from a graph."""

    def __init__(
        self,
        passes: Passes,
        model: nn.Module,
        gradients: Gradients | None,
        device: torch.device,
        recording: Recording,
        log: LogFunction,
    ) -> None:
        """`gradients`: the gradient collector, if any, of one process."""
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
        """Whether the user configured it."""
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
            self._give_up(f"micro-batches hold a {type(other).__name__}, which is not a plain tensor, number or string")
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
            except Exception as error:  # an error in the inputs is raised again by the eager passes
                self._give_up(_first_line(error))
                return self._run_passes(inputs, samples, scale)
        return recorded.replay(tensors, scale)

    def _is_full(self) -> bool:
        full = len(self._recordings) == (MAX_RECORDINGS if self.asked_for else MAX_AUTO_RECORDINGS)
        if full and self.asked_for and not self._warned:
            self._warned = True
            self._log(f"strategy.graphs: {MAX_RECORDINGS} kinds of micro-batches are captured, further ones are not")
        return full

    def _run_passes(self, inputs: Any, samples: float, scale: float | None) -> WeightedLoss:
        with self._on_recording_stream():
            return self._passes(inputs, samples, scale)

    @contextmanager
    def _on_recording_stream(self) -> Iterator[None]:
        """Run the block on the capture stream, after all work so far and before all that follows."""
        if not self._on or self._device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(self._device)
        recording = capture_stream(torch.cuda.current_device())
        recording.wait_stream(current)
        with torch.cuda.stream(recording):
            yield
        current.wait_stream(recording)

    def _record(self, leaves: list[Any], tree: Any, samples: float, scale: float | None) -> CapturedPasses:
        """Capture both passes; nothing is computed yet, and gradients are the tensors that replays will write."""
        self._release_cached_memory()
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        factor = None if scale is None else torch.empty((), device=self._device)
        losses: list[WeightedLoss] = []
        pool_of = next((recorded.graph for recorded in self._recordings.values()), None)
        graph = capture_graph(
            lambda: losses.append(self._passes(tree_unflatten(static, tree), samples, factor)), pool_of
        )
        self._facts = self._recorded_facts()
        if not self.asked_for and not self._recordings:
            message = "the device waits for Python: both passes are captured from now on (strategy.graphs: auto)"
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
        """Release the memory cached by the steps before: a graph has its own memory."""
        gc.collect()  # also, nothing may be freed during the capture that would query the device
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self._on = False
        self._recordings.clear()
        for param in self._parameters():
            param.grad = None  # perhaps partly captured
        if self._gradients is not None:
            self._gradients.finish()  # forgets the gradients that it collected meanwhile
        if self.asked_for:
            message = f"strategy.graphs is on, but the passes cannot be captured: {reason}. Training continues without"
            self._log(message)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (param for module in self._modules for param in module._parameters.values() if param is not None)

    def _recorded_facts(self) -> list[Hashable]:
        """Return what a graph depends on: modes, hooks, trained parameters, and the addresses of all tensors."""
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
    """Nothing to notify: gradients are read from the parameters."""


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad


def _signature(leaf: Any) -> Hashable:
    """Return the part of an input that a graph is captured for. `1`, `1.0` and `True` are equal, and not the same."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _first_line(error: BaseException) -> str:
    """Return the first line of the original error: the end of a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
