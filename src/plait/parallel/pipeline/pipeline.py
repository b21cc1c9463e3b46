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

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.parallel.pipeline.clock import Clock
from plait.parallel.pipeline.run import BeforeBackward, LossOf, Run
from plait.parallel.pipeline.schedule import (
    ScheduleName,
    Table,
    find_schedule,
    forward_table,
    make_table,
    merge_backward,
    placement_of,
)
from plait.parallel.pipeline.split import Stage
from plait.parallel.pipeline.tied import TiedWeights
from plait.parallel.pipeline.timeline import Program, Transfer, bubble_of, make_programs, simulate
from plait.parallel.pipeline.transport import Transport
from plait.torch_internals import compiled_call


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
        self._clock = Clock(device)
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
                if isinstance(entry, Transfer):
                    run.transfer(entry)
                else:
                    run.perform(entry)
            self.transport.finish()
        if run.training:
            self._counts[len(run.micro_batches)] += 1


def _is_compiled(module: nn.Module) -> bool:
    return any(compiled_call(part) is not None for part in module.modules())
