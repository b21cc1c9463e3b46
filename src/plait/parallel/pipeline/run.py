"""One pass over some micro-batches: what is kept, handed over and let go of between the actions of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from plait.errors import ModelError, PlaitError
from plait.parallel.pipeline import sharded
from plait.parallel.pipeline.backward import Graph
from plait.parallel.pipeline.clock import Clock
from plait.parallel.pipeline.schedule import Action, Kind
from plait.parallel.pipeline.split import Stage
from plait.parallel.pipeline.timeline import Transfer
from plait.parallel.pipeline.transport import Arrival, Form, Transport, form_of_inputs, take_apart

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
        clock: Clock,
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
        self._arrivals: dict[tuple[Kind, int, int], Arrival] = {}
        """What comes for (kind, stage that needs it, micro-batch)."""
        self._outputs: dict[tuple[int, int], tuple[Form, list[Tensor]]] = {}
        self._forms: dict[tuple[int, int], Form] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}
        """Of the inputs of (stage, micro-batch), until they are on their way."""
        self._backwards: Counter[int] = Counter()

    def transfer(self, entry: Transfer) -> None:
        """Send or begin to receive."""
        kind, stage, index = entry.kind, entry.stage, entry.micro_batch
        if kind is Kind.FORWARD:
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
            if action.kind is Kind.FORWARD:
                self._forward(stage, action.micro_batch)
            elif action.kind is Kind.WEIGHT:
                self._backward_weights(stage, action.micro_batch)
            else:
                self._backward(stage, action.micro_batch, half=action.kind is Kind.INPUT)
        except Exception as error:
            half = "forward" if action.kind is Kind.FORWARD else "backward"
            _add_place(
                error,
                f"in the {half} pass of pipeline stage {stage.index} (of {stage.count}), "
                f"micro-batch {action.micro_batch} (of {len(self.micro_batches)})",
            )
            raise

    def _forward(self, stage: Stage, index: int) -> None:
        handed, leaves = None, []
        if not stage.is_first:
            arrival = self._arrivals.pop((Kind.FORWARD, stage.index, index))
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
            self._arrivals[Kind.FORWARD, stage.index + 1, index] = local
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
        self._arrivals[Kind.BACKWARD, stage.index, index] = Arrival(
            take_apart(loss)[0], [torch.ones_like(loss)] if loss.requires_grad else [], []
        )

    def _backward(self, stage: Stage, index: int, *, half: bool) -> None:
        gradients = self._arrivals.pop((Kind.BACKWARD, stage.index, index)).wait()
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
            self._arrivals[Kind.BACKWARD, stage.index - 1, index] = Arrival(form, found, [])
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
        is_sharded = sharded.is_fully_sharded(stage.module)
        if is_sharded and self._splits:
            sharded.hold_back(stage.module)
        elif halves:
            return
        elif self._before_backward is not None:
            self._before_backward(stage, last)
        elif is_sharded:
            sharded.reduce_last(stage.module, last=last)

    def _after_weights(self, stage: Stage) -> None:
        done = self._backwards[stage.index] == len(self.micro_batches)
        if done and self._splits and sharded.is_fully_sharded(stage.module):
            sharded.let_go(stage.module)


def _add_place(error: Exception, place: str) -> None:
    if isinstance(error, PlaitError) and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n  {place}",)  # its text is all that a user sees of it
    else:
        error.add_note(place)
