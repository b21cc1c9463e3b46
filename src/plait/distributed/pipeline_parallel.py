"""Pipeline parallelism (PP): runs the stages of this rank, in the order of a schedule.

[Note: why not torch's own stages]
The schedules come from `torch.distributed.pipelining`, and so do the functions for a backward pass in two halves.
torch's `PipelineStage` and its `step` are not used, for four reasons:
- They split one batch of tensors into equal chunks. Here micro-batches are any objects, already split, and the last may
  have fewer samples.
- They infer shapes with one more forward pass of the model ([Note: what will come]).
- Their last stage must return tensors. Here it may return any object, such as a model output with a loss.
- They reduce gradients of sharded parameters at the end of the step. Most schedules can overlap that with the last
  backward pass.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from plait.distributed.heartbeat import wait_for
from plait.distributed.pipeline_schedule import (
    Action,
    ActionType,
    Program,
    ScheduleName,
    StageTransfer,
    Table,
    bubble_of,
    find_schedule,
    forward_table,
    make_programs,
    make_table,
    merge_backward,
    placement_of,
    simulate,
)
from plait.distributed.pipeline_split import (
    Stage,
    TiedWeights,
)
from plait.errors import ModelError, PlaitError
from plait.torch_internals import (
    TreeSpec,
    compiled_call,
    fsdp_defer_reduce,
    fsdp_reduce_deferred,
    tree_flatten,
    tree_unflatten,
)

# ---- the backward pass of one stage, full or in two halves
#
# [Note: two halves of a backward pass]
# No stage waits for gradients of weights, so zero-bubble schedules compute them while a rank would be idle. The first
# half of the backward pass computes the gradients of the stage's inputs. At each autograd node where a path to weights
# branches off, it records the gradient; torch has functions that find these nodes. The second half computes the
# gradients of the weights from the recorded ones. It accumulates into `.grad` by autograd, so hooks on gradients run as
# in any backward pass.
#
# In a stage with activation checkpointing, the second half would recompute the activations once for each branch; a
# compiled stage is one autograd node, without branches. For both, full backward passes are better (`merge_backward`).


Branches = list[dict[str, Any]]
"""Autograd nodes where paths to weights branch off (`intermediates`), their gradients (`grads`), and the weights
(`params`): dicts as torch's `get_param_groups` returns them."""


class StageGraph:
    """The autograd graph of one stage and micro-batch, between its forward and backward passes."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = list(inputs)
        """The tensors received from the stage before that need gradients."""
        # The values of the outputs are not needed, only their edges in the graph.
        self._outputs = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        self._gradients: Sequence[Tensor] = ()
        self._branches: Branches = []

    def run(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the full backward pass: accumulate gradients of parameters into `.grad`, return those of the inputs.

        `gradients` are those of the outputs that require a gradient, in their order.
        """
        if self._outputs:
            torch.autograd.backward(self._outputs, grad_tensors=gradients)
        self._outputs = []
        return [_take_grad(tensor) for tensor in self.inputs]

    def run_inputs(self, gradients: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
        """Run the first half, return the gradients of the inputs; see [Note: two halves of a backward pass]."""
        if not self.inputs:  # no stage waits for gradients of inputs: the second half runs the full backward pass
            self._gradients = gradients
            return []
        gradients_of_inputs: Sequence[Tensor | None] = [None] * len(self.inputs)
        if self._outputs:
            self._branches = _find_branches(self._outputs, self.inputs, module)
            hooks = [hook for branch in self._branches for hook in _recording_hooks(branch)]
            try:
                gradients_of_inputs = torch.autograd.grad(
                    self._outputs, self.inputs, gradients, retain_graph=True, allow_unused=True
                )
            finally:
                for hook in hooks:
                    hook.remove()
        self._outputs = []
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(self.inputs, gradients_of_inputs, strict=True)
        ]

    def run_weights(self) -> None:
        """Run the second half: accumulate gradients of the weights; see [Note: two halves of a backward pass]."""
        if not self.inputs:
            self.run(self._gradients)
            return
        while self._branches:
            _accumulate(self._branches.pop())


