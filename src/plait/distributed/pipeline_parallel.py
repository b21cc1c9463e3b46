"""Runs the stages of this rank, in step with those of the other ranks.

[Note: why not torch's own stages]
The order of work comes from `torch.distributed.pipelining`, and so does the backward pass in two halves. Its
stages and its loop are not used: they cut one batch of tensors into equal pieces, where here micro-batches are
anything, already cut, and the last may be short; they learn shapes by running the model once more
([Note: what will come]); they want tensors from the last stage, where a model may answer with its loss; and
gradients of sharded parameters are always reduced at the end of the step, where most schedules let the last
backward pass overlap with it.
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
    ActionKind,
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

# The backward pass of one stage, whole or in two halves.
#
# [Note: two halves of a backward pass]
# Zero-bubble schedules fill gaps with work that nobody waits for: gradients of weights. The first half finds the
# gradients of the stage's inputs, and remembers what arrives at every point of the graph where a path to weights
# branches off; torch knows how to find these points. The second half starts from them. It goes through autograd's
# accumulation, so hooks on gradients see them as in any backward pass.
#
# A stage that recomputes its activations would recompute them for each branch of the second half anew, and one that
# is compiled has no branches. Both should run the whole pass at once (`merge_backward`).


Branches = list[dict[str, Any]]
"""Points where paths to weights branch off, with what arrived there."""


class Graph:
    """What one stage keeps of one micro-batch between its forward and backward passes."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = list(inputs)
        """The tensors from the stage before that need gradients."""
        # The values of the outputs are not needed, only their place in the graph.
        self._outputs = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        self._gradients: Sequence[Tensor] = ()
        self._branches: Branches = []

    def run(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The whole pass: gradients of the parameters are accumulated, those of the inputs are the answer.

        `gradients` are those of the outputs, as far as they have any.
        """
        if self._outputs:
            torch.autograd.backward(self._outputs, grad_tensors=gradients)
        self._outputs = []
        return [_taken(tensor) for tensor in self.inputs]

    def run_inputs(self, gradients: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
        """The first half; see [Note: two halves of a backward pass]."""
        if not self.inputs:  # nobody waits: all of it is left for the second half
            self._gradients = gradients
            return []
        found: Sequence[Tensor | None] = [None] * len(self.inputs)
        if self._outputs:
            self._branches = _find_branches(self._outputs, self.inputs, module)
            hooks = [hook for branch in self._branches for hook in _remember(branch)]
            try:
                found = torch.autograd.grad(self._outputs, self.inputs, gradients, retain_graph=True, allow_unused=True)
            finally:
                for hook in hooks:
                    hook.remove()
        self._outputs = []
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(self.inputs, found, strict=True)
        ]

    def run_weights(self) -> None:
        """The second half: gradients of the weights; see [Note: two halves of a backward pass]."""
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


def _remember(branch: dict[str, Any]) -> Iterator[Any]:
    """Hooks that note what arrives."""

    def note(arrived: tuple[Tensor | None, ...], index: int) -> None:
        branch["grads"][index] = arrived

    for index, node in enumerate(branch["intermediates"]):
        yield node.register_prehook(lambda arrived, index=index: note(arrived, index))


def _taken(tensor: Tensor) -> Tensor:
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
            # One of these points may lie behind another. What arrived there has all of it already.
            hooks.append(node.register_prehook(lambda _again, given=given: given))
    weights = [node.variable for node in branch["params"]]
    try:
        if edges:
            torch.autograd.backward(edges, gradients, inputs=weights)
    finally:
        for hook in hooks:
            hook.remove()


# How long this rank worked, and how long its steps took.


@dataclass(slots=True)
class _Step:
    """When one step and the work in it began and ended."""

    start: Any
    end: Any = None
    work: list[tuple[Any, Any]] = field(default_factory=list)


class BubbleClock:
    """Adds up the time in which something is computed, and that of whole steps.

    On CUDA it is the device's time, and nobody waits for the device: steps that it has not finished yet are added
    up when a later one begins. The first step is left out as soon as there is another. It learns shapes and warms
    up, and would say little of a run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: list[_Step] = []
        self._added = 0
        self._busy = self._whole = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that a step does."""
        while self._pending and self._is_over(self._pending[0]):
            self._add(self._pending.pop(0))
        step = _Step(self._now())
        self._pending.append(step)
        try:
            yield
        except BaseException:
            self._pending.remove(step)  # half a step has no length
            raise
        step.end = self._now()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around something that is computed, in a step."""
        start = self._now()
        yield
        self._pending[-1].work.append((start, self._now()))

    def busy_and_whole(self) -> tuple[float, float]:
        """Seconds of work and of everything, over all steps but the first; zeros before any. Waits for the device."""
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


# Stages whose parameters are sharded (`fully_shard`), where a backward pass comes in two halves.
#
# In a whole backward pass, sharding looks after itself: it gathers before, and scatters after the last use of a
# block's parameters. Its hooks sit on the blocks' inputs, so they would fire in the first half, before there are
# gradients of weights. Therefore such a stage keeps whole parameters and gradients from its first backward pass on,
# and scatters once, after its last.


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether the root of a stage was given to `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def reduce_last(module: nn.Module, *, last: bool) -> None:
    """Have the gradients of a sharded stage reduced by the last backward pass of a step only."""
    root = cast(Any, module)
    root.set_requires_gradient_sync(last)
    root.set_is_last_backward(last)


def hold_back(module: nn.Module) -> None:
    """Before a backward pass, or a half: whole parameters, and gradients stay where they are."""
    from torch.distributed.fsdp import FSDPModule

    fsdp_defer_reduce(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()


def let_go(module: nn.Module) -> None:
    """After the last: scatter the gradients, and let go of whole parameters."""
    fsdp_reduce_deferred(module)


# Activations and gradients on their way between ranks.
#
# [Note: what will come]
# A rank must know the shape of what it receives. It is not worked out beforehand: that would take a forward pass,
# with the collectives of sharded parameters inside, at a moment when other replicas may see no new shape and take
# no part. So the first time that inputs of some form come, each stage sends a description ahead of its activations;
# both sides keep it under the form of the inputs, which they both know, and the next time it is not sent. Gradients
# have the shapes of the activations.


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """A tensor like it, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Form:
    """What a stage hands on: its structure, its tensors, and whatever else is in it, which must not change."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """The forms of its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def written(self) -> bytes:
        """The form as bytes, to be sent ahead of the tensors."""
        return pickle.dumps((tree_unflatten(range(len(self.leaves)), self.structure), self.leaves))

    @staticmethod
    def read(data: bytes) -> Form:
        """The form that `written` made bytes of."""
        skeleton, leaves = pickle.loads(data)  # noqa: S301  # from a rank of this run
        return Form(tree_flatten(skeleton)[1], leaves)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The structure, with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def take_apart(output: Any) -> tuple[Form, list[Tensor]]:
    """The form of what a stage gave, and its tensors."""
    leaves, structure = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                "a pipeline stage ends with a DTensor; between stages tensors must be plain, "
                "so the last layer of a stage has to give its local or its gathered output"
            )
    forms = tuple(
        TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return Form(structure, forms), tensors


def form_of_inputs(inputs: Any) -> Hashable:
    """What the shapes of activations depend on: the structure of a micro-batch, its shapes, its plain values."""
    leaves, structure = tree_flatten(inputs)

    def form(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        return str(type(leaf))

    return str(structure), tuple(form(leaf) for leaf in leaves)


@dataclass(slots=True)
class Arrival:
    """Tensors that are on their way here."""

    form: Form
    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        wait_for(self.works, "an exchange between pipeline stages")
        return self.tensors


class Transport:
    """Sends to and receives from the neighbours of this rank; see [Note: what will come]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._forms: dict[Hashable, Form] = {}
        self._alone = dist.get_backend(group) == "fake"  # in a world where no one else is there
        self.foretold: Form | None = None
        """Where this rank is alone: what comes from the others. Absent: what it hands on itself."""
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, form: Form, tensors: Sequence[Tensor], peer: int, key: Hashable) -> None:
        """Send what a stage gave. `key` is the stage and the form of the inputs, and known to the peer."""
        known = self._forms.get(key)
        if known is None:
            self._forms[key] = form
            if not self._alone:
                self._describe(form, peer)
        elif known != form:
            raise ModelError(
                f"for inputs of the same shapes a pipeline stage gave {_words(known)} before and now "
                f"{_words(form)}; what stages hand to each other may depend on the shapes of the inputs only"
            )
        self.send_tensors(tensors, peer)

    def send_tensors(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Send tensors whose shapes the peer knows."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        for tensor in tensors:
            ready = _bytes_if_bool(tensor.detach().contiguous())
            if ready.numel():
                work = dist.isend(ready, group=self.group, group_dst=peer)
                assert work is not None
                self._sending.append((work, ready))

    def receive(self, peer: int, key: Hashable) -> Arrival:
        """Begin to receive what the peer sends under the same key."""
        if key not in self._forms:
            self._forms[key] = self._foretold() if self._alone else self._description(peer)
        form = self._forms[key]
        return self.receive_tensors(form, form.tensors, peer)

    def receive_tensors(self, form: Form, forms: Sequence[TensorForm], peer: int) -> Arrival:
        """Begin to receive tensors of known shapes."""
        tensors = [form.empty(self._device) for form in forms]
        works = []
        for tensor in tensors:
            if tensor.numel():
                work = dist.irecv(_bytes_if_bool(tensor), group=self.group, group_src=peer)
                assert work is not None
                works.append(work)
        return Arrival(form, tensors, works)

    @property
    def handed_on(self) -> Form | None:
        """The form of what this rank sends or receives, where it has done so."""
        return next(iter(self._forms.values()), None)

    def _foretold(self) -> Form:
        form = self.foretold or self.handed_on
        assert form is not None, "a rank that is alone must be told what it receives"
        return form

    def finish(self) -> None:
        """Wait until everything was sent."""
        wait_for((work for work, _ in self._sending), "an exchange between pipeline stages")
        self._sending.clear()

    def _describe(self, form: Form, peer: int) -> None:
        text = torch.frombuffer(bytearray(form.written()), dtype=torch.uint8).to(self._device)
        self.send_tensors([torch.tensor([text.numel()], device=self._device), text], peer)

    def _description(self, peer: int) -> Form:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._fetch(length, peer)
        text = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._fetch(text, peer)
        return Form.read(text.cpu().numpy().tobytes())

    def _fetch(self, tensor: Tensor, peer: int) -> None:
        work = dist.irecv(tensor, group=self.group, group_src=peer)
        wait_for([work], "an exchange of forms between pipeline stages")


def _bytes_if_bool(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _words(form: Form) -> str:
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, TensorForm) else repr(leaf)
        for leaf in form.leaves
    )


# One pass over some micro-batches: what is kept, handed over and let go of between the actions of a schedule.


LossOf = Callable[[Any, Any, int], Tensor]
"""(the model's answer, the micro-batch, its number) → the scalar to call backward on. Runs on the last stage."""

BeforeBackward = Callable[[Stage, bool], None]
"""(stage, whether it is the stage's last of this step): called before gradients of parameters are accumulated."""


class Run:
    """The work of this rank, action by action; its ends are tied together by `Pipeline`."""

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
        """What the last stage answered, by micro-batch; not while training."""
        self._loss_of = loss_of
        self._before_backward = before_backward
        self._transport = transport
        self._clock = clock
        self._splits = splits
        self._stages = {stage.index: stage for stage in stages}
        self._inputs_form = [form_of_inputs(inputs) for inputs in micro_batches]
        self._arrivals: dict[tuple[ActionKind, int, int], Arrival] = {}
        """What comes for (kind, stage that needs it, micro-batch)."""
        self._outputs: dict[tuple[int, int], tuple[Form, list[Tensor]]] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        """Of the inputs of (stage, micro-batch), until they are on their way."""
        self._backwards: Counter[int] = Counter()

    def transfer(self, entry: StageTransfer) -> None:
        """Send or begin to receive."""
        kind, stage, index = entry.kind, entry.stage, entry.micro_batch
        if kind is ActionKind.FORWARD:
            key: Hashable = (stage, self._inputs_form[index], self.training)
            if entry.sends:
                form, tensors = self._outputs.pop((stage, index))
                self._transport.send(form, tensors, entry.peer, key)
            else:
                self._arrivals[kind, stage + 1, index] = self._transport.receive(entry.peer, key)
        elif entry.sends:
            self._transport.send_tensors(self._gradients.pop((stage, index)), entry.peer)
        else:
            form = self._forms.pop((stage - 1, index))
            wanted = [tensor for tensor in form.tensors if tensor.needs_grad]
            self._arrivals[kind, stage - 1, index] = self._transport.receive_tensors(form, wanted, entry.peer)

    def perform(self, action: Action) -> None:
        """Compute something, once what it needs is here."""
        stage = self._stages[action.stage]
        try:
            if action.kind is ActionKind.FORWARD:
                self._forward(stage, action.micro_batch)
            elif action.kind is ActionKind.WEIGHT:
                self._backward_weights(stage, action.micro_batch)
            else:
                self._backward(stage, action.micro_batch, half=action.kind is ActionKind.INPUT)
        except Exception as error:
            half = "forward" if action.kind is ActionKind.FORWARD else "backward"
            _add_place(
                error,
                f"in the {half} pass of pipeline stage {stage.index} (of {stage.count}), "
                f"micro-batch {action.micro_batch} (of {len(self.micro_batches)})",
            )
            raise

    def _forward(self, stage: Stage, index: int) -> None:
        handed, leaves = None, []
        if not stage.is_first:
            arrival = self._arrivals.pop((ActionKind.FORWARD, stage.index, index))
            tensors = arrival.wait()
            for tensor, expected in zip(tensors, arrival.form.tensors, strict=True):
                if expected.needs_grad and self.training:
                    leaves.append(tensor.requires_grad_())
            handed = arrival.form.fill(tensors)
        inputs = self.micro_batches[index]
        with self._clock.work() if self.training else nullcontext():
            answer = stage.call(stage.module, inputs, handed)
            if stage.is_last:
                self._finish_forward(stage, index, leaves, answer, inputs)
                return
        form, tensors = take_apart(answer)
        if self.training:
            self._graphs[stage.index, index] = Graph(leaves, tensors)
            self._forms[stage.index, index] = form
        if stage.index + 1 in self._stages:
            local = Arrival(form, [tensor.detach() for tensor in tensors], [])
            self._arrivals[ActionKind.FORWARD, stage.index + 1, index] = local
        else:
            self._outputs[stage.index, index] = (form, tensors)

    def _finish_forward(self, stage: Stage, index: int, leaves: list[Tensor], answer: Any, inputs: Any) -> None:
        if self._loss_of is None:
            self.answers[index] = answer
            return
        loss = self._loss_of(answer, inputs, index)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(f"the loss of a micro-batch is to be one number in a tensor, not {type(loss).__name__}")
        self._graphs[stage.index, index] = Graph(leaves, [loss])
        self._arrivals[ActionKind.BACKWARD, stage.index, index] = Arrival(
            take_apart(loss)[0], [torch.ones_like(loss)] if loss.requires_grad else [], []
        )

    def _backward(self, stage: Stage, index: int, *, half: bool) -> None:
        gradients = self._arrivals.pop((ActionKind.BACKWARD, stage.index, index)).wait()
        self._forms.pop((stage.index, index), None)
        with self._clock.work():
            if half:
                self._prepare(stage, last=False, halves=True)
                found = self._graphs[stage.index, index].run_inputs(gradients, stage.module)
            else:
                self._prepare(stage, last=self._is_last_backward(stage))
                found = self._graphs.pop((stage.index, index)).run(gradients)
                self._after_weights(stage)
        if stage.is_first:
            return
        if stage.index - 1 in self._stages:
            form = self._forms[stage.index - 1, index]
            self._arrivals[ActionKind.BACKWARD, stage.index - 1, index] = Arrival(form, found, [])
        else:
            self._gradients[stage.index, index] = found

    def _backward_weights(self, stage: Stage, index: int) -> None:
        with self._clock.work():
            self._prepare(stage, last=self._is_last_backward(stage))
            self._graphs.pop((stage.index, index)).run_weights()
            self._after_weights(stage)

    def _is_last_backward(self, stage: Stage) -> bool:
        self._backwards[stage.index] += 1
        return self._backwards[stage.index] == len(self.micro_batches)

    def _prepare(self, stage: Stage, *, last: bool, halves: bool = False) -> None:
        """Tell the collectors of gradients what comes; the first half of a backward pass collects nothing."""
        is_sharded = is_fully_sharded(stage.module)
        if is_sharded and self._splits:
            hold_back(stage.module)
        elif halves:
            return
        elif self._before_backward is not None:
            self._before_backward(stage, last)
        elif is_sharded:
            reduce_last(stage.module, last=last)

    def _after_weights(self, stage: Stage) -> None:
        done = self._backwards[stage.index] == len(self.micro_batches)
        if done and self._splits and is_fully_sharded(stage.module):
            let_go(stage.module)


def _add_place(error: Exception, place: str) -> None:
    if isinstance(error, PlaitError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n  {place}",)  # its text is all that a user sees of it
    else:
        error.add_note(place)


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle share of all ranks of a pipeline: as it was, and by the schedule."""

    schedule: str
    measured: float
    """Of all steps but the first, which warms up."""
    theoretical: float
    """Were all stages equally long and sending free, for as many micro-batches as most steps had."""

    def __str__(self) -> str:
        return f"pipeline: {self.measured:.0%} idle ({self.schedule} in theory: {self.theoretical:.0%})"


class Pipeline:
    """The stages of this rank, and what they need to work with those of the other ranks of `group`.

    Every rank of the group is given the same micro-batches, or at least such of the same shapes. Gradients are
    plain sums over micro-batches, in `.grad` or wherever the hooks on parameters put them.

    `splits_backward=False` runs schedules with half backward passes with whole ones; a stage that recomputes
    activations should, and a compiled one has to (which is seen here).

    To be made by all ranks of the group together. An exception in a stage names the stage and the micro-batch.
    The other ranks wait for this one until their group's timeout, so whoever catches it should end the process.
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
        """Weights that several stages hold. Call `tied.sum()` after each step, before gradients are used."""
        self._group = group
        self._device = device
        self.transport = Transport(group, device)
        """How activations and gradients travel between stages."""
        self._clock = BubbleClock(device)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._counts: Counter[int] = Counter()
        """How many steps had how many micro-batches."""
        self._splits = find_schedule(schedule).splits_backward and self._agree(
            splits_backward and not any(_is_compiled(stage.module) for stage in self.stages)
        )

    def _agree(self, willing: bool) -> bool:
        """Whether all ranks are: they must follow one table."""
        vote = torch.tensor([int(willing)], device=self._device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def _run(self, micro_batches: Sequence[Any], **callbacks: Any) -> Run:
        return Run(
            self.stages,
            micro_batches,
            transport=self.transport,
            clock=self._clock,
            splits=self._splits,
            **callbacks,
        )

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank: here the loss is known."""
        return self.placement[-1] == self.rank

    def step(
        self, micro_batches: Sequence[Any], loss_of: LossOf, before_backward: BeforeBackward | None = None
    ) -> None:
        """Forward and backward over all micro-batches.

        `before_backward` tells whoever collects gradients what to expect; without it, sharded stages reduce in
        their last backward pass. Where a sharded stage's backward pass comes in halves, it is not called, and
        gradients are reduced once, at the end.
        """
        run = self._run(micro_batches, loss_of=loss_of, before_backward=before_backward)
        self._perform(run, self._program(len(micro_batches), backward=True))

    def forward(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Forward passes alone, without gradients; returns the model's answers.

        They are where the last stage is; elsewhere the list is empty. Any number of micro-batches will do.
        """
        run = self._run(micro_batches)
        with torch.no_grad():
            self._perform(run, self._program(len(micro_batches), backward=False))
        return [run.answers[index] for index in sorted(run.answers)]

    def bubble(self) -> Bubble | None:
        """The idle share of all steps so far; None before any. To be called by all ranks of the group."""
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

    def _perform(self, run: Run, program: Program) -> None:
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
    return any(compiled_call(part) is not None for part in module.modules())
