"""Schedules by their words: which number of stages and micro-batches each takes, and the order of work it gives.

The order comes from `torch.distributed.pipelining`, except for the two schedules that fit in a few lines: GPipe
and 1F1B. Theirs in torch ask for as many micro-batches as stages, or start the last rank at the wrong one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

from plait.config import PipelineConfig, PipelineSchedulePart
from plait.errors import ConfigError, Problem
from plait.plugins import call, load

ScheduleName = str | PipelineSchedulePart
_KEY = "strategy.pipeline.schedule"
_FAR = 10_000
"""No schedule wants more micro-batches than that."""


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


def _any_number(ranks: int, micro_batches: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is particular to one schedule."""

    word: str
    make: Callable[[int, int, int], Table]
    """(ranks, micro-batches, stages of each rank) → the order of work of every rank."""
    placement: Literal["loop", "v"] = "loop"
    """Whether stage s lies on rank s modulo the ranks, or goes up the ranks and down again."""
    least_virtual: int = 1
    most_virtual: int | None = None
    default_virtual: int = 1
    splits_backward: bool = False
    """Uses `I` and `W`."""
    takes: Callable[[int, int], bool] = _any_number
    """Whether it can work with so many ranks and micro-batches."""


def _gpipe(ranks: int, micro_batches: int, _virtual: int) -> Table:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, rank, index) for kind in kinds for index in range(micro_batches)] for rank in range(ranks)]


def _1f1b(ranks: int, micro_batches: int, _virtual: int) -> Table:
    return [_1f1b_of(rank, ranks, micro_batches) for rank in range(ranks)]


def _1f1b_of(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - rank - 1, micro_batches)
    work = [Action(Kind.FORWARD, rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            work.append(Action(Kind.FORWARD, rank, ahead + index))
        work.append(Action(Kind.BACKWARD, rank, index))
    return work


def _from_torch(name: str) -> Callable[[int, int, int], Table]:
    """What makes the table of one of torch's schedules."""

    def make(ranks: int, micro_batches: int, virtual: int) -> Table:
        from torch.distributed.pipelining.schedules import get_schedule_class

        # A schedule is made for stages, of which it reads no more than this to make its table.
        stage: Any = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
        made: Any = get_schedule_class(name)([stage] * virtual, micro_batches)
        return [[action for entry in made.pipeline_order[rank] for action in _flat(entry)] for rank in range(ranks)]

    return make


def _flat(entry: Any) -> list[Action]:
    if entry is None:  # an idle moment
        return []
    if entry.sub_actions is not None:  # a forward and a backward pass side by side
        return [action for part in entry.sub_actions for action in _flat(part)]
    if entry.computation_type.value not in {kind.value for kind in Kind}:  # the sharding's own
        return []
    return [Action(Kind(entry.computation_type.value), entry.stage_index, entry.microbatch_index)]


def _equal_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.word: schedule
        for schedule in (
            Schedule("gpipe", _gpipe, most_virtual=1),
            Schedule("1f1b", _1f1b, most_virtual=1),
            Schedule(
                "interleaved_1f1b",
                _from_torch("Interleaved1F1B"),
                least_virtual=2,
                default_virtual=2,
                takes=_equal_rounds,
            ),
            Schedule("looped_bfs", _from_torch("LoopedBFS"), least_virtual=2, default_virtual=2),
            Schedule("interleaved_zb", _from_torch("InterleavedZeroBubble"), splits_backward=True, takes=_equal_rounds),
            Schedule(
                "zbv",
                _from_torch("ZBVZeroBubble"),
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
            ),
            Schedule(
                "dualpipev",
                _from_torch("DualPipeV"),
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
                takes=lambda ranks, micro_batches: micro_batches >= 2 * ranks,
            ),
        )
    }
)
"""Every schedule by its word. `interleaved_zb` with one stage a rank is ZB-H1."""


def find_schedule(word: ScheduleName) -> Schedule:
    """The schedule of a word, or of one's own; else an error that lists the words."""
    if isinstance(word, PipelineSchedulePart):
        return _own(word)
    if word not in SCHEDULES:
        raise ConfigError(
            Problem("strategy.pipeline.schedule", f"{word!r} is no schedule", f"There are: {', '.join(SCHEDULES)}.")
        )
    return SCHEDULES[word]


def _own(part: PipelineSchedulePart) -> Schedule:
    """A schedule of the user's own; see `OwnSchedule`."""
    made = load(part, _KEY)
    virtual: Any = getattr(made, "stages_per_rank", 1)
    placement: Any = getattr(made, "placement", "loop")
    if type(virtual) is not int or virtual < 1 or placement not in ("loop", "v") or (placement == "v") > (virtual == 2):
        message = f"{str(part)!r} has stages_per_rank {virtual!r} and placement {placement!r}"
        raise ConfigError(Problem(f"{_KEY}.type", message, "It is `loop` with 1 or more stages, or `v` with 2."))

    def make(ranks: int, micro_batches: int, _virtual: int) -> Table:
        given = {"ranks": ranks, "micro_batches": micro_batches}
        answer = call(made, _KEY, name=str(part), arguments=part.arguments, **given)
        table = _read_table(answer, str(part))
        _check_table(table, placement_of(part, ranks), micro_batches, str(part))
        return table

    return Schedule(
        str(part),
        make,
        placement=placement,
        least_virtual=virtual,
        most_virtual=virtual,
        default_virtual=virtual,
        splits_backward=bool(getattr(made, "splits_backward", False)),
        takes=getattr(made, "takes", _any_number),
    )


