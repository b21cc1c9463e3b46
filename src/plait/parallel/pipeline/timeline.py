"""What a table means in time: who waits for whom, how long nobody works, and when what is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from plait.parallel.pipeline.schedule import Action, Kind, ScheduleName, Table, make_table, placement_of

COSTS: Mapping[Kind, float] = MappingProxyType(
    {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
)
"""The usual assumption: each half of a backward pass takes as long as the forward pass."""


class Span(NamedTuple):
    """An action, and from when to when it lasts."""

    action: Action
    start: float
    end: float


def simulate(table: Table, stages: int, costs: Mapping[Kind, float] = COSTS) -> list[list[Span]]:
    """When each rank does what, if nothing but work takes time.

    Raises AssertionError for a table in which ranks wait for each other for ever.
    """
    spans = _laid_out(table, stages, costs)
    assert all(len(done) == len(work) for done, work in zip(spans, table, strict=True)), "a table that cannot be run"
    return spans


def stuck_at(table: Table, stages: int) -> Action | None:
    """The first action that a rank waits for ever to begin; None where all of the table can be run."""
    spans = _laid_out(table, stages, COSTS)
    return next((work[len(done)] for done, work in zip(spans, table, strict=True) if len(done) < len(work)), None)


def _laid_out(table: Table, stages: int, costs: Mapping[Kind, float]) -> list[list[Span]]:
    done: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in table]
    free = [0.0] * len(table)
    progress = True
    while progress:
        progress = False
        for rank, work in enumerate(table):
            while len(spans[rank]) < len(work):
                action = work[len(spans[rank])]
                ready = _ready_at(action, stages, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = done[action] = start + costs[action.kind]
                spans[rank].append(Span(action, start, free[rank]))
                progress = True
    return spans


def _ready_at(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """When all that an action needs is there; None where it is not known yet."""
    kind, stage, index = action
    if kind is Kind.FORWARD:
        return 0.0 if stage == 0 else done.get(Action(Kind.FORWARD, stage - 1, index))
    if kind is Kind.WEIGHT:
        return done.get(Action(Kind.INPUT, stage, index))
    own = done.get(Action(Kind.FORWARD, stage, index))
    if own is None or stage == stages - 1:
        return own
    for other in (Kind.BACKWARD, Kind.INPUT):
        after = done.get(Action(other, stage + 1, index))
        if after is not None:
            return max(own, after)
    return None


def bubble_of(spans: Sequence[Sequence[Span]]) -> float:
    """The share of the time in which ranks have nothing to do."""
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1.0 - busy / (len(spans) * length_of(spans))


def length_of(spans: Sequence[Sequence[Span]]) -> float:
    """When the last rank is done."""
    return max(rank[-1].end for rank in spans)


def theoretical_bubble(word: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> float:
    """The idle share of a step under a schedule, were all stages equally long and sending free.

    Each rank has `virtual` stages. For GPipe and 1F1B over p ranks it is (p - 1) / (m + p - 1), interleaved
    (p - 1) / (v·m + p - 1); for the others it follows from the table.
    """
    table = make_table(word, ranks, micro_batches, virtual)
    return bubble_of(simulate(table, len(placement_of(word, ranks, virtual))))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One side of a message: the activations or gradients of one micro-batch from one stage to its neighbour."""

    kind: Kind
    """`F` for activations, `B` for gradients."""
    stage: int
    """The stage whose output (activations) or whose inputs' gradients these are."""
    micro_batch: int
    sends: bool
    peer: int


Program = Sequence[Action | Transfer]


def make_programs(table: Table, placement: Sequence[int]) -> list[Program]:
    """For each rank, its work with the messages in between.

    [Note: an order of messages that cannot hang]
    All ranks' work is laid out on one time axis, and both sides of a message are written down at the moment its
    content exists. So the two sides come at the same place in one common order, and ranks could exchange every
    message standing still until the other takes it. That matters: NCCL does stand still, and so does a rank that
    has to learn the shape of what will come.
    """
    stages = len(placement)
    programs: list[list[Action | Transfer]] = [[] for _ in table]
    events: list[tuple[float, int, int, Action]] = []
    for rank, spans in enumerate(simulate(table, stages)):
        for span in spans:
            events.append((span.start, 1, rank, span.action))
            events.append((span.end, 0, rank, span.action))
    for _, starts, rank, action in sorted(events, key=lambda event: event[:3]):
        if starts:
            programs[rank].append(action)
            continue
        neighbour = _neighbour(action, stages)
        if neighbour is None or placement[neighbour] == rank:
            continue
        kind = Kind.FORWARD if action.kind is Kind.FORWARD else Kind.BACKWARD
        peer = placement[neighbour]
        programs[rank].append(Transfer(kind, action.stage, action.micro_batch, True, peer))
        programs[peer].append(Transfer(kind, action.stage, action.micro_batch, False, rank))
    return list(programs)


def _neighbour(action: Action, stages: int) -> int | None:
    """The stage that waits for the result of an action."""
    if action.kind is Kind.WEIGHT:
        return None
    stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return stage if 0 <= stage < stages else None
