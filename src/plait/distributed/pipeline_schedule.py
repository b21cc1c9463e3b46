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
from xml.sax.saxutils import escape

from plait.config import CustomPipelineSchedule, PipelineConfig
from plait.errors import ConfigError, Problem
from plait.plugins import call, load

ScheduleName = str | CustomPipelineSchedule
_KEY = "strategy.pipeline.schedule"
_FAR = 10_000
"""No schedule wants more micro-batches than that."""


class ActionKind(StrEnum):
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

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Table = Sequence[Sequence[Action]]
"""For each rank of the pipeline, its work in order."""


def _any_number(ranks: int, micro_batches: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PipelineScheduleKind:
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
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [[Action(kind, rank, index) for kind in kinds for index in range(micro_batches)] for rank in range(ranks)]


def _1f1b(ranks: int, micro_batches: int, _virtual: int) -> Table:
    return [_1f1b_of(rank, ranks, micro_batches) for rank in range(ranks)]


def _1f1b_of(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - rank - 1, micro_batches)
    work = [Action(ActionKind.FORWARD, rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            work.append(Action(ActionKind.FORWARD, rank, ahead + index))
        work.append(Action(ActionKind.BACKWARD, rank, index))
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
    if entry.computation_type.value not in {kind.value for kind in ActionKind}:  # the sharding's own
        return []
    return [Action(ActionKind(entry.computation_type.value), entry.stage_index, entry.microbatch_index)]


def _equal_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


SCHEDULES: Mapping[str, PipelineScheduleKind] = MappingProxyType(
    {
        schedule.word: schedule
        for schedule in (
            PipelineScheduleKind("gpipe", _gpipe, most_virtual=1),
            PipelineScheduleKind("1f1b", _1f1b, most_virtual=1),
            PipelineScheduleKind(
                "interleaved_1f1b",
                _from_torch("Interleaved1F1B"),
                least_virtual=2,
                default_virtual=2,
                takes=_equal_rounds,
            ),
            PipelineScheduleKind("looped_bfs", _from_torch("LoopedBFS"), least_virtual=2, default_virtual=2),
            PipelineScheduleKind(
                "interleaved_zb", _from_torch("InterleavedZeroBubble"), splits_backward=True, takes=_equal_rounds
            ),
            PipelineScheduleKind(
                "zbv",
                _from_torch("ZBVZeroBubble"),
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
            ),
            PipelineScheduleKind(
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


def find_schedule(word: ScheduleName) -> PipelineScheduleKind:
    """The schedule of a word, or of one's own; else an error that lists the words."""
    if isinstance(word, CustomPipelineSchedule):
        return _own(word)
    if word not in SCHEDULES:
        raise ConfigError(
            Problem("strategy.pipeline.schedule", f"{word!r} is no schedule", f"There are: {', '.join(SCHEDULES)}.")
        )
    return SCHEDULES[word]


def _own(part: CustomPipelineSchedule) -> PipelineScheduleKind:
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

    return PipelineScheduleKind(
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
    return Action(ActionKind(found[2]), int(found[1]), int(found[3]))


def _check_table(table: Table, placement: Sequence[int], micro_batches: int, name: str) -> None:
    """Refuse a table that leaves out work, does it twice or elsewhere, or in which ranks wait for ever."""

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
            whole, *halves = (
                done[Action(kind, stage, index)] for kind in (ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)
            )
            if not done[Action(ActionKind.FORWARD, stage, index)]:
                raise refuse(f"{Action(ActionKind.FORWARD, stage, index)} is missing")
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
        if isinstance(word, CustomPipelineSchedule)
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
    if isinstance(options.schedule, CustomPipelineSchedule):
        make_table(options.schedule, ranks, micro_batches)  # which looks through it


def make_table(word: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> Table:
    """The order of work of every rank."""
    per_rank = resolve_virtual(word, virtual)
    check_micro_batches(word, ranks, micro_batches)
    return find_schedule(word).make(ranks, micro_batches, per_rank)


def merge_backward(table: Table) -> Table:
    """The same table with whole backward passes: each `I` becomes a `B`, and its `W` is gone."""
    return [
        [action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.INPUT else action for action in work]
        for work in ([a for a in rank if a.kind is not ActionKind.WEIGHT] for rank in table)
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
            table[rank].append(Action(ActionKind.FORWARD, reached[index], index))
            reached[index] += 1
    return table


# What a table means in time: who waits for whom, how long nobody works, and when what is sent.


COSTS: Mapping[ActionKind, float] = MappingProxyType(
    {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.INPUT: 1.0, ActionKind.WEIGHT: 1.0}
)
"""The usual assumption: each half of a backward pass takes as long as the forward pass."""


class ActionSpan(NamedTuple):
    """An action, and from when to when it lasts."""

    action: Action
    start: float
    end: float


def simulate(table: Table, stages: int, costs: Mapping[ActionKind, float] = COSTS) -> list[list[ActionSpan]]:
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


def _laid_out(table: Table, stages: int, costs: Mapping[ActionKind, float]) -> list[list[ActionSpan]]:
    done: dict[Action, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in table]
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
                spans[rank].append(ActionSpan(action, start, free[rank]))
                progress = True
    return spans


def _ready_at(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """When all that an action needs is there; None where it is not known yet."""
    kind, stage, index = action
    if kind is ActionKind.FORWARD:
        return 0.0 if stage == 0 else done.get(Action(ActionKind.FORWARD, stage - 1, index))
    if kind is ActionKind.WEIGHT:
        return done.get(Action(ActionKind.INPUT, stage, index))
    own = done.get(Action(ActionKind.FORWARD, stage, index))
    if own is None or stage == stages - 1:
        return own
    for other in (ActionKind.BACKWARD, ActionKind.INPUT):
        after = done.get(Action(other, stage + 1, index))
        if after is not None:
            return max(own, after)
    return None


def bubble_of(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """The share of the time in which ranks have nothing to do."""
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1.0 - busy / (len(spans) * length_of(spans))


def length_of(spans: Sequence[Sequence[ActionSpan]]) -> float:
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
class StageTransfer:
    """One side of a message: the activations or gradients of one micro-batch from one stage to its neighbour."""

    kind: ActionKind
    """`F` for activations, `B` for gradients."""
    stage: int
    """The stage whose output (activations) or whose inputs' gradients these are."""
    micro_batch: int
    sends: bool
    peer: int


Program = Sequence[Action | StageTransfer]


def make_programs(table: Table, placement: Sequence[int]) -> list[Program]:
    """For each rank, its work with the messages in between.

    [Note: an order of messages that cannot hang]
    All ranks' work is laid out on one time axis, and both sides of a message are written down at the moment its
    content exists. So the two sides come at the same place in one common order, and ranks could exchange every
    message standing still until the other takes it. That matters: NCCL does stand still, and so does a rank that
    has to learn the shape of what will come.
    """
    stages = len(placement)
    programs: list[list[Action | StageTransfer]] = [[] for _ in table]
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
        kind = ActionKind.FORWARD if action.kind is ActionKind.FORWARD else ActionKind.BACKWARD
        peer = placement[neighbour]
        programs[rank].append(StageTransfer(kind, action.stage, action.micro_batch, True, peer))
        programs[peer].append(StageTransfer(kind, action.stage, action.micro_batch, False, rank))
    return list(programs)


def _neighbour(action: Action, stages: int) -> int | None:
    """The stage that waits for the result of an action."""
    if action.kind is ActionKind.WEIGHT:
        return None
    stage = action.stage + (1 if action.kind is ActionKind.FORWARD else -1)
    return stage if 0 <= stage < stages else None


# A schedule as a picture: one row a rank, one box an action, gaps where nobody works.


_UNIT, _ROW, _LEFT, _TOP, _BOTTOM = 24, 30, 64, 54, 44
_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward, inputs",
    ActionKind.WEIGHT: "backward, weights",
}
_HUES = {ActionKind.FORWARD: 215, ActionKind.BACKWARD: 145, ActionKind.INPUT: 175, ActionKind.WEIGHT: 35}

_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 11px; --ink: #1c1d1f; --soft: #5f6066; --idle: #ecebe6; }
text { fill: var(--ink); } .soft { fill: var(--soft); } .head { font-size: 14px; font-weight: 600; }
.idle { fill: var(--idle); } .box { stroke: #fff; stroke-width: 1; } .box + text { fill: #10131a; }
@media (prefers-color-scheme: dark) { svg { --ink: #ececea; --soft: #a9aab0; --idle: #26282c; }
  .box { stroke: #121315; } }
"""


def draw_schedule(word: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> str:
    """The SVG text of a schedule over so many ranks, each with `virtual` stages.

    A box bears the number of its micro-batch, and is darker the later its stage comes among those of the rank; its
    full name is shown under the pointer. A backward pass is drawn twice as long as a forward pass.
    """
    per_rank = resolve_virtual(word, virtual)
    placement = placement_of(word, ranks, virtual)
    spans = simulate(make_table(word, ranks, micro_batches, virtual), len(placement))
    length = length_of(spans)
    width = _LEFT + round(length * _UNIT) + 16
    height = _TOP + ranks * _ROW + _BOTTOM
    many = f", {per_rank} stages each" if per_rank > 1 else ""
    title = f"{word}: {ranks} ranks{many}, {micro_batches} micro-batches, {bubble_of(spans):.1%} idle"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="head" x="8" y="24">{escape(title)}</text>',
    ]
    depth = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    for rank, row in enumerate(spans):
        y = _TOP + rank * _ROW
        parts.append(f'<text class="soft" x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_px(length)}" height="{_ROW - 4}">'
            f"<title>idle</title></rect>"
        )
        parts += [_box(span, y, depth[span.action.stage], per_rank) for span in row]
    parts += _legend(spans, height - 18)
    parts.append("</svg>")
    return "\n".join(parts)


def _box(span: ActionSpan, y: int, depth: int, per_rank: int) -> str:
    action = span.action
    x = _LEFT + span.start * _UNIT
    lightness = 76 - 16 * depth / max(per_rank - 1, 1)
    where = f"stage {action.stage}, " if per_rank > 1 else ""
    words = f"{action}: {where}micro-batch {action.micro_batch}, {_WORDS[action.kind]}"
    width = (span.end - span.start) * _UNIT
    return (
        f'<g><title>{escape(words)}</title><rect class="box" x="{x:g}" y="{y}" width="{width:g}" '
        f'height="{_ROW - 4}" rx="3" fill="hsl({_HUES[action.kind]} 60% {lightness:g}%)"/>'
        f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{action.micro_batch}</text></g>'
    )


def _legend(spans: Sequence[Sequence[ActionSpan]], y: int) -> list[str]:
    used = {span.action.kind for row in spans for span in row}
    parts, x = [], _LEFT
    for kind in ActionKind:
        if kind not in used:
            continue
        word = f"{kind}: {_WORDS[kind]}"
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="hsl({_HUES[kind]} 60% 76%)"/>')
        parts.append(f'<text class="soft" x="{x + 17}" y="{y}">{word}</text>')
        x += 34 + 6 * len(word)
    parts.append(f'<rect class="idle" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
    parts.append(f'<text class="soft" x="{x + 17}" y="{y}">idle</text>')
    return parts


def _px(length: float) -> str:
    return f"{length * _UNIT:g}"