class OwnSchedule(Protocol):
    """What `strategy.pipeline.schedule` may name: a function, which may have these attributes."""

    stages_per_rank: int
    """Absent: 1."""
    placement: Literal["loop", "v"]
    """As in `Schedule`. Absent: `loop`."""
    splits_backward: bool
    """Whether it uses `I` and `W`. Absent: no."""

    def takes(self, ranks: int, micro_batches: int) -> bool:
        """Whether it can work with so many. Absent: with any number."""

    def __call__(self, *, ranks: int, micro_batches: int) -> Sequence[Sequence[Action | str]]:
        """For each rank its work in order: `Action`s, or texts such as `1F0` (stage 1, forward, micro-batch 0)."""


def _read_table(answer: Any, name: str) -> Table:
    """The table that a schedule of the user's own returned."""
    try:
        return [[_read_action(entry) for entry in work] for work in answer]
    except (TypeError, ValueError) as error:
        message = f"{name!r} returned what is no table: {error}"
        raise ConfigError(Problem(_KEY, message, "Return for each rank a list of actions such as '0F1'.")) from error


def _read_action(entry: Any) -> Action:
    if isinstance(entry, Action):
        return entry
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", entry)
    if found is None:
        raise ValueError(f"{entry!r} is no action")
    return Action(Kind(found[2]), int(found[1]), int(found[3]))


def _check_table(table: Table, placement: Sequence[int], micro_batches: int, name: str) -> None:
    """Refuse a table that leaves out work, does it twice or elsewhere, or in which ranks wait for ever."""
    from plait.parallel.pipeline.timeline import stuck_at

    def refuse(text: str) -> ConfigError:
        return ConfigError(Problem(_KEY, f"{name!r} with {micro_batches} micro-batches: {text}", "Correct its order."))

    ranks = max(placement) + 1
    if len(table) != ranks:
        raise refuse(f"work for {len(table)} ranks, and there are {ranks}")
    done = Counter(action for work in table for action in work)
    for rank, work in enumerate(table):
        for action in work:
            if not (0 <= action.stage < len(placement) and 0 <= action.micro_batch < micro_batches):
                raise refuse(f"{action} is of no stage or micro-batch that exists")
            if placement[action.stage] != rank:
                raise refuse(f"rank {rank} is to do {action}, and that stage lies on rank {placement[action.stage]}")
            if done[action] > 1:
                raise refuse(f"{action} is done {done[action]} times")
    for stage in range(len(placement)):
        for index in range(micro_batches):
            whole, *halves = (done[Action(kind, stage, index)] for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
            if not done[Action(Kind.FORWARD, stage, index)]:
                raise refuse(f"{Action(Kind.FORWARD, stage, index)} is missing")
            if (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
                raise refuse(f"the backward pass of micro-batch {index} in stage {stage} is not done once")
    if (waiting := stuck_at(table, len(placement))) is not None:
        raise refuse(f"ranks wait for each other for ever, the first at {waiting}")


def resolve_virtual(word: ScheduleName, virtual: int | None = None) -> int:
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


def placement_of(word: ScheduleName, ranks: int, virtual: int | None = None) -> tuple[int, ...]:
    """The rank of each stage."""
    per_rank = resolve_virtual(word, virtual)
    if find_schedule(word).placement == "loop":
        return tuple(stage % ranks for stage in range(ranks * per_rank))
    return (*range(ranks), *reversed(range(ranks)))


def is_legal(word: ScheduleName, ranks: int, micro_batches: int) -> bool:
    """Whether a schedule can work with this number of micro-batches."""
    return micro_batches >= 1 and find_schedule(word).takes(ranks, micro_batches)


def nearest_legal(word: ScheduleName, ranks: int, micro_batches: int) -> int:
    """The legal number of micro-batches that is nearest; of two, the larger."""
    for distance in range(_FAR):
        for candidate in (micro_batches + distance, micro_batches - distance):
            if is_legal(word, ranks, candidate):
                return candidate
    message = f"{word} takes no number of micro-batches near {micro_batches} over {ranks} ranks"
    raise ConfigError(Problem(_KEY, message, "Use another schedule."))


def check_micro_batches(word: ScheduleName, ranks: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot work with, naming the nearest that it can."""
    if is_legal(word, ranks, micro_batches):
        return
    why = (
        f"dualpipev needs at least {2 * ranks}, one for each stage"
        if word == "dualpipev"
        else f"{word} does not take so many"
        if isinstance(word, PipelineSchedulePart)
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
    if isinstance(options.schedule, PipelineSchedulePart):
        make_table(options.schedule, ranks, micro_batches)  # which looks through it


def make_table(word: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> Table:
    """The order of work of every rank."""
    per_rank = resolve_virtual(word, virtual)
    check_micro_batches(word, ranks, micro_batches)
    return find_schedule(word).make(ranks, micro_batches, per_rank)


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