def _find_branches(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], module: nn.Module) -> Branches:
    from plait.torch_internals import construct_reverse_graph, get_param_groups

    weights = [get_gradient_edge(p).node for p in module.parameters() if p.requires_grad]
    graph = construct_reverse_graph([edge.node for edge in outputs])
    branches: Branches = get_param_groups([get_gradient_edge(t).node for t in inputs], weights, graph)
    for branch in branches:
        branch["intermediates"] = list(branch["intermediates"])
        branch["grads"] = [None] * len(branch["intermediates"])
    return branches


def _recording_hooks(branch: dict[str, Any]) -> Iterator[Any]:
    """Register hooks that record the gradients at the nodes of a branch; yield their handles."""

    def record(grads: tuple[Tensor | None, ...], index: int) -> None:
        branch["grads"][index] = grads

    for index, node in enumerate(branch["intermediates"]):
        yield node.register_prehook(lambda grads, index=index: record(grads, index))


def _take_grad(tensor: Tensor) -> Tensor:
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if gradient is None else gradient


def _accumulate(branch: dict[str, Any]) -> None:
    nodes: list[Node] = branch["intermediates"]
    edges, gradients, hooks = [], [], []
    for node, given in zip(nodes, branch["grads"], strict=True):
        for index, gradient in enumerate(given or ()):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
        if len(nodes) > 1 and given is not None:
            # The backward pass from one of these nodes may reach another of them, whose recorded gradient includes this
            # contribution already. So this hook replaces the sum by the recorded gradient.
            hooks.append(node.register_prehook(lambda _again, given=given: given))
    weights = [node.variable for node in branch["params"]]
    try:
        if edges:
            torch.autograd.backward(edges, gradients, inputs=weights)
    finally:
        for hook in hooks:
            hook.remove()


# ---- the pipeline bubble: how long this rank computed, and how long its steps took


@dataclass(slots=True)
class _Step:
    """Start and end of one step, and of each forward or backward pass in it: CUDA events, or seconds."""

    start: Any
    end: Any = None
    work: list[tuple[Any, Any]] = field(default_factory=list)


