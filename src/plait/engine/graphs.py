"""Forward and backward pass captured as one CUDA graph, which launches their kernels without Python.

In this file, *both passes* are the forward and the backward pass of a step with one micro-batch.

[Note: a pass that repeats itself] A small model is launch-bound: a kernel takes less time than Python needs to launch
the next one. A CUDA graph launches all kernels of both passes at once. It reads its inputs from static tensors, into
which each micro-batch is copied, and writes its gradients to static tensors. A graph is for one signature of the
inputs: the shapes, strides and dtypes of their tensors, and their other values. Each other signature needs another
graph. Python code between the kernels (a branch, a counter, a hook) runs during the capture, and not in a replay.

The first steps of each signature run eagerly: libraries choose and initialize their kernels in those. They run on the
stream of the capture, so that autograd allocates its buffers there. With `graphs: auto`, nothing is captured until the
model is known to be launch-bound (`LaunchBoundDetector`).
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
"""The first steps are not observed: kernels are chosen, built and loaded in those."""
OBSERVED_STEPS = 8
"""The model is launch-bound if the device was idle at the beginning of this many consecutive steps."""
MAX_MEMORY_SHARE = 0.4
"""The largest fraction of the device's memory that a run may use to be captured with `graphs: auto`: the graph
allocates as much memory again."""


class LaunchBoundDetector:
    """Finds out in the first steps whether the model is launch-bound: the device is idle when the host begins a step.

    A device that is the bottleneck is still computing the previous step then; one that waits for Python, or for data,
    has finished it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._mark: torch.cuda.Event | None = None
        self.launch_bound: bool | None = None
        """Whether the model is launch-bound, and the memory suffices for a capture; None until it is known."""

    def passes_begin(self) -> None:
        """Check whether the device is done with the previous step; call it before both passes."""
        if self.launch_bound is not None:
            return
        self._steps += 1
        if self._mark is not None and self._steps > IGNORED_STEPS + 1:
            if not self._mark.query():  # type: ignore[no-untyped-call]
                self.launch_bound = False
            elif self._steps > IGNORED_STEPS + OBSERVED_STEPS:
                self.launch_bound = self._has_memory()

    def passes_end(self) -> None:
        """Record an event; call it after both passes were launched."""
        if self.launch_bound is None:
            self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._mark.record(torch.cuda.current_stream(self._device))

    def _has_memory(self) -> bool:
        return (
            torch.cuda.max_memory_reserved(self._device) < MAX_MEMORY_SHARE * torch.cuda.mem_get_info(self._device)[1]
        )


def is_watched(modules: list[nn.Module]) -> bool:
    """Whether any module has hooks, which a graph would not call."""
    return any(map(is_hooked, modules))


Passes = Callable[[Any, float, Tensor | float | None], WeightedLoss]
"""(inputs, number of samples, loss scale) → the detached loss: runs both passes."""

Recording = Literal["always", "where it pays"]
"""`always`: `strategy.graphs: true`. `where it pays`: `auto`, which captures only launch-bound models, and logs nothing
if the capture fails."""

WARM_UP = 3
"""Eager steps of each signature before the capture. They are ordinary training steps."""
MAX_RECORDINGS = 8
"""The largest number of signatures that are captured; each keeps a gradient for every parameter in memory."""
MAX_AUTO_RECORDINGS = 2
"""The same with `graphs: auto`: full batches, and the shorter last batch of an epoch."""
CONSTANTS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that inputs may contain besides tensors; they are part of the signature."""


@dataclass(frozen=True, slots=True)
class CapturedPasses:
    """The graph of both passes for one signature, and the static tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    scale: Tensor | None
    loss: WeightedLoss
    gradients: list[tuple[nn.Parameter, Tensor]]
    notify_collector: Callable[[], None]
    """Tells the gradient collector which gradients the replay has computed, as its hooks do in an eager pass."""

    def replay(self, inputs: list[Tensor], scale: float | None) -> WeightedLoss:
        """Run both passes over these inputs, and set the gradients; return the loss."""
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
        """`passes` runs both passes eagerly. `gradients` is the gradient collector, if there is one."""
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
        """Whether the user has written `strategy.graphs: true`."""
        return self._launch_bound is None

    def __call__(self, inputs: Any, samples: float, scale: float | None) -> WeightedLoss:
        """Run both passes over inputs that `Forward.ready` returned; return the loss."""
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
        ):  # since the capture, a tensor was moved, or a parameter was frozen or unfrozen
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
        """Within the block, the capture stream is the current one; it waits for earlier work, and later work for it."""
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
        """Capture both passes; return the graph. Nothing is computed: `.grad` is set to tensors that replays write."""
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
        """Release the memory that the allocator cached for eager steps: a graph allocates from a pool of its own."""
        gc.collect()  # also so that nothing is freed during the capture: freeing may call CUDA, which is an error then
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _give_up(self, reason: str) -> None:
        self._on = False
        self._recordings.clear()
        for param in self._parameters():
            param.grad = None  # the failed capture may have set some
        if self._gradients is not None:
            self._gradients.finish()  # discards the gradients that it collected during the failed capture
        if self.asked_for:
            message = f"strategy.graphs is on, but the passes cannot be captured: {reason}. Training continues without"
            self._log(message)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (param for module in self._modules for param in module._parameters.values() if param is not None)

    def _recorded_facts(self) -> list[Hashable]:
        """Return the properties of the model that a graph depends on; if one changes, graphs must be captured again.

        Training mode, hooks, which parameters are trained, and the addresses of all parameters and buffers.
        """
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
    """Do nothing: without a collector, gradients are read from the parameters."""


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.requires_grad


def _signature(leaf: Any) -> Hashable:
    """Return the part of an input that is in the signature; the type too, since `1 == 1.0 == True`."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf


def _first_line(error: BaseException) -> str:
    """Return the first line of the original error: ending a failed capture raises a second one, chained to it."""
    while error.__context__ is not None:
        error = error.__context__
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), type(error).__name__)
