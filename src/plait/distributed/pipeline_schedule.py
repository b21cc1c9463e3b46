"""Pipeline schedules (GPipe, 1F1B, interleaved, zero-bubble, DualPipe): the order of work of every rank.

A *table* lists, for each rank, its forward and backward passes (*actions*) in order. A *program* also has the sends
and receives between them. `virtual` is the number of stages of each rank.

Tables come from `torch.distributed.pipelining`, except those of GPipe and 1F1B, which take a few lines here. Torch's
tables of these two need as many micro-batches as stages, or start the last rank at the wrong micro-batch.
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
"""The largest distance at which `nearest_legal` looks for a supported number of micro-batches."""


class ActionType(StrEnum):
    """What a rank computes for one micro-batch in one of its stages."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward pass."""
    INPUT = "I"
    """The first half of the backward pass: gradients of the stage's inputs, which the stage before needs."""
    WEIGHT = "W"
    """The second half of the backward pass: gradients of the weights, which no other stage needs."""


class Action(NamedTuple):
    """One entry of a table: what is computed, in which stage, for which micro-batch."""

    type: ActionType
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.type}{self.micro_batch}"


Table = Sequence[Sequence[Action]]
"""For each rank of the pipeline, its actions in order."""


def _any_number(ranks: int, micro_batches: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The properties of one schedule."""

    name: str
    make: Callable[[int, int, int], Table]
    """(number of ranks, number of micro-batches, stages of each rank) → the table."""
    placement: Literal["loop", "v"] = "loop"
    """`loop`: stage s is on rank s modulo the number of ranks. `v`: stages are on ranks 0 to n - 1, then n - 1 to 0."""
    least_virtual: int = 1
    most_virtual: int | None = None
    default_virtual: int = 1
    splits_backward: bool = False
    """Whether the table has `I` and `W` actions."""
    takes: Callable[[int, int], bool] = _any_number
    """(number of ranks, number of micro-batches) → whether the schedule supports them."""


def _gpipe(ranks: int, micro_batches: int, _virtual: int) -> Table:
    types = (ActionType.FORWARD, ActionType.BACKWARD)
    return [
        [Action(action_type, rank, index) for action_type in types for index in range(micro_batches)]
        for rank in range(ranks)
    ]


def _1f1b(ranks: int, micro_batches: int, _virtual: int) -> Table:
    table = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        work = [Action(ActionType.FORWARD, rank, index) for index in range(ahead)]
        for index in range(micro_batches):
            if ahead + index < micro_batches:
                work.append(Action(ActionType.FORWARD, rank, ahead + index))
            work.append(Action(ActionType.BACKWARD, rank, index))
        table.append(work)
    return table


def _from_torch(name: str) -> Callable[[int, int, int], Table]:
    """Return a function that makes the table of one of torch's schedules."""

    def make(ranks: int, micro_batches: int, virtual: int) -> Table:
        from torch.distributed.pipelining.schedules import get_schedule_class

        # torch's schedule is created from stages; to make its table it reads only these attributes of them.
        stage: Any = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
        made: Any = get_schedule_class(name)([stage] * virtual, micro_batches)
        return [[action for entry in made.pipeline_order[rank] for action in _flat(entry)] for rank in range(ranks)]

    return make


def _flat(entry: Any) -> list[Action]:
    if entry is None:  # idle
        return []
    if entry.sub_actions is not None:  # a forward and a backward pass side by side
        return [action for action in entry.sub_actions for action in _flat(action)]
    if entry.computation_type.value not in {action_type.value for action_type in ActionType}:  # actions of FSDP
        return []
    return [Action(ActionType(entry.computation_type.value), entry.stage_index, entry.microbatch_index)]


def _equal_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


SCHEDULES: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            ScheduleSpec("gpipe", _gpipe, most_virtual=1),
            ScheduleSpec("1f1b", _1f1b, most_virtual=1),
            ScheduleSpec(
                "interleaved_1f1b",
                _from_torch("Interleaved1F1B"),
                least_virtual=2,
                default_virtual=2,
                takes=_equal_rounds,
            ),
            ScheduleSpec("looped_bfs", _from_torch("LoopedBFS"), least_virtual=2, default_virtual=2),
            ScheduleSpec(
                "interleaved_zb", _from_torch("InterleavedZeroBubble"), splits_backward=True, takes=_equal_rounds
            ),
            ScheduleSpec(
                "zbv",
                _from_torch("ZBVZeroBubble"),
                placement="v",
                least_virtual=2,
                most_virtual=2,
                default_virtual=2,
                splits_backward=True,
            ),
            ScheduleSpec(
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
"""Every schedule by its name. `interleaved_zb` with one stage per rank is ZB-H1."""


def find_schedule(name: ScheduleName) -> ScheduleSpec:
    """Return the schedule of a name, or a user-provided one; an unknown name raises a `ConfigError` with all names."""
    if isinstance(name, CustomPipelineSchedule):
        return _custom_schedule(name)
    if name not in SCHEDULES:
        raise ConfigError(
            Problem("strategy.pipeline.schedule", f"{name!r} is not a schedule", f"There are: {', '.join(SCHEDULES)}.")
        )
    return SCHEDULES[name]


def _custom_schedule(custom: CustomPipelineSchedule) -> ScheduleSpec:
    """Return the spec of a user-provided schedule; see `SchedulePlanner`."""
    factory = load(custom, _KEY)
    virtual: Any = getattr(factory, "stages_per_rank", 1)
    placement: Any = getattr(factory, "placement", "loop")
    if type(virtual) is not int or virtual < 1 or placement not in ("loop", "v") or (placement == "v") > (virtual == 2):
        message = f"{str(custom)!r} has stages_per_rank {virtual!r} and placement {placement!r}"
        raise ConfigError(Problem(f"{_KEY}.type", message, "Use `loop` with 1 or more stages, or `v` with 2."))

    def make(ranks: int, micro_batches: int, _virtual: int) -> Table:
        given = {"ranks": ranks, "micro_batches": micro_batches}
        returned = call(factory, _KEY, name=str(custom), arguments=custom.arguments, **given)
        table = _parse_table(returned, str(custom))
        _check_table(table, placement_of(custom, ranks), micro_batches, str(custom))
        return table

    return ScheduleSpec(
        str(custom),
        make,
        placement=placement,
        least_virtual=virtual,
        most_virtual=virtual,
        default_virtual=virtual,
        splits_backward=bool(getattr(factory, "splits_backward", False)),
        takes=getattr(factory, "takes", _any_number),
    )


class SchedulePlanner(Protocol):
    """What `strategy.pipeline.schedule` may name: a function with these attributes, all of them optional."""

    stages_per_rank: int
    """The number of stages of each rank; by default 1."""
    placement: Literal["loop", "v"]
    """The ranks of the stages, as in `ScheduleSpec`; by default `loop`."""
    splits_backward: bool
    """Whether the table has `I` and `W` actions; by default False."""

    def takes(self, ranks: int, micro_batches: int) -> bool:
        """Return whether the schedule supports these numbers; by default it supports any."""

    def __call__(self, *, ranks: int, micro_batches: int) -> Sequence[Sequence[Action | str]]:
        """Return, for each rank, its `Action`s in order, or texts such as `1F0` (stage 1, forward, micro-batch 0)."""


def _parse_table(returned: Any, name: str) -> Table:
    """Return the table that a user-provided schedule returned, with each text parsed to an `Action`."""
    try:
        return [[_parse_action(entry) for entry in work] for work in returned]
    except (TypeError, ValueError) as error:
        message = f"{name!r} did not return a table: {error}"
        raise ConfigError(Problem(_KEY, message, "Return for each rank a list of actions such as '0F1'.")) from error


def _parse_action(entry: Any) -> Action:
    if isinstance(entry, Action):
        return entry
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", entry)
    if match is None:
        raise ValueError(f"{entry!r} is not an action")
    return Action(ActionType(match[2]), int(match[1]), int(match[3]))


def _check_table(table: Table, placement: Sequence[int], micro_batches: int, name: str) -> None:
    """Raise a `ConfigError` for a table with missing, duplicate or misplaced actions, or in which ranks deadlock."""

    def refuse(text: str) -> ConfigError:
        return ConfigError(Problem(_KEY, f"{name!r} with {micro_batches} micro-batches: {text}", "Correct its order."))

    ranks = max(placement) + 1
    if len(table) != ranks:
        raise refuse(f"actions for {len(table)} ranks, and there are {ranks}")
    done = Counter(action for work in table for action in work)
    for rank, work in enumerate(table):
        for action in work:
            if not (0 <= action.stage < len(placement) and 0 <= action.micro_batch < micro_batches):
                raise refuse(f"{action} has a stage or micro-batch that does not exist")
            if placement[action.stage] != rank:
                raise refuse(f"{action} is on rank {rank}, and its stage is on rank {placement[action.stage]}")
            if done[action] > 1:
                raise refuse(f"{action} appears {done[action]} times")
    for stage in range(len(placement)):
        for index in range(micro_batches):
            full, *halves = (
                done[Action(action_type, stage, index)]
                for action_type in (ActionType.BACKWARD, ActionType.INPUT, ActionType.WEIGHT)
            )
            if not done[Action(ActionType.FORWARD, stage, index)]:
                raise refuse(f"{Action(ActionType.FORWARD, stage, index)} is missing")
            if (full, *halves) not in ((1, 0, 0), (0, 1, 1)):
                raise refuse(f"micro-batch {index} does not have exactly one backward pass in stage {stage}")
    if (waiting := stuck_at(table, len(placement))) is not None:
        raise refuse(f"ranks deadlock, the first at {waiting}")


def resolve_virtual(name: ScheduleName, virtual: int | None = None) -> int:
    """Return the number of stages per rank: `virtual`, or the schedule's default if it is None.

    A number that the schedule does not support raises a `ConfigError`.
    """
    schedule = find_schedule(name)
    if virtual is None:
        return schedule.default_virtual
    most = schedule.most_virtual
    if virtual >= schedule.least_virtual and (most is None or virtual <= most):
        return virtual
    wanted = f"{schedule.least_virtual}" if most == schedule.least_virtual else f"{schedule.least_virtual} or more"
    remedy = f"set it to {schedule.default_virtual}"
    if virtual == 1:
        remedy += f", or use the schedule {'gpipe' if name == 'looped_bfs' else '1f1b'}"
    elif most == 1:
        remedy += ", or use the schedule interleaved_1f1b"
    raise ConfigError(
        Problem("strategy.pipeline.stages_per_rank", f"{virtual} stages per rank, but {name} has {wanted}", remedy)
    )


def placement_of(name: ScheduleName, ranks: int, virtual: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage."""
    per_rank = resolve_virtual(name, virtual)
    if find_schedule(name).placement == "loop":
        return tuple(stage % ranks for stage in range(ranks * per_rank))
    return (*range(ranks), *reversed(range(ranks)))


def is_legal(name: ScheduleName, ranks: int, micro_batches: int) -> bool:
    """Return whether a schedule supports this number of micro-batches."""
    return micro_batches >= 1 and find_schedule(name).takes(ranks, micro_batches)


def nearest_legal(name: ScheduleName, ranks: int, micro_batches: int) -> int:
    """Return the nearest supported number of micro-batches; of two equally near ones, the larger."""
    for distance in range(_FAR):
        for candidate in (micro_batches + distance, micro_batches - distance):
            if is_legal(name, ranks, candidate):
                return candidate
    message = f"{name} supports no number of micro-batches near {micro_batches} over {ranks} ranks"
    raise ConfigError(Problem(_KEY, message, "Use another schedule."))


def check_micro_batches(name: ScheduleName, ranks: int, micro_batches: int) -> None:
    """Raise a `ConfigError` with the nearest supported number if the schedule does not support `micro_batches`."""
    if is_legal(name, ranks, micro_batches):
        return
    why = (
        f"dualpipev needs at least {2 * ranks}, one for each stage"
        if name == "dualpipev"
        else f"{name} does not support this number"
        if isinstance(name, CustomPipelineSchedule)
        else f"{name} needs equal rounds of about {ranks}"
        if micro_batches > 0
        else "a step has at least one"
    )
    raise ConfigError(
        Problem(
            "strategy.pipeline.micro_batches",
            f"{micro_batches} micro-batches over {ranks} ranks: {why}",
            f"The nearest number that works is {nearest_legal(name, ranks, micro_batches)}.",
        )
    )


def check_pipeline(options: PipelineConfig, ranks: int, micro_batches: int) -> None:
    """Raise a `ConfigError` for numbers of stages or micro-batches that the schedule of a run does not support."""
    resolve_virtual(options.schedule, options.stages_per_rank)
    check_micro_batches(options.schedule, ranks, micro_batches)
    if isinstance(options.schedule, CustomPipelineSchedule):
        make_table(options.schedule, ranks, micro_batches)  # checks the table that the user's function returns


def make_table(name: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> Table:
    """Return the table of a schedule; `ConfigError` for numbers that it does not support."""
    per_rank = resolve_virtual(name, virtual)
    check_micro_batches(name, ranks, micro_batches)
    return find_schedule(name).make(ranks, micro_batches, per_rank)


def merge_backward(table: Table) -> Table:
    """Return the same table with full backward passes: each `I` becomes a `B`, and each `W` is removed."""
    return [
        [action._replace(type=ActionType.BACKWARD) if action.type is ActionType.INPUT else action for action in work]
        for work in ([a for a in rank if a.type is not ActionType.WEIGHT] for rank in table)
    ]


def forward_table(placement: Sequence[int], micro_batches: int) -> Table:
    """Return a table of forward passes only, for any placement.

    Of the micro-batches that could run next on a rank, the one at the latest stage does.
    """
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
            table[rank].append(Action(ActionType.FORWARD, reached[index], index))
            reached[index] += 1
    return table


# ---- simulation of a table: start times, idle time, and when messages are sent


COSTS: Mapping[ActionType, float] = MappingProxyType(
    {ActionType.FORWARD: 1.0, ActionType.BACKWARD: 2.0, ActionType.INPUT: 1.0, ActionType.WEIGHT: 1.0}
)
"""The time of each action, in forward passes: each half of a backward pass is assumed to take as long as one."""


class ActionSpan(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


def simulate(table: Table, stages: int, costs: Mapping[ActionType, float] = COSTS) -> list[list[ActionSpan]]:
    """Return the start and end of every action, by rank, if communication takes no time.

    Raise `AssertionError` for a table in which ranks deadlock.
    """
    spans = _lay_out(table, stages, costs)
    assert all(len(done) == len(work) for done, work in zip(spans, table, strict=True)), "the table deadlocks"
    return spans


def stuck_at(table: Table, stages: int) -> Action | None:
    """Return the first action that never begins because ranks deadlock; None if all actions run."""
    spans = _lay_out(table, stages, COSTS)
    return next((work[len(done)] for done, work in zip(spans, table, strict=True) if len(done) < len(work)), None)


def _lay_out(table: Table, stages: int, costs: Mapping[ActionType, float]) -> list[list[ActionSpan]]:
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
                free[rank] = done[action] = start + costs[action.type]
                spans[rank].append(ActionSpan(action, start, free[rank]))
                progress = True
    return spans


def _ready_at(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """Return when all inputs of an action are ready; None if an action that computes one has no end time yet."""
    action_type, stage, index = action
    if action_type is ActionType.FORWARD:
        return 0.0 if stage == 0 else done.get(Action(ActionType.FORWARD, stage - 1, index))
    if action_type is ActionType.WEIGHT:
        return done.get(Action(ActionType.INPUT, stage, index))
    forward_end = done.get(Action(ActionType.FORWARD, stage, index))
    if forward_end is None or stage == stages - 1:
        return forward_end
    for other in (ActionType.BACKWARD, ActionType.INPUT):
        next_end = done.get(Action(other, stage + 1, index))
        if next_end is not None:
            return max(forward_end, next_end)
    return None


def bubble_of(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """Return the bubble: the share of the time in which ranks are idle."""
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return 1.0 - busy / (len(spans) * length_of(spans))


def length_of(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """Return when the last rank is done."""
    return max(rank[-1].end for rank in spans)


def theoretical_bubble(name: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> float:
    """Return the bubble of a schedule if stages take equally long and communication takes no time.

    With p ranks, m micro-batches and v stages per rank it is (p - 1) / (m + p - 1) for GPipe and 1F1B, and
    (p - 1) / (v·m + p - 1) for interleaved 1F1B. It is computed by simulating the table.
    """
    table = make_table(name, ranks, micro_batches, virtual)
    return bubble_of(simulate(table, len(placement_of(name, ranks, virtual))))


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """A send or a receive: the activations or gradients of one micro-batch, from one stage to its neighbour."""

    type: ActionType
    """`F` for activations, `B` for gradients."""
    stage: int
    """The stage that has computed them: activations are its output, gradients those of its inputs."""
    micro_batch: int
    sends: bool
    peer: int


Program = Sequence[Action | StageTransfer]


def make_programs(table: Table, placement: Sequence[int]) -> list[Program]:
    """Return, for each rank, its program: its actions, with the sends and receives between them.

    [Note: an order of messages that cannot hang]
    All actions are simulated on one time axis. The send and the receive of a message are both placed at the time at
    which its tensors have been computed. So all ranks have their messages in one common order, without deadlock
    even if each send blocks until the peer receives. That is needed: sends of NCCL do block, and so does a rank that
    waits for the spec of its next input.
    """
    stages = len(placement)
    programs: list[list[Action | StageTransfer]] = [[] for _ in table]
    events: list[tuple[float, int, int, Action]] = []
    for rank, spans in enumerate(simulate(table, stages)):
        for span in spans:
            events.append((span.start, 1, rank, span.action))
            events.append((span.end, 0, rank, span.action))
    for _, is_start, rank, action in sorted(events, key=lambda event: event[:3]):
        if is_start:
            programs[rank].append(action)
            continue
        neighbour = _neighbour(action, stages)
        if neighbour is None or placement[neighbour] == rank:
            continue
        action_type = ActionType.FORWARD if action.type is ActionType.FORWARD else ActionType.BACKWARD
        peer = placement[neighbour]
        programs[rank].append(StageTransfer(action_type, action.stage, action.micro_batch, True, peer))
        programs[peer].append(StageTransfer(action_type, action.stage, action.micro_batch, False, rank))
    return list(programs)


def _neighbour(action: Action, stages: int) -> int | None:
    """Return the stage that needs the result of an action; None if no other stage does."""
    if action.type is ActionType.WEIGHT:
        return None
    stage = action.stage + (1 if action.type is ActionType.FORWARD else -1)
    return stage if 0 <= stage < stages else None


# ---- a schedule as SVG: one row per rank, one box per action, gaps where a rank is idle


_UNIT, _ROW, _LEFT, _TOP, _BOTTOM = 24, 30, 64, 54, 44
_LABELS = {
    ActionType.FORWARD: "forward",
    ActionType.BACKWARD: "backward",
    ActionType.INPUT: "backward, inputs",
    ActionType.WEIGHT: "backward, weights",
}
_HUES = {ActionType.FORWARD: 215, ActionType.BACKWARD: 145, ActionType.INPUT: 175, ActionType.WEIGHT: 35}

_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 11px; --ink: #1c1d1f; --soft: #5f6066; --idle: #ecebe6; }
text { fill: var(--ink); } .soft { fill: var(--soft); } .head { font-size: 14px; font-weight: 600; }
.idle { fill: var(--idle); } .box { stroke: #fff; stroke-width: 1; } .box + text { fill: #10131a; }
@media (prefers-color-scheme: dark) { svg { --ink: #ececea; --soft: #a9aab0; --idle: #26282c; }
  .box { stroke: #121315; } }
"""


def draw_schedule(name: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> str:
    """Return a schedule over `ranks` ranks, each with `virtual` stages, as the text of an SVG.

    Each box is an action. It shows the number of its micro-batch, and is darker for later stages of the rank; its
    tooltip is the full name of the action. A backward pass is drawn twice as long as a forward pass.
    """
    per_rank = resolve_virtual(name, virtual)
    placement = placement_of(name, ranks, virtual)
    spans = simulate(make_table(name, ranks, micro_batches, virtual), len(placement))
    length = length_of(spans)
    width = _LEFT + round(length * _UNIT) + 16
    height = _TOP + ranks * _ROW + _BOTTOM
    many = f", {per_rank} stages each" if per_rank > 1 else ""
    title = f"{name}: {ranks} ranks{many}, {micro_batches} micro-batches, {bubble_of(spans):.1%} idle"
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="head" x="8" y="24">{escape(title)}</text>',
    ]
    depth = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    for rank, row in enumerate(spans):
        y = _TOP + rank * _ROW
        elements.append(f'<text class="soft" x="8" y="{y + 17}">rank {rank}</text>')
        elements.append(
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{length * _UNIT:g}" height="{_ROW - 4}">'
            f"<title>idle</title></rect>"
        )
        elements += [_box(span, y, depth[span.action.stage], per_rank) for span in row]
    elements += _legend(spans, height - 18)
    elements.append("</svg>")
    return "\n".join(elements)


def _box(span: ActionSpan, y: int, depth: int, per_rank: int) -> str:
    action = span.action
    x = _LEFT + span.start * _UNIT
    lightness = 76 - 16 * depth / max(per_rank - 1, 1)
    where = f"stage {action.stage}, " if per_rank > 1 else ""
    label = f"{action}: {where}micro-batch {action.micro_batch}, {_LABELS[action.type]}"
    width = (span.end - span.start) * _UNIT
    return (
        f'<g><title>{escape(label)}</title><rect class="box" x="{x:g}" y="{y}" width="{width:g}" '
        f'height="{_ROW - 4}" rx="3" fill="hsl({_HUES[action.type]} 60% {lightness:g}%)"/>'
        f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{action.micro_batch}</text></g>'
    )


def _legend(spans: Sequence[Sequence[ActionSpan]], y: int) -> list[str]:
    used = {span.action.type for row in spans for span in row}
    elements, x = [], _LEFT
    for action_type in ActionType:
        if action_type not in used:
            continue
        label = f"{action_type}: {_LABELS[action_type]}"
        elements.append(
            f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="hsl({_HUES[action_type]} 60% 76%)"/>'
        )
        elements.append(f'<text class="soft" x="{x + 17}" y="{y}">{label}</text>')
        x += 34 + 6 * len(label)
    elements.append(f'<rect class="idle" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
    elements.append(f'<text class="soft" x="{x + 17}" y="{y}">idle</text>')
    return elements
