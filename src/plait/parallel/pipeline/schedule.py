"""Schedules by their words: which number of stages and micro-batches each takes, and the order of work it gives.

The order comes from `torch.distributed.pipelining`, except for the two schedules that fit in a few lines: GPipe
and 1F1B. Theirs in torch ask for as many micro-batches as stages, or start the last rank at the wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

from plait.config import PipelineConfig
from plait.errors import ConfigError, Problem


class Kind(StrEnum):
    """What a rank does to one micro-batch in one of its stages."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT = "I"
    """The part of the backward pass that the stage before waits for: gradients of the inputs."""
    WEIGHT = "W"
    """The part that nobody waits for: gradients of the weights."""


class Action(NamedTuple):
    """One entry of a table."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = Sequence[Sequence[Action]]
"""For each rank of the pipeline, its work in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is particular to one schedule."""

    word: str
    torch_name: str | None
    """Its class in torch, where the table comes from there."""
    placement: Literal["loop", "v"] = "loop"
    """Whether stage s lies on rank s modulo the ranks, or goes up the ranks and down again."""
    least_virtual: int = 1
    most_virtual: int | None = None
    default_virtual: int = 1
    in_rounds: bool = False
    """Micro-batches are worked off in rounds of equal size, of about as many as there are ranks."""
    splits_backward: bool = False
    """Uses `I` and `W`."""


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.word: schedule
        for schedule in (
            Schedule("gpipe", None, most_virtual=1),
            Schedule("1f1b", None, most_virtual=1),
            Schedule("interleaved_1f1b", "Interleaved1F1B", least_virtual=2, default_virtual=2, in_rounds=True),
            Schedule("looped_bfs", "LoopedBFS", least_virtual=2, default_virtual=2),
            Schedule("interleaved_zb", "InterleavedZeroBubble", in_rounds=True, splits_backward=True),
            Schedule(
                "zbv",
                "ZBVZeroBubble",
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
            ),
            Schedule(
                "dualpipev",
                "DualPipeV",
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
            ),
        )
    }
)
"""Every schedule by its word. `interleaved_zb` with one stage a rank is ZB-H1."""


def find_schedule(word: str) -> Schedule:
    """The schedule of a word, or an error that lists the words."""
    if word not in SCHEDULES:
        raise ConfigError(
            Problem("strategy.pipeline.schedule", f"{word!r} is no schedule", f"There are: {', '.join(SCHEDULES)}.")
        )
    return SCHEDULES[word]


def resolve_virtual(word: str, virtual: int | None = None) -> int:
    """How many stages each rank has: the schedule's own number where none is given."""
    schedule = find_schedule(word)
    if virtual is None:
        return schedule.default_virtual
    most = schedule.most_virtual
    if virtual >= schedule.least_virtual and (most is None or virtual <= most):
        return virtual
    wanted = f"{schedule.least_virtual}" if most == schedule.least_virtual else f"{schedule.least_virtual} or more"
    remedy = f"set it to {schedule.default_virtual}"
    if virtual == 1:
        remedy += f", or use the schedule {'gpipe' if word == 'looped_bfs' else '1f1b'}"
    elif most == 1:
        remedy += ", or use the schedule interleaved_1f1b"
    raise ConfigError(
        Problem("strategy.pipeline.stages_per_rank", f"{virtual} stages a rank, but {word} has {wanted}", remedy)
    )


def placement_of(word: str, ranks: int, virtual: int | None = None) -> tuple[int, ...]:
    """The rank of each stage."""
    per_rank = resolve_virtual(word, virtual)
    if find_schedule(word).placement == "loop":
        return tuple(stage % ranks for stage in range(ranks * per_rank))
    return (*range(ranks), *reversed(range(ranks)))