class BubbleClock:
    """Sums the time that this rank computes, and the time of whole steps.

    On CUDA this is device time, and the host does not wait for the device: a step that is not finished is added when
    a later one begins. The first step, which exchanges shapes and warms up, is counted only if it is the only one.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: list[_Step] = []
        self._added = 0
        self._busy = self._whole = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context that measures a step."""
        while self._pending and self._is_over(self._pending[0]):
            self._add(self._pending.pop(0))
        step = _Step(self._now())
        self._pending.append(step)
        try:
            yield
        except BaseException:
            self._pending.remove(step)  # an incomplete step is not counted
            raise
        step.end = self._now()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Return a context that measures one forward or backward pass in a step."""
        start = self._now()
        yield
        self._pending[-1].work.append((start, self._now()))

    def busy_and_whole(self) -> tuple[float, float]:
        """Return the seconds that this rank computed and those of the steps, summed over all steps but the first.

        (0, 0) before any step. Waits for the device.
        """
        for step in self._pending:
            if self._cuda:
                step.end.synchronize()
            self._add(step)
        self._pending.clear()
        return self._busy, self._whole

    def _add(self, step: _Step) -> None:
        if self._added == 1:
            self._busy = self._whole = 0.0
        self._added += 1
        self._busy += sum(self._seconds(*span) for span in step.work)
        self._whole += self._seconds(step.start, step.end)

    def _is_over(self, step: _Step) -> bool:
        return not self._cuda or bool(step.end.query())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1e3 if self._cuda else end - start)


# ---- stages of `fully_shard` whose backward pass has two halves
#
# In a full backward pass, FSDP all-gathers a block's parameters before their first use, and reduce-scatters their
# gradients after the last. The latter is triggered by the gradients of the block's inputs, that is in the first half,
# before there are gradients of weights. Therefore such a stage keeps its parameters and gradients unsharded from its
# first backward pass in a step on, and reduce-scatters once, after its last.


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the root of a stage."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def set_reduction(module: nn.Module, *, last: bool) -> None:
    """Before a backward pass of a sharded stage: let it reduce gradients only if it is the `last` one of the step."""
    root = cast(Any, module)
    root.set_requires_gradient_sync(last)
    root.set_is_last_backward(last)


def defer_reduction(module: nn.Module) -> None:
    """Before a backward pass, or a half: unshard the parameters, and do not reduce gradients."""
    from torch.distributed.fsdp import FSDPModule

    fsdp_defer_reduce(module)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.unshard()


def reduce_deferred(module: nn.Module) -> None:
    """After the last backward pass: reduce the gradients, and reshard the parameters."""
    fsdp_reduce_deferred(module)


# ---- sending activations and gradients between ranks
#
# [Note: what will come]
# A rank must know the shapes and dtypes of the tensors that it receives. They are not computed beforehand: that takes a
# forward pass, with collectives over sharded parameters, in which data-parallel replicas without a new input shape
# would not take part. Instead a stage sends the spec of its outputs before its activations, the first time that it gets
# inputs of a new signature (structure, shapes and dtypes of the micro-batch). Sender and receiver both know the
# signature, and cache the spec by it, so later it is not sent. Gradients have the shapes of the activations.


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The output of a stage: its structure, the specs of its tensors, and its other values.

    The other values must be the same for all inputs of one signature: they are sent only with the spec.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """Return the specs of the tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def serialize(self) -> bytes:
        """Return the spec as bytes, to be sent before the tensors."""
        return pickle.dumps((tree_unflatten(range(len(self.leaves)), self.structure), self.leaves))

    @staticmethod
    def deserialize(data: bytes) -> OutputSpec:
        """Return the spec that `serialize` turned into these bytes."""
        skeleton, leaves = pickle.loads(data)  # noqa: S301  # from a rank of this run
        return OutputSpec(tree_flatten(skeleton)[1], leaves)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return an output of this structure that contains these tensors and the other values."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def flatten_output(output: Any) -> tuple[OutputSpec, list[Tensor]]:
    """Return the spec of a stage's output, and its tensors; a DTensor in it raises a `ModelError`."""
    leaves, structure = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                "a pipeline stage returns a DTensor; between stages tensors must be plain, so its last layer has to "
                "return its local or its gathered output"
            )
    specs = tuple(
        TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return OutputSpec(structure, specs), tensors


def input_signature(inputs: Any) -> Hashable:
    """Return the signature of a micro-batch, on which shapes of activations depend: structure, shapes, plain values."""
    leaves, structure = tree_flatten(inputs)

    def signature(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        return str(type(leaf))

    return str(structure), tuple(signature(leaf) for leaf in leaves)


@dataclass(slots=True)
class PendingTensors:
    """Tensors that are being received, and their spec."""

    spec: OutputSpec
    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """Wait until the tensors are received, and return them."""
        wait_for(self.works, "an exchange between pipeline stages")
        return self.tensors


class Transport:
    """Sends to and receives from the ranks of neighbouring stages; see [Note: what will come]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._specs: dict[Hashable, OutputSpec] = {}
        self._is_fake = dist.get_backend(group) == "fake"  # a plan, without other ranks
        self.expected_spec: OutputSpec | None = None
        """In a plan (a simulated rank): the spec of the tensors to receive; None: the same as those this rank sends."""
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, spec: OutputSpec, tensors: Sequence[Tensor], peer: int, key: Hashable) -> None:
        """Send the output of a stage, and its spec when the key is new.

        `key` (stage, signature of the inputs, whether it trains) is the one that the peer passes to `receive`. Another
        spec than the last one of this key raises a `ModelError`.
        """
        known = self._specs.get(key)
        if known is None:
            self._specs[key] = spec
            if not self._is_fake:
                self._send_spec(spec, peer)
        elif known != spec:
            raise ModelError(
                f"for inputs of the same shapes a pipeline stage returned {_describe_spec(known)} before and now "
                f"{_describe_spec(spec)}; outputs of stages may depend on the shapes of the inputs only"
            )
        self.send_tensors(tensors, peer)

    def send_tensors(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Begin to send tensors whose shapes and dtypes the peer knows; `finish` waits for them."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        for tensor in tensors:
            ready = _bytes_if_bool(tensor.detach().contiguous())
            if ready.numel():
                work = dist.isend(ready, group=self.group, group_dst=peer)
                assert work is not None
                self._sending.append((work, ready))

    def receive(self, peer: int, key: Hashable) -> PendingTensors:
        """Begin to receive the output that the peer sends with the same key, and return it as pending."""
        if key not in self._specs:
            self._specs[key] = self._expected() if self._is_fake else self._receive_spec(peer)
        spec = self._specs[key]
        return self.receive_tensors(spec, spec.tensors, peer)

    def receive_tensors(self, spec: OutputSpec, specs: Sequence[TensorSpec], peer: int) -> PendingTensors:
        """Begin to receive tensors of these `specs`; return them as pending, with the `spec` of the whole output."""
        tensors = [spec.empty(self._device) for spec in specs]
        works = []
        for tensor in tensors:
            if tensor.numel():
                work = dist.irecv(_bytes_if_bool(tensor), group=self.group, group_src=peer)
                assert work is not None
                works.append(work)
        return PendingTensors(spec, tensors, works)

    @property
    def sent_spec(self) -> OutputSpec | None:
        """Return the spec of the first output that this rank has sent or received; None before."""
        return next(iter(self._specs.values()), None)

    def _expected(self) -> OutputSpec:
        spec = self.expected_spec or self.sent_spec
        assert spec is not None, "a fake rank needs the spec of what it receives"
        return spec

    def finish(self) -> None:
        """Wait until all sends are complete."""
        wait_for((work for work, _ in self._sending), "an exchange between pipeline stages")
        self._sending.clear()

    def _send_spec(self, spec: OutputSpec, peer: int) -> None:
        text = torch.frombuffer(bytearray(spec.serialize()), dtype=torch.uint8).to(self._device)
        self.send_tensors([torch.tensor([text.numel()], device=self._device), text], peer)

    def _receive_spec(self, peer: int) -> OutputSpec:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._fetch(length, peer)
        text = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._fetch(text, peer)
        return OutputSpec.deserialize(text.cpu().numpy().tobytes())

    def _fetch(self, tensor: Tensor, peer: int) -> None:
        work = dist.irecv(tensor, group=self.group, group_src=peer)
        wait_for([work], "an exchange of specs between pipeline stages")


def _bytes_if_bool(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _describe_spec(spec: OutputSpec) -> str:
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, TensorSpec) else repr(leaf)
        for leaf in spec.leaves
    )


# ---- one step over some micro-batches


LossOf = Callable[[Any, Any, int], Tensor]
"""(the model's output, the micro-batch, its index in the step) → the scalar to call backward on; for the last stage."""

BeforeBackward = Callable[[Stage, bool], None]
"""(stage, whether this is its last backward pass of the step): called before a full backward pass or a second half."""


class StepExecution:
    """Runs the forward and backward passes, sends and receives of this rank in one step, in the order of a program.

    `Pipeline` calls `perform` or `transfer` for each entry of the program.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        micro_batches: Sequence[Any],
        *,
        transport: Transport,
        clock: BubbleClock,
        splits: bool,
        loss_of: LossOf | None = None,
        before_backward: BeforeBackward | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self.training = loss_of is not None
        self.answers: dict[int, Any] = {}
        """Index of the micro-batch → output of the last stage; empty while training."""
        self._loss_of = loss_of
        self._before_backward = before_backward
        self._transport = transport
        self._clock = clock
        self._splits = splits
        self._stages = {stage.index: stage for stage in stages}
        self._signatures = [input_signature(inputs) for inputs in micro_batches]
        self._pending: dict[tuple[ActionType, int, int], PendingTensors] = {}
        """(type, stage that needs them, micro-batch) → tensors being received, or those of a stage on this rank."""
        self._outputs: dict[tuple[int, int], tuple[OutputSpec, list[Tensor]]] = {}
        self._specs: dict[tuple[int, int], OutputSpec] = {}
        self._graphs: dict[tuple[int, int], StageGraph] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        """(stage, index of the micro-batch) → gradients of the stage's inputs, until they are sent."""
        self._backwards: Counter[int] = Counter()

    def transfer(self, entry: StageTransfer) -> None:
        """Send, or begin to receive, the activations or gradients of this entry."""
        action_type, stage, index = entry.type, entry.stage, entry.micro_batch
        if action_type is ActionType.FORWARD:
            key: Hashable = (stage, self._signatures[index], self.training)
            if entry.sends:
                spec, tensors = self._outputs.pop((stage, index))
                self._transport.send(spec, tensors, entry.peer, key)
            else:
                self._pending[action_type, stage + 1, index] = self._transport.receive(entry.peer, key)
        elif entry.sends:
            self._transport.send_tensors(self._gradients.pop((stage, index)), entry.peer)
        else:
            spec = self._specs.pop((stage - 1, index))
            wanted = [tensor for tensor in spec.tensors if tensor.needs_grad]
            self._pending[action_type, stage - 1, index] = self._transport.receive_tensors(spec, wanted, entry.peer)

    def perform(self, action: Action) -> None:
        """Wait for the inputs of an action, and run it. An exception gets the stage and the micro-batch as context."""
        stage = self._stages[action.stage]
        try:
            if action.type is ActionType.FORWARD:
                self._forward(stage, action.micro_batch)
            elif action.type is ActionType.WEIGHT:
                self._backward_weights(stage, action.micro_batch)
            else:
                self._backward(stage, action.micro_batch, half=action.type is ActionType.INPUT)
        except Exception as error:
            half = "forward" if action.type is ActionType.FORWARD else "backward"
            _add_context(
                error,
                f"in the {half} pass of pipeline stage {stage.index} (of {stage.count}), "
                f"micro-batch {action.micro_batch} (of {len(self.micro_batches)})",
            )
            raise

    def _forward(self, stage: Stage, index: int) -> None:
        received, leaves = None, []
        if not stage.is_first:
            arrival = self._pending.pop((ActionType.FORWARD, stage.index, index))
            tensors = arrival.wait()
            for tensor, expected in zip(tensors, arrival.spec.tensors, strict=True):
                if expected.needs_grad and self.training:
                    leaves.append(tensor.requires_grad_())
            received = arrival.spec.fill(tensors)
        inputs = self.micro_batches[index]
        with self._clock.work() if self.training else nullcontext():
            output = stage.call(stage.module, inputs, received)
            if stage.is_last:
                self._finish_forward(stage, index, leaves, output, inputs)
                return
        spec, tensors = flatten_output(output)
        if self.training:
            self._graphs[stage.index, index] = StageGraph(leaves, tensors)
            self._specs[stage.index, index] = spec
        if stage.index + 1 in self._stages:
            local = PendingTensors(spec, [tensor.detach() for tensor in tensors], [])
            self._pending[ActionType.FORWARD, stage.index + 1, index] = local
        else:
            self._outputs[stage.index, index] = (spec, tensors)

    def _finish_forward(self, stage: Stage, index: int, leaves: list[Tensor], output: Any, inputs: Any) -> None:
        if self._loss_of is None:
            self.answers[index] = output
            return
        loss = self._loss_of(output, inputs, index)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(f"the loss of a micro-batch must be a tensor with one element, not {type(loss).__name__}")
        self._graphs[stage.index, index] = StageGraph(leaves, [loss])
        self._pending[ActionType.BACKWARD, stage.index, index] = PendingTensors(
            flatten_output(loss)[0], [torch.ones_like(loss)] if loss.requires_grad else [], []
        )

    def _backward(self, stage: Stage, index: int, *, half: bool) -> None:
        gradients = self._pending.pop((ActionType.BACKWARD, stage.index, index)).wait()
        self._specs.pop((stage.index, index), None)
        with self._clock.work():
            if half:
                self._before_gradients(stage, last=False, halves=True)
                gradients_of_inputs = self._graphs[stage.index, index].run_inputs(gradients, stage.module)
            else:
                self._before_gradients(stage, last=self._is_last_backward(stage))
                gradients_of_inputs = self._graphs.pop((stage.index, index)).run(gradients)
                self._after_gradients(stage)
        if stage.is_first:
            return
        if stage.index - 1 in self._stages:
            spec = self._specs[stage.index - 1, index]
            self._pending[ActionType.BACKWARD, stage.index - 1, index] = PendingTensors(spec, gradients_of_inputs, [])
        else:
            self._gradients[stage.index, index] = gradients_of_inputs

    def _backward_weights(self, stage: Stage, index: int) -> None:
        with self._clock.work():
            self._before_gradients(stage, last=self._is_last_backward(stage))
            self._graphs.pop((stage.index, index)).run_weights()
            self._after_gradients(stage)

    def _is_last_backward(self, stage: Stage) -> bool:
        self._backwards[stage.index] += 1
        return self._backwards[stage.index] == len(self.micro_batches)

    def _before_gradients(self, stage: Stage, *, last: bool, halves: bool = False) -> None:
        """Prepare the reduction of gradients before a backward pass.

        `halves`: this is the first half of one, which accumulates no gradients of parameters.
        """
        is_sharded = is_fully_sharded(stage.module)
        if is_sharded and self._splits:
            defer_reduction(stage.module)
        elif halves:
            return
        elif self._before_backward is not None:
            self._before_backward(stage, last)
        elif is_sharded:
            set_reduction(stage.module, last=last)

    def _after_gradients(self, stage: Stage) -> None:
        done = self._backwards[stage.index] == len(self.micro_batches)
        if done and self._splits and is_fully_sharded(stage.module):
            reduce_deferred(stage.module)


def _add_context(error: Exception, context: str) -> None:
    if isinstance(error, PlaitError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n  {context}",)  # users see only its text
    else:
        error.add_note(context)


@dataclass(frozen=True, slots=True)
class Bubble:
    """The share of time in which the ranks of a pipeline are idle: measured, and as the schedule predicts."""

    schedule: str
    measured: float
    """Over all steps but the first, which warms up."""
    theoretical: float
    """If stages take equally long and communication takes no time, for the most frequent number of micro-batches."""

    def __str__(self) -> str:
        return f"pipeline: {self.measured:.0%} idle ({self.schedule} in theory: {self.theoretical:.0%})"


class Pipeline:
    """The stages of this rank, run together with those of the other ranks of `group`.

    Every rank of the group must get the same micro-batches, or at least micro-batches of the same shapes. Gradients are
    sums over micro-batches, without a division, in `.grad` or wherever the hooks on parameters put them.

    With `splits_backward=False`, schedules that split backward passes into halves run full ones; use it for a stage
    with activation checkpointing. For a compiled stage it is always so.

    All ranks of the group must create it together. An exception in a stage names the stage and the micro-batch. The
    other ranks then wait until the timeout of their group, so a process that catches the exception should exit.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        schedule: ScheduleName,
        group: dist.ProcessGroup,
        device: torch.device,
        splits_backward: bool = True,
    ) -> None:
        self.stages = list(stages)
        self.schedule = schedule
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.virtual = len(self.stages)
        self.placement = placement_of(schedule, self.ranks, self.virtual)
        """The rank of each stage."""
        self.tied = TiedWeights(self.stages, self.placement, group)
        """Parameters that several stages hold. Call `tied.refresh()` before each step, `tied.sum()` after it."""
        self._group = group
        self._device = device
        self.transport = Transport(group, device)
        """Sends activations and gradients between stages."""
        self._clock = BubbleClock(device)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._counts: Counter[int] = Counter()
        """Number of micro-batches → number of training steps that had as many."""
        self._splits = find_schedule(schedule).splits_backward and self._agree(
            splits_backward and not any(_is_compiled(stage.module) for stage in self.stages)
        )

    def _agree(self, splits: bool) -> bool:
        """Return whether all ranks of the group pass True: they must all follow the same schedule."""
        vote = torch.tensor([int(splits)], device=self._device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def _run(self, micro_batches: Sequence[Any], **callbacks: Any) -> StepExecution:
        return StepExecution(
            self.stages,
            micro_batches,
            transport=self.transport,
            clock=self._clock,
            splits=self._splits,
            **callbacks,
        )

    @property
    def has_last(self) -> bool:
        """Whether the last stage, which computes the loss, is on this rank."""
        return self.placement[-1] == self.rank

    def step(
        self, micro_batches: Sequence[Any], loss_of: LossOf, before_backward: BeforeBackward | None = None
    ) -> None:
        """Run the forward and backward passes of all micro-batches; gradients are accumulated.

        `before_backward` is called before each backward pass that accumulates gradients of parameters. Without it,
        sharded stages reduce in their last backward pass. For a sharded stage whose backward pass has two halves it is
        not called, and gradients are reduced once, at the end.
        """
        run = self._run(micro_batches, loss_of=loss_of, before_backward=before_backward)
        self._perform(run, self._program(len(micro_batches), backward=True))

    def forward(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Run forward passes only, without gradients; return the model's outputs in the order of the micro-batches.

        The list is empty on ranks without the last stage. Any number of micro-batches is supported.
        """
        run = self._run(micro_batches)
        with torch.no_grad():
            self._perform(run, self._program(len(micro_batches), backward=False))
        return [run.answers[index] for index in sorted(run.answers)]

    def bubble(self) -> Bubble | None:
        """Return the bubble of all steps so far; None before any. Every rank of the group must call it (collective)."""
        if not self._counts:
            return None
        busy, whole = self._clock.busy_and_whole()
        longest = torch.tensor([whole], dtype=torch.float64, device=self._device)
        total = torch.tensor([busy], dtype=torch.float64, device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        dist.all_reduce(total, group=self._group)
        table = self._table(self._counts.most_common(1)[0][0], backward=True)
        theory = bubble_of(simulate(table, len(self.placement)))
        return Bubble(str(self.schedule), 1.0 - float(total) / (self.ranks * float(longest)), theory)

    def _table(self, count: int, *, backward: bool) -> Table:
        if not backward:
            return forward_table(self.placement, count)
        table = make_table(self.schedule, self.ranks, count, self.virtual)
        return table if self._splits else merge_backward(table)

    def _program(self, count: int, *, backward: bool) -> Program:
        key = (count, backward)
        if key not in self._programs:
            self._programs[key] = make_programs(self._table(count, backward=backward), self.placement)[self.rank]
        return self._programs[key]

    def _perform(self, run: StepExecution, program: Program) -> None:
        with self._clock.step() if run.training else nullcontext():
            for entry in program:
                if isinstance(entry, StageTransfer):
                    run.transfer(entry)
                else:
                    run.perform(entry)
            self.transport.finish()
        if run.training:
            self._counts[len(run.micro_batches)] += 1


def _is_compiled(module: nn.Module) -> bool:
    return any(compiled_call(submodule) is not None for submodule in module.modules())