def is_legal(word: str, ranks: int, micro_batches: int) -> bool:
    """Whether a schedule can work with this number of micro-batches."""
    schedule = find_schedule(word)
    if micro_batches < 1:
        return False
    if word == "dualpipev":
        return micro_batches >= 2 * ranks
    return not schedule.in_rounds or micro_batches % max(1, micro_batches // ranks) == 0


def nearest_legal(word: str, ranks: int, micro_batches: int) -> int:
    """The legal number of micro-batches that is nearest; of two, the larger."""
    distance = 0
    while True:
        for candidate in (micro_batches + distance, micro_batches - distance):
            if is_legal(word, ranks, candidate):
                return candidate
        distance += 1


def check_micro_batches(word: str, ranks: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot work with, naming the nearest that it can."""
    if is_legal(word, ranks, micro_batches):
        return
    why = (
        f"dualpipev needs at least {2 * ranks}, one for each stage"
        if word == "dualpipev"
        else f"{word} works in equal rounds of about {ranks}"
        if micro_batches > 0
        else "a step has at least one"
    )
    raise ConfigError(
        Problem(
            "strategy.pipeline.micro_batches",
            f"{micro_batches} micro-batches over {ranks} ranks: {why}",
            f"The nearest number that works is {nearest_legal(word, ranks, micro_batches)}.",
        )
    )


def check_pipeline(options: PipelineConfig, ranks: int, micro_batches: int) -> None:
    """Refuse stages or micro-batches that the schedule of a run cannot work with."""
    resolve_virtual(options.schedule, options.stages_per_rank)
    check_micro_batches(options.schedule, ranks, micro_batches)


def make_table(word: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Table:
    """The order of work of every rank."""
    schedule = find_schedule(word)
    per_rank = resolve_virtual(word, virtual)
    check_micro_batches(word, ranks, micro_batches)
    if word == "gpipe":
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if word == "1f1b":
        return [_1f1b(rank, ranks, micro_batches) for rank in range(ranks)]
    assert schedule.torch_name is not None
    return _from_torch(schedule.torch_name, ranks, micro_batches, per_rank)


def _gpipe(rank: int, micro_batches: int) -> list[Action]:
    return [Action(kind, rank, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in range(micro_batches)]


def _1f1b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - rank - 1, micro_batches)
    work = [Action(Kind.FORWARD, rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            work.append(Action(Kind.FORWARD, rank, ahead + index))
        work.append(Action(Kind.BACKWARD, rank, index))
    return work


def _from_torch(name: str, ranks: int, micro_batches: int, virtual: int) -> Table:
    from torch.distributed.pipelining.schedules import get_schedule_class

    # A schedule is made for stages, of which it reads no more than this to make its table.
    stage: Any = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
    made: Any = get_schedule_class(name)([stage] * virtual, micro_batches)
    return [[action for entry in made.pipeline_order[rank] for action in _flat(entry)] for rank in range(ranks)]


def _flat(entry: Any) -> list[Action]:
    if entry is None:  # an idle moment
        return []
    if entry.sub_actions is not None:  # a forward and a backward pass side by side
        return [action for part in entry.sub_actions for action in _flat(part)]
    if entry.computation_type.value not in {kind.value for kind in Kind}:  # the sharding's own
        return []
    return [Action(Kind(entry.computation_type.value), entry.stage_index, entry.microbatch_index)]


def merge_backward(table: Table) -> Table:
    """The same table with whole backward passes: each `I` becomes a `B`, and its `W` is gone."""
    return [
        [action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT else action for action in work]
        for work in ([a for a in rank if a.kind is not Kind.WEIGHT] for rank in table)
    ]


def forward_table(placement: Sequence[int], micro_batches: int) -> Table:
    """Forward passes alone, for any placement: whoever is free takes what has come furthest."""
    ranks = max(placement) + 1
    table: list[list[Action]] = [[] for _ in range(ranks)]
    reached = [0] * micro_batches  # the stage that each micro-batch waits for
    while any(stage < len(placement) for stage in reached):
        ready: dict[int, int] = {}
        for index, stage in enumerate(reached):
            if stage < len(placement):
                rank = placement[stage]
                if rank not in ready or stage > reached[ready[rank]]:
                    ready[rank] = index
        for rank, index in ready.items():
            table[rank].append(Action(Kind.FORWARD, reached[index], index))
            reached[index] += 1
    return table
